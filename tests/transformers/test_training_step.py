"""A training step does not depend on how its samples are grouped and spread over micro-batches.

The step's gradient is a sum over samples, and a shared prompt only reorders that sum: for the same multiset of samples,
any grouping and any micro-batches give the gradient of replicated prompts (Gai et al., DualKV, 2026, Appendix B).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import (
    TOLERANCES,
    Samples,
    check_gradients,
    dualkv,
    gradients,
    replicated_logps,
    stock_twin,
    tiny_model,
)

from flash_attn_dualkv import unpack_logprobs

SAMPLES = Samples.random([(7, [4, 6, 2, 1]), (3, [5, 0, 3]), (1, [2])])
TOLERANCE = TOLERANCES[torch.float64]
# Sums in another order; the float32 inside norms and rotary embeddings is the same.
REORDERED = 1e-6


class Targets(NamedTuple):
    """What a step is given: (B, R) log-probabilities of two other policies, (B,) advantages, (B, R) mask."""

    old: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    def take(self, indices: list[int], width: int) -> Targets:
        rows = [one[indices] for one in self]
        return Targets(*(one[:, :width] if one.dim() == 2 else one for one in rows))


def grpo(logps: torch.Tensor, entropy: torch.Tensor, targets: Targets) -> torch.Tensor:
    """PPO's clip, the k3 estimate of the KL divergence to a reference, and an entropy bonus; mean over all tokens."""
    ratio, advantages = (logps - targets.old).exp(), targets.advantages[:, None]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    log_ratio = targets.reference - logps
    loss = loss + 0.04 * (log_ratio.exp() - log_ratio - 1) - 0.01 * entropy
    return (loss * targets.mask).sum() / sum(map(len, SAMPLES.responses))


def padded(samples: Samples, values: torch.Tensor) -> torch.Tensor:
    width = max(map(len, samples.responses))
    rows = [torch.nn.functional.pad(one, (0, width - len(one))) for one in samples.split(values)]
    return torch.stack(rows)


def make_targets(model) -> Targets:
    """Old and reference policies: perturbed copies of the model, far enough that some ratios are clipped."""
    others = []
    for scale, seed in ((0.03, 3), (0.05, 4)):
        other = stock_twin(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for one in other.parameters():
                one.add_(scale * torch.randn(one.shape, generator=generator, dtype=one.dtype))
            others.append(padded(SAMPLES, replicated_logps(other, SAMPLES)[0]))
    mask = padded(SAMPLES, torch.ones(sum(map(len, SAMPLES.responses)), dtype=torch.float64))
    advantages = torch.randn(len(SAMPLES), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return Targets(*others, advantages, mask)


class Step:
    """One optimiser step on SAMPLES: dense, and in shared-prompt micro-batches."""

    def __init__(self) -> None:
        self.model = tiny_model("qwen3")
        self.targets = make_targets(self.model)

    def dense(self) -> tuple[float, dict[str, torch.Tensor]]:
        twin = stock_twin(self.model)
        logps, entropy = (padded(SAMPLES, one) for one in replicated_logps(twin, SAMPLES))
        ratios = (logps - self.targets.old).exp()[self.targets.mask.bool()]
        assert ((ratios - 1).abs() > 0.28).any()
        loss = grpo(logps, entropy, self.targets)
        loss.backward()
        return loss.item(), gradients(twin)

    def shared(self, micro_batches: list[list[int]], **options) -> tuple[float, dict[str, torch.Tensor]]:
        total = 0.0
        for indices in micro_batches:
            batch = SAMPLES.take(indices).pack(**options)
            results = dualkv.shared_prompt_forward(self.model, batch, with_entropy=True)
            logps, entropy = (unpack_logprobs(one, batch, per_row=False) for one in results)
            loss = grpo(logps, entropy, self.targets.take(indices, logps.shape[1]))
            loss.backward()
            total += loss.item()
        return total, gradients(self.model)


@pytest.fixture(scope="module")
def step():
    """With its result in one micro-batch."""
    made = Step()
    return made, made.shared([list(range(len(SAMPLES)))])


def test_loss_and_gradient_are_the_dense_ones(step):
    made, (loss, got) = step
    expected_loss, expected = made.dense()
    assert loss == pytest.approx(expected_loss, abs=10 * TOLERANCE.value)
    check_gradients(got, expected, TOLERANCE.gradient)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_grouping_and_micro_batching_has_the_same_summed_gradient(step, data):
    made, (expected_loss, expected) = step
    order = data.draw(st.permutations(range(len(SAMPLES))))
    cuts = data.draw(st.sets(st.integers(1, len(SAMPLES) - 1), max_size=3))
    edges = [0, *sorted(cuts), len(SAMPLES)]
    micro_batches = [list(order[begin:end]) for begin, end in pairwise(edges)]
    # A micro-batch of empty responses only has nothing to train on, and is legal.
    options = dict(
        boundary=data.draw(st.sampled_from(["replicate", "gather"])),
        max_responses_per_group=data.draw(st.sampled_from([None, 1, 2])),
        pad_to_multiple_of=data.draw(st.sampled_from([None, 8])),
    )
    got_loss, got = made.shared(micro_batches, **options)
    assert got_loss == pytest.approx(expected_loss, abs=1e-9)
    check_gradients(got, expected, REORDERED)


# --- ratios -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss"])
def test_the_first_ratio_is_one(name, dtype):
    """Old log-probabilities without gradients, new ones with: in the same packing the ratio is 1 to the last bit."""
    model = tiny_model(name, dtype=dtype).train()
    batch = SAMPLES.pack()
    with torch.no_grad():
        old, _ = dualkv.shared_prompt_forward(model, batch)
    new, _ = dualkv.shared_prompt_forward(model, batch, with_entropy=True)
    assert torch.equal((new - old).exp(), torch.ones_like(old))
