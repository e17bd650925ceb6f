# SPDX-License-Identifier: BSD-3-Clause
"""What is random where verl is measured or tested: a model and a batch, in the forms that verl's workers take."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """A model of random weights (seed 0, bf16), with a tokenizer that nothing here calls.

    `others`: what else its configuration has, as JSON. If that has a "text_config", the fields above go there.
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
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

        config = self.config()
        is_multimodal = type(config) in AutoModelForImageTextToText._model_mapping
        auto = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = auto.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
        words |= {byte: 3 + i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
        ).save_pretrained(folder)


class Sample(NamedTuple):
    uid: str
    prompt: Tensor
    response: Tensor
    mask: Tensor  # of the response tokens that are trained
    advantage: float


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
    seed: int = 0

    def samples(self, vocabulary: int) -> list[Sample]:
        source = torch.Generator().manual_seed(self.seed)

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


# A picture of 4 x 4 patches: tokens of an id above those of text, and the values of its patches.
PICTURE_TOKEN, PICTURE_TOKENS, PATCHES, PATCH_VALUES = 512, 4, 16, 96


def worker_input(
    samples: list[Sample],
    known: dict[str, list[Tensor]],
    trainer: str,
    extra: str | None = None,
    position_rows: int = 1,
    **settings: Any,
) -> Any:
    """What a worker is given.

    Args:
        known: values of response tokens, by sample.
        trainer: v1 (jagged) or v0 (padded), whose form it has.
        extra: "temperatures" of each sample, "images" beside its text that no model looks at,
            "pictures" in every second prompt, "stretched" position ids, in the last row of a sample.
        position_rows: of position ids; verl has several where the processor knows of images.
        settings: what else the trainer says of the batch.
    """
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorData, NonTensorStack
    from verl.utils import tensordict_utils as tu

    positions = [torch.arange(len(one.prompt) + len(one.response)) for one in samples]
    if position_rows > 1:
        positions = [one.repeat(position_rows, 1) for one in positions]
    if extra == "stretched":
        positions[1][-1] *= 2
    pictures: list[dict[str, Tensor]] = [{} for _ in samples]
    if extra == "pictures":
        for index, one in enumerate(samples):
            if int(one.uid.removeprefix("prompt")) % 2:
                samples = [*samples[:index], _with_picture(one), *samples[index + 1 :]]
                pictures[index] = _picture()
                positions[index][1:, 1 : 1 + PICTURE_TOKENS] -= torch.arange(PICTURE_TOKENS)
    data = _padded(samples, positions, known) if trainer == "v0" else _jagged(samples, positions, known)
    if isinstance(data, dict):
        data["uid"] = NonTensorStack.from_list([NonTensorData(one.uid) for one in samples])
        data = TensorDict(data, batch_size=len(samples))
    settings["temperature"] = 1.0
    if extra == "temperatures":
        data["temperature"] = torch.linspace(0.7, 1.3, len(samples))
        del settings["temperature"]
    if extra == "images":
        pictures = [{"grid": torch.ones(1)} for _ in samples]
    if extra in ("images", "pictures"):
        data["multi_modal_inputs"] = NonTensorStack.from_list([NonTensorData(one) for one in pictures])
    tu.assign_non_tensor(data, **settings)
    return data


def _with_picture(sample: Sample) -> Sample:
    prompt = sample.prompt.clone()
    prompt[1 : 1 + PICTURE_TOKENS] = PICTURE_TOKEN
    return sample._replace(prompt=prompt)


def _picture() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(0)
    grid = torch.tensor([[1, 4, 4]])
    return {"pixel_values": torch.randn(PATCHES, PATCH_VALUES, generator=source), "image_grid_thw": grid}


def _jagged(samples: list[Sample], positions: list[Tensor], known: dict[str, list[Tensor]]) -> dict[str, Any]:
    from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

    lists: dict[str, list[Tensor]] = {"position_ids": positions, **known}
    lists["prompts"], lists["responses"] = [one.prompt for one in samples], [one.response for one in samples]
    lists["input_ids"] = [torch.cat((one.prompt, one.response)) for one in samples]
    lists["response_mask"] = lists["loss_mask"] = [one.mask for one in samples]
    return {name: nested_tensor_from_tensor_list(rows) for name, rows in lists.items()}


def _padded(samples: list[Sample], positions: list[Tensor], known: dict[str, list[Tensor]]) -> Any:
    import numpy
    from verl import DataProto
    from verl.workers.utils.padding import left_right_2_no_padding

    def left(rows: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")

    def right(rows: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    prompts, responses = left([one.prompt for one in samples]), right([one.response for one in samples])
    ones = [torch.ones_like(one.prompt) for one in samples], [torch.ones_like(one.response) for one in samples]
    mask = torch.cat((left(ones[0]), right(ones[1])), 1)
    position_ids = torch.zeros(len(samples), *positions[0].shape[:-1], mask.shape[1], dtype=torch.int64)
    for row, one, own in zip(position_ids, mask.bool(), positions):
        row[..., one] = own
    tensors = dict(
        prompts=prompts,
        responses=responses,
        input_ids=torch.cat((prompts, responses), 1),
        attention_mask=mask,
        position_ids=position_ids,
        response_mask=right([one.mask for one in samples]),
        **{name: right(rows) for name, rows in known.items()},
    )
    uids = numpy.array([one.uid for one in samples], dtype=object)
    info = {"temperature": 1.0, "global_token_num": mask.sum(1).tolist()}
    batch = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids}, meta_info=info)
    return left_right_2_no_padding(batch.to_tensordict())
