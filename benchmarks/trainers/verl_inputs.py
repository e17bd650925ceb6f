# SPDX-License-Identifier: BSD-3-Clause
"""What is run in verl, and what comes of it: a case is a configuration of verl with its random model and batch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from models import CONFIGURATIONS
from shapes import parse
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Model:
    """A model of random weights (seed 0, bf16), with a tokenizer that nothing here calls.

    Attributes:
        others: what else its configuration has, as JSON. If that has a "text_config", the fields above go there.
        has_file: of weights. Without one a worker draws them where verl would load them, in the type that it asks for:
            `drawn`. To write and load 28 GB takes longer than to measure.
    """

    family: str = "qwen3"
    layers: int = 2
    hidden: int = 64
    intermediate: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocabulary: int = 512
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    others: str = "{}"
    has_file: bool = True

    def config(self) -> Any:
        from transformers import AutoConfig

        own: dict[str, Any] = dict(
            num_hidden_layers=self.layers, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, head_dim=self.head_dim,
            vocab_size=self.vocabulary, tie_word_embeddings=self.tied, max_position_embeddings=1 << 17,
            bos_token_id=None, eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        if self.experts:
            own |= dict(num_experts=self.experts, num_experts_per_tok=self.experts_per_token, norm_topk_prob=True)
            own["moe_intermediate_size"] = self.intermediate
        others = json.loads(self.others)
        if "text_config" in others:
            others["text_config"] = own | others["text_config"]
            return AutoConfig.for_model(self.family, **others)
        return AutoConfig.for_model(self.family, **own | others)

    def save(self, folder: Path) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

        config = self.config()
        is_multimodal = type(config) in AutoModelForImageTextToText._model_mapping
        auto = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
        if self.has_file:
            draw(auto, config, torch.bfloat16).save_pretrained(folder)
        else:
            config.architectures = [auto._model_mapping[type(config)].__name__]
            config.save_pretrained(folder)
        words = WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>")
        special = dict(eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(folder)


# Of Qwen3-30B-A3B as many layers as 80 GB on each of four GPUs should hold, by 16 bytes a parameter.
MODELS = {name: Model(**facts) for name, facts in CONFIGURATIONS["trainers"].items()}


def draw(auto: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model on a GPU where there is one; where tensors are made on "meta" it stays there."""
    torch.manual_seed(0)
    is_meta = torch.empty(0).is_meta
    with torch.device("meta" if is_meta else "cuda" if torch.cuda.is_available() else "cpu"):
        return auto.from_config(config, dtype=dtype)


@contextlib.contextmanager
def drawn(model: Model) -> Iterator[None]:
    """Who loads a model that has no file of weights draws them."""
    from transformers import AutoModelForCausalLM

    def load(auto: Any, *_: Any, config: Any, torch_dtype: torch.dtype, **__: Any) -> Any:
        return draw(auto, config, torch_dtype)

    with contextlib.ExitStack() as changes:
        if not model.has_file:
            changes.enter_context(patch.object(AutoModelForCausalLM, "from_pretrained", classmethod(load)))
        yield


class Sample(NamedTuple):
    uid: str
    prompt: Tensor
    response: Tensor
    mask: Tensor  # of the response tokens that are trained
    advantage: float
    others: Mapping[str, Any] = MappingProxyType({})  # what else a batch has of it, by verl's names


@dataclass(frozen=True)
class Batch:
    """`prompts` times `responses` samples, lengths L uniform in [shortest * L, L]; `trained`: share of their tokens."""

    prompts: int = 2
    responses: int = 4
    prompt_tokens: int = 48
    response_tokens: int = 24
    shortest: float = 0.3
    trained: float = 1.0
    shuffled: bool = False

    def samples(self, vocabulary: int) -> list[Sample]:
        source = torch.Generator().manual_seed(0)

        def length(most: int) -> int:
            return int(torch.randint(max(1, int(self.shortest * most)), most + 1, (), generator=source))

        def tokens(count: int) -> Tensor:
            # Those of padding and end included: what is padding, masks and offsets say.
            return torch.randint(vocabulary, (count,), generator=source)

        found = []
        for index in range(self.prompts):
            prompt = tokens(length(self.prompt_tokens))
            for _ in range(self.responses):
                response = tokens(length(self.response_tokens))
                mask = (torch.rand(len(response), generator=source) < self.trained).long()
                mask[-1] = 1
                advantage = float(torch.randn((), generator=source))
                found.append(Sample(f"prompt{index}", prompt, response, mask, advantage))
        if not self.shuffled:
            return found
        return [found[i] for i in torch.randperm(len(found), generator=source)]


@dataclass(frozen=True)
class TreeBatch(Batch):
    """Rollouts of agents that branch: a sample for each leaf of a tree of shapes.py, whose root is their prompt."""

    tree: str = "tiny"

    @classmethod
    def of(cls, tree: str) -> TreeBatch:
        shape = parse(f"tree-{tree}")
        longest = max(shape.ends) - shape.nodes[0][0]
        return cls(1, len(shape.leaves), shape.nodes[0][0], longest, shortest=1.0, tree=tree)

    def samples(self, vocabulary: int) -> list[Sample]:
        source = torch.Generator().manual_seed(0)
        shape = parse(f"tree-{self.tree}")
        tokens = [torch.randint(vocabulary, (length,), generator=source) for length, _ in shape.nodes]
        found = []
        for leaf in shape.leaves:
            root, *turns = shape.paths[leaf]
            response = torch.cat([tokens[one] for one in turns])
            advantage = float(torch.randn((), generator=source))
            found.append(Sample("prompt0", tokens[root], response, torch.ones_like(response), advantage))
        return found


@dataclass(frozen=True)
class Case:
    """One configuration of verl and what it is given.

    Attributes:
        shares: whether the plug-in is on. A process that has loaded it never runs verl's own engines again.
        micro, tokens: samples a micro-batch, or its token budget (dynamic micro-batches).
        role: actor, ref or critic.
        balance: of samples over ranks: "groups" as the plug-in does, "lengths" as verl's v1 trainer does, "none".
        trainer: v1 (jagged) or v0 (padded) form of the batch.
        overrides: of verl's config, as on its command line.
        learning_rate: at 0 weights stay as they are, and the next case has the same worker if it differs in
            micro-batches only.
        warm: calls of so many of each rank's samples come before those that are recorded.
        once: the plug-in's prompt_once; None: its default.
    """

    name: str
    shares: bool = False
    model: Model = field(default_factory=Model)
    batch: Batch = field(default_factory=Batch)
    micro: int | None = None
    tokens: int | None = None
    engine: str = "fsdp2"
    sp: int = 1
    role: str = "actor"
    balance: str = "lengths"
    trainer: str = "v1"
    attention: str = "flash_attention_2"
    overrides: tuple[str, ...] = ()
    updates: int = 3
    minis: int = 1  # optimizer steps an update
    learning_rate: float = 1e-3
    inferences: int = 1
    infers_at_the_end: bool = True
    warm: int = 0
    once: bool | None = False

    @property
    def worker(self) -> Case:
        """Without what a worker can change."""
        return replace(self, name="", micro=None, tokens=None, warm=0, once=False)


@dataclass
class Found:
    """What comes of one case: values by sample in the batch's order, metrics and times of the slowest rank."""

    engine: str = ""
    tokens: int = 0
    values: list[dict[str, list[Tensor]]] = field(default_factory=list)  # before the updates and behind them
    routes: list[Tensor] = field(default_factory=list)  # of experts that were recorded before the updates
    infer_s: list[float] = field(default_factory=list)
    infer_gib: float = 0.0
    infer_metrics: list[dict[str, Any]] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    update_gib: float = 0.0
    metrics: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities of all response tokens, before the updates."""
        return torch.cat(self.values[0]["log_probs"])


def worker_input(samples: list[Sample], known: dict[str, list[Tensor]], trainer: str, **settings: Any) -> Any:
    """What a worker is given.

    Args:
        known: values of response tokens, by sample.
        trainer: v1 (jagged) or v0 (padded), whose form it has.
        settings: what else the trainer says of the batch.
    """
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    whole = [torch.cat((one.prompt, one.response)) for one in samples]
    lists = {"prompts": [one.prompt for one in samples], "responses": [one.response for one in samples], **known}
    lists |= {"input_ids": whole, "response_mask": [one.mask for one in samples]}
    lists["position_ids"] = [one.others.get("position_ids", torch.arange(len(ids))) for one, ids in zip(samples, whole)]
    tensors: dict[str, Any] = {"uid": [one.uid for one in samples]}
    if "routed_experts" in samples[0].others:
        lists["routed_experts"] = [one.others["routed_experts"] for one in samples]
    for name in samples[0].others.keys() - lists.keys():
        values = [one.others[name] for one in samples]
        tensors[name] = torch.stack(values) if isinstance(values[0], Tensor) else values
    if "temperature" not in tensors:
        settings["temperature"] = 1.0
    if trainer == "v0":
        settings["global_token_num"] = list(map(len, whole))
        return left_right_2_no_padding(tu.get_tensordict({**tensors, **_padded(lists)}, settings))
    # Routes of experts have the tokens in front, positions behind.
    ragged = {"routed_experts": 1}
    tensors |= {name: tu.nested_tensor_from_tensor_list(rows, ragged.get(name)) for name, rows in lists.items()}
    return tu.get_tensordict({**tensors, "loss_mask": tensors["response_mask"]}, settings)


def _padded(lists: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """Prompts padded on the left, responses on the right, and the mask of all that is no padding."""

    def padded(name: str, side: str = "right", ones: bool = False) -> Tensor:
        rows = [torch.ones_like(one) for one in lists[name]] if ones else lists[name]
        return pad_sequence(rows, batch_first=True, padding_side=side)

    mask = torch.cat((padded("prompts", "left", ones=True), padded("responses", ones=True)), 1)
    found = {"attention_mask": mask, "prompts": padded("prompts", "left")}
    for name in ("input_ids", "position_ids"):  # of which those for images have several rows
        found[name] = _of_whole(mask, [one.movedim(-1, 0) for one in lists[name]]).movedim(1, -1)
    if "routed_experts" in lists:
        found["routed_experts"] = _of_whole(mask, lists["routed_experts"])
    return {**found, **{name: padded(name) for name in lists.keys() - found.keys()}}


def _of_whole(mask: Tensor, rows: list[Tensor]) -> Tensor:
    """(B, tokens, ...) of what each sample's tokens have, 0 in padding."""
    tokens = torch.cat(rows)
    whole = torch.zeros(*mask.shape, *tokens.shape[1:], dtype=tokens.dtype)
    whole[mask.bool()] = tokens
    return whole
