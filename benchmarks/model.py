"""The log-probabilities of a micro-batch and their gradients from a whole model of transformers, prompts shared or not.

The model is transformers' own Qwen3, or another of families.py, with random weights, every layer checkpointed. This
library is called as its README says. Peers get one packed row of the tokens that they compute through the same Qwen3 on
their attention, and the LM head over the same rows and in chunks of the same size. Other models are compared with
themselves as they are in stock.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from families import FamilyModel
from measure import DTYPES, LayerRun
from packing import Arrangement, Prepared, arrangements, first_copy, packed_positions, response_rows, wide
from peers import Implementation, model_implementations
from shapes import Group, Shape, StepShape, family_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from flash_attn_dualkv import pack_prefix_tree, pack_shared_prompts
from flash_attn_dualkv.integrations.lm_head import rows_of_a_chunk
from flash_attn_dualkv.integrations.transformers import register, shared_prompt_forward

# Of the norms of query and key heads, for the reason that layer.HEAD_NORM has.
HEAD_NORM = 1.6
PEER = "benchmark_peer"  # transformers takes a name with "flash" in it for that of a package


def make_ids(shape: StepShape, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random token ids of the packed rows, and the gradient of every log-probability: random advantages."""
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(shape.model.vocab, (shape.packed_tokens,), device=device, generator=generator)
    scored = sum(shape.responses)
    return ids, torch.randn(scored, device=device, generator=generator) / scored


def make_model(shape: StepShape, attention: str, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """The model on an attention of that registered name; its weights depend on the seed alone."""
    sizes = shape.model
    options: dict[str, Any] = dict(
        vocab_size=sizes.vocab, hidden_size=sizes.hidden, intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim, tie_word_embeddings=sizes.tied, max_position_embeddings=1 << 18, use_cache=False,
    )  # fmt: skip
    model_type = "qwen3"
    if isinstance(sizes, FamilyModel):
        model_type, options = sizes.model_type, {**options, **sizes.options}
    config = AutoConfig.for_model(model_type, **options)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):  # 1 at first, or 0 where models add 1 themselves
                parameter.add_(HEAD_NORM - 1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def samples(shape: Shape, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Prompts (of a tree all that is above a leaf) and responses, one of each per sample, 1-D int64."""
    prompts, responses = zip(*response_rows(shape))
    return [ids[one.to(ids.device)] for one in prompts], [ids[one.to(ids.device)] for one in responses]


def pack(shape: Shape, ids: Tensor) -> Any:
    """The micro-batch as this library packs it; in a tree the last node of every sequence is trained."""
    prompts, responses = samples(shape, ids)
    if not shape.tree:
        return pack_shared_prompts(prompts, responses)
    pairs = list(zip(prompts, responses))
    masks = [torch.cat([torch.zeros_like(above), torch.ones_like(own)]) for above, own in pairs]
    return pack_prefix_tree([*map(torch.cat, pairs)], loss_mask=masks, min_shared=1)  # the nodes as they are


def shared_step(shape: StepShape, ids: Tensor, make: Callable[[str], Any]) -> tuple[Any, Callable[[], Tensor], Tensor]:
    """The model, its log-probabilities by this library, called as its README says, and which of all scored tokens."""
    register()
    batch = pack(shape, ids)
    model = make("dualkv")
    return model, lambda: shared_prompt_forward(model, batch)[0], torch.arange(sum(shape.responses), device=ids.device)


def peer_step(
    shape: StepShape, ids: Tensor, make: Callable[[str], Any], how: Arrangement
) -> tuple[Any, Callable[[], Tensor], Tensor]:
    """The same with one packed row of the implementation's tokens."""

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        return how.attention(*(one[0].transpose(0, 1) for one in (q, k, v)))[None], None

    AttentionInterface.register(PEER, attend)
    AttentionMaskInterface.register(PEER, lambda *args, **kwargs: None)
    model = make(PEER)
    rows = how.rows.to(ids.device)
    row_ids, positions = ids[rows], packed_positions(shape).to(ids.device)[rows]
    scored, targets, which = (one.to(ids.device) for one in scored_rows(shape, how.rows))
    targets = ids[targets]

    def log_probabilities() -> Tensor:
        inputs = {"input_ids": row_ids[None], "position_ids": positions[None]}
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[0]
        return score(model.lm_head, hidden.index_select(0, scored), targets, shape.model.vocab)

    return model, log_probabilities, which


def score(head: nn.Module, hidden: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    """Log-probabilities of the targets (n,) by the stock LM head over hidden (n, D), in checkpointed chunks."""

    def of_chunk(rows: Tensor, wanted: Tensor) -> Tensor:
        logits = wide(head(rows))
        return logits.gather(-1, wanted[:, None])[:, 0] - logits.logsumexp(-1)

    size = rows_of_a_chunk(vocabulary)
    chunks = zip(hidden.split(size), targets.split(size))
    return torch.cat([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])


def scored_rows(shape: Shape, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which of an implementation's ``rows`` score response tokens, the packed rows of those tokens, and which they are.

    The row in front of a token scores it: that of a response's first token is the last of its prompt, in any copy. One
    of several micro-batches has the tokens of some responses.
    """
    pairs = response_rows(shape)
    before = torch.cat([torch.cat([prompt[-1:], response[:-1]]) for prompt, response in pairs])
    targets = torch.cat([response for _, response in pairs])
    which = torch.isin(targets, rows).nonzero().view(-1)
    return first_copy(rows, shape.packed_tokens)[before[which]], targets[which], which


def as_packed(shape: Shape) -> tuple[int, int]:
    """Tokens and pairs of what this library packs: a prompt's last token in front of each of its responses.

    Of a tree nothing is moved.
    """
    groups = [Group(group.prompt - 1, tuple(1 + length for length in group.responses)) for group in shape.groups]
    packed = Shape(shape.name, tuple(groups), tree=shape.tree)
    return packed.packed_tokens, packed.visible_pairs


class StepRun(LayerRun):
    """All measurements of one model's step over one micro-batch."""

    shape: StepShape
    # Roundings to bf16 over 36 layers: shared and replicated prompts differ by 6 to 8% of the spread on an H200.
    largest_difference = 0.1
    is_centred = True  # the common part, the logarithm of the vocabulary's size, would hide what attention adds

    def prepared(self, impl: Implementation) -> Iterator[Prepared]:
        """The leaves are all parameters; rows of the output are scored tokens."""
        shape, config = self.shape, self.config
        dtype = DTYPES[config.dtype]
        ids, dout = make_ids(shape, config.device, config.seed)
        make = cache(partial(make_model, shape, dtype=dtype, device=config.device, seed=config.seed))
        for how in arrangements(impl.arrange(shape, config.device)):
            step = shared_step(shape, ids, make) if impl.is_ours else peer_step(shape, ids, make, how)
            yield prepared_step(*step, dout)


def prepared_step(model: Any, run: Callable[[], Tensor], scored: Tensor, dout: Tensor) -> Prepared:
    """One micro-batch, which has those of the scored tokens."""

    def take(out: Tensor, which: Tensor) -> Tensor:
        values = out.new_zeros(len(dout)).index_copy_(0, scored, out)
        return values[which % len(dout)]

    return Prepared(tuple(model.parameters()), dout[scored], run, take, lambda gradients, which: ())


def implementations(families: list[str] | None) -> list[Implementation]:
    """Ours first, whose work is that of the row that it packs."""
    found = model_implementations(families)
    return [replace(one, work=as_packed) if one.is_ours else refuses_families(one) for one in found]


def refuses_families(impl: Implementation) -> Implementation:
    """The same for Qwen3 alone."""

    def refuses(shape: Shape) -> str | None:
        return impl.refuses(shape) if family_of(shape) is None else "measured on Qwen3"

    return replace(impl, refuses=refuses)
