# SPDX-License-Identifier: BSD-3-Clause
"""Log-probabilities of rollouts and of training, from one set of weights: equal to the bit on a GPU.

The model is bfloat16, with everything but attention computed in float64 and rounded, whose results
do not depend on which rows share a batch but for one rounding in 2^40. So attention is what is
compared: pages, cuts, chunks of prompts, plans, and the kernels of decoding with those of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bench_mismatch
import pytest
import torch
from tiny_models import VERSION, VOCABULARY, Samples, dualkv, row_of, tiny_model, transformers
from torch import Tensor

from flash_attn_dualkv import SharedPrefixPlan

pytestmark = pytest.mark.skipif(VERSION < (5, 17), reason="needs transformers 5.17 or newer")

RETURNS, TOKENS = 4, 48


@pytest.fixture
def rowwise() -> Iterator[None]:
    with bench_mismatch.rowwise(transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm):
        yield
    dualkv.unregister_decode()


def rollouts(model: Any, prompts: list[list[int]], **batching: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Sampled tokens and their log-probabilities, as the rollouts say them."""
    config = transformers.GenerationConfig(
        max_new_tokens=TOKENS, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=5
    )
    options = transformers.ContinuousBatchingConfig(
        num_blocks=64, max_batch_tokens=512, return_logprobs=True, **batching
    )
    torch.manual_seed(7)
    found = model.generate_batch(prompts, generation_config=config, continuous_batching_config=options)
    assert all(one.error is None for one in found.values())
    ordered = [found[name] for name in sorted(found, key=lambda one: int(one.rpartition("_")[2]))]
    return [one.generated_tokens for one in ordered], [one.logprobs for one in ordered]


def trained(model: Any, prompts: list[list[int]], responses: list[list[int]]) -> list[Tensor]:
    """Of the same tokens in one forward over packed, shared prompts, by the softmax that rollouts use."""
    samples = Samples(prompts, responses)
    batch = samples.pack(device=model.device)
    with torch.no_grad():
        logits = model(**row_of(batch)).logits[0, batch.token_index].float()
    logps = logits.softmax(-1).gather(-1, batch.targets[:, None])[:, 0].log()
    return samples.split(logps)


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 1), (128, 2)])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_zero_mismatch(device, graphs, head_dim, kv_heads, rowwise, monkeypatch):
    if device == "cpu" and (graphs or head_dim > 64):
        pytest.skip("the CPU has one kernel, and no graphs")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shape = dict(head_dim=head_dim, num_attention_heads=4, num_key_value_heads=kv_heads, hidden_size=128)
    model = tiny_model("qwen3", dtype=dtype, attention="dualkv", **shape).to(device)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # so that some tokens are likely
    generator = torch.Generator().manual_seed(3)
    # Of whole pages, of less than one, of parts; the longest is prefilled in chunks, beside others'
    # tokens.
    lengths = (512, 9, 300, 77) if device == "cpu" else (1536, 9, 300, 77)
    drawn = [torch.randint(6, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    prompts = [one for one in drawn for _ in range(RETURNS)]
    steps: list[Any] = []
    update = SharedPrefixPlan.update

    def counted(plan: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(table.shape)
        return update(plan, table, *args, **kwargs)

    monkeypatch.setattr(SharedPrefixPlan, "update", counted)
    dualkv.register_decode()
    tokens, got = rollouts(model, prompts, use_cuda_graph=graphs)
    assert steps and len(tokens) == len(prompts)
    for one, expected in zip(got, trained(model, prompts, tokens)):
        logps = torch.tensor(one, device=device)
        if device == "cpu":
            torch.testing.assert_close(logps, expected, rtol=0, atol=2e-5)
        else:
            assert torch.equal(logps, expected)
