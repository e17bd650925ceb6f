# SPDX-License-Identifier: BSD-3-Clause
"""Tiny random transformers models, one of each kind of layer, and what they compute without a shared prompt.

All model types of transformers are in sweep.py.

Importing this skips the test module when transformers is not installed.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from flash_attn_dualkv import PackedBatch, pack_shared_prompts

transformers = pytest.importorskip("transformers", "4.57", reason="needs transformers 4.57 or newer")
dualkv = importlib.import_module("flash_attn_dualkv.integrations.transformers")
dualkv.register()

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
VOCABULARY = 97
COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    attention_dropout=0.0, initializer_range=0.06, tie_word_embeddings=False,
)  # fmt: skip
_WINDOW = 5
_MIXED = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """A model type: its configuration, the type it is tested in, and its stock attention."""

    options: dict[str, Any] = field(default_factory=dict)
    # Experts are multiplied by kernels that have no float64.
    dtype: torch.dtype = torch.float64
    stock: str = "sdpa"


_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
FAMILIES = {
    "llama": Family(),
    "qwen3": Family(dict(head_dim=16)),
    "qwen3_moe": Family(dict(head_dim=16, **_EXPERTS), torch.float32),
    "mistral": Family(dict(head_dim=8, sliding_window=_WINDOW)),
    "mixtral": Family(dict(num_local_experts=4), torch.float32),
    "gemma2": Family(
        dict(
            head_dim=16, sliding_window=_WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=1.5,
            final_logit_softcapping=0.5,
        ),
        stock="eager",
    ),
    "gemma3_text": Family(
        dict(head_dim=16, sliding_window=_WINDOW, query_pre_attn_scalar=16, layer_types=_MIXED)
    ),
    # The last two layers have the keys and values of the two before them, full attention has other
    # head dims.
    "gemma4_text": Family(
        dict(
            num_hidden_layers=4, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, layer_types=_MIXED * 2,
            sliding_window=_WINDOW, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY, final_logit_softcapping=0.5,
        )
    ),
    "phi3": Family(dict(sliding_window=_WINDOW)),
    "granite": Family(
        dict(logits_scaling=0.3, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.5)
    ),
    "cohere": Family(dict(logit_scale=2.0)),
    "gpt_oss": Family(
        dict(
            head_dim=8, sliding_window=_WINDOW, num_local_experts=4, num_experts_per_tok=2, layer_types=_MIXED,
            rope_scaling=None, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
        torch.float32,
        stock="eager",
    ),
    "deepseek_v3": Family(
        dict(
            num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12,
            v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16,
            first_k_dense_replace=1,
        ),
        torch.float32,
    ),
    "gpt2": Family(
        dict(n_embd=32, n_layer=2, n_head=4, n_positions=2048, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    ),
}  # fmt: skip
# 4.57's GPT-2 drops the layout: see test_refused.py.
SUPPORTED = [name for name in FAMILIES if name in transformers.CONFIG_MAPPING and (VERSION >= (5, 0) or name != "gpt2")]


def tiny_config(name: str, **options: Any) -> Any:
    return transformers.AutoConfig.for_model(name, **{**COMMON, **FAMILIES[name].options, **options})


def random_model(make: Callable[[], Any]) -> Any:
    """A model with random parameters, the same ones in every call, in eval mode."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = make()
        for parameter in model.parameters():
            # Biases, norms and sinks: not the 0 or 1 that they begin with.
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def tiny_model(name: str, *, dtype: torch.dtype | None = None, attention: str = "dualkv", **options: Any) -> Any:
    auto, config = transformers.AutoModelForCausalLM, tiny_config(name, **options)
    model = random_model(lambda: auto.from_config(config, attn_implementation=attention))
    return model.to(FAMILIES[name].dtype if dtype is None else dtype)


def stock_twin(model: Any, attention: str | None = None) -> Any:
    """A copy of a model on stock attention: by default the one that its family is compared with."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation(attention or FAMILIES[model.config.model_type].stock)
    return twin


@dataclass(frozen=True)
class Samples:
    """Prompts and responses of a batch, as lists of token ids, one of each per sample."""

    prompts: list[list[int]]
    responses: list[list[int]]

    @staticmethod
    def random(shapes: list[tuple[int, list[int]]], seed: int = 0) -> Samples:
        """Groups given as (prompt length, response lengths), one after the other."""
        generator = torch.Generator().manual_seed(seed)

        def tokens(length: int) -> list[int]:
            return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

        prompts: list[list[int]] = []
        responses: list[list[int]] = []
        for prompt_len, response_lens in shapes:
            prompt = tokens(prompt_len)
            prompts += [prompt] * len(response_lens)
            responses += [tokens(length) for length in response_lens]
        return Samples(prompts, responses)

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, indices: Any) -> Samples:
        return Samples([self.prompts[i] for i in indices], [self.responses[i] for i in indices])

    def pack(self, device: Any = None, **options: Any) -> PackedBatch:
        return pack_shared_prompts(self.prompts, self.responses, device=device, **options)

    def split(self, values: Tensor) -> list[Tensor]:
        """Values of all response tokens, sample by sample."""
        begins = [0, *accumulate(map(len, self.responses))]
        return [values[begin:end] for begin, end in pairwise(begins)]


# Three groups in mixed order: a long prompt, one of two tokens, one of one token; responses of 0
# and 1 tokens too.
MIXED = Samples.random([(9, [5, 9, 0]), (2, [1, 7]), (1, [4])]).take([0, 3, 1, 5, 2, 4])


def row_of(batch: PackedBatch, **more: Any) -> dict[str, Any]:
    """What a forward of a model takes of a batch."""
    row = dict(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False)
    return {**row, "shared_prompt_layout": batch.layout, **more}


def logps_of(logits: Tensor, batch: PackedBatch) -> Tensor:
    """Of all response tokens, from what such a forward returns."""
    return logits[0, batch.token_index].log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]


def lose_a_layout(model: Any) -> None:
    """The second layer gets none, as where code on the way does not know of layouts."""
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "shared_prompt_layout": None}), with_kwargs=True
    )


@contextmanager
def wide_softmax() -> Iterator[None]:
    """Eager attention rounds its weights to float32 in float64 models, which would be the larger error by far."""
    softmax = nn.functional.softmax

    def wider(input: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return softmax(input, *args, dtype=None if input.dtype == torch.float64 else dtype, **kwargs)

    with patch.object(nn.functional, "softmax", wider):
        yield


def replicated_logps(model: Any, samples: Samples, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of all response tokens, each sequence alone with a prompt of its own."""
    device = next(model.parameters()).device
    logps, entropies = [], []
    for prompt, response in zip(samples.prompts, samples.responses):
        if not response:
            continue
        with wide_softmax():
            logits = model(torch.tensor([prompt + response], device=device), use_cache=False).logits[0]
        scores = _score(logits[len(prompt) - 1 : -1] / temperature, response)
        logps.append(scores[0])
        entropies.append(scores[1])
    return torch.cat(logps), torch.cat(entropies)


def _score(logits: Tensor, response: list[int]) -> tuple[Tensor, Tensor]:
    all_logps = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    targets = torch.tensor(response, dtype=torch.int64, device=logits.device)
    return all_logps.gather(-1, targets[:, None])[:, 0], -(all_logps.exp() * all_logps).sum(-1)


# So that every expert gets all tokens: a product over other rows may be rounded otherwise, and in
# transformers 4.57 an expert that no token reaches has no gradient.
EVERY_EXPERT = {
    "qwen3_moe": dict(num_experts_per_tok=4),
    "gpt_oss": dict(num_experts_per_tok=4),
    "deepseek_v3": dict(num_experts_per_tok=4, topk_group=2),
}


@dataclass(frozen=True)
class Tolerance:
    value: float
    gradient: float


TOLERANCES = {torch.float64: Tolerance(1e-7, 2e-6), torch.float32: Tolerance(5e-6, 1e-5)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model's parameters, which are then cleared."""
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def gradient_errors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """max|difference| / max|expected| per parameter."""
    assert got.keys() == expected.keys()
    errors = {}
    for name, one in expected.items():
        scale = one.abs().max().item()
        difference = (got[name] - one).abs().max().item()
        errors[name] = difference / scale if scale > 0 else difference
    return errors


def check_equal(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if got.numel():
        error = (got - expected).abs().max().item()
        assert error <= tolerance


def check_gradients(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    errors = gradient_errors(got, expected)
    assert errors
    # Not the largest of them: a NaN is smaller than nothing and larger than nothing.
    too_large = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not too_large


class Outcome(NamedTuple):
    """Log-probabilities or other values that a model computes, and the gradients of a loss of them."""

    values: Tensor
    gradients: dict[str, Tensor]

    @staticmethod
    def of(model: nn.Module, values: Tensor, entropy: Tensor | None = None) -> Outcome:
        """The loss weighs each value differently, with both signs, and sums entropies."""
        loss = torch.linspace(-1, 2, values.numel()).to(values) @ values.flatten()
        (loss if entropy is None else loss + 0.3 * entropy.sum()).backward()
        return Outcome(values.detach(), gradients(model))

    def check(self, expected: Outcome, tolerance: Tolerance) -> None:
        check_equal(self.values, expected.values, tolerance.value)
        check_gradients(self.gradients, expected.gradients, tolerance.gradient)


Lists = list[list[int]]


def transcripts(seed: int) -> tuple[Lists, Lists]:
    """Sequences that leave each other anywhere, four levels deep, and masks of several spans."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    sequences = [[draw(3, VOCABULARY) for _ in range(14)]]
    for stem, kept, own in ((0, 9, 6), (1, 12, 4), (2, 14, 5), (0, 9, 1), (1, 4, 7)):
        sequences.append([*sequences[stem][:kept], *(draw(3, VOCABULARY) for _ in range(own))])
    sequences += [sequences[3][:5], sequences[2], [7]]
    masks = [[int(at > 0 and draw(0, 3) > 0) for at in range(len(one))] for one in sequences]
    return sequences, masks


SEQUENCES, MASKS = transcripts(0)
# Each as a sample whose tokens are all scored but for the first, and which of these its mask has.
WHOLE = Samples([one[:1] for one in SEQUENCES], [one[1:] for one in SEQUENCES])
TRAINED = torch.tensor([value for mask in MASKS for value in mask[1:]]).bool()
