"""A model of families.py as it is trained without this library: transformers' own, prompts replicated.

What transformers offers these models takes batches of sequences, padded on the right: micro-batch after micro-batch of
sequences of about the same length, the longest first. No mask says what is padding: causal layers do not see what lies
behind a token, and without a mask attention has its fast kernels.

FlexAttention compiles its kernels and its masks for the first length that it sees, once more for all others, and that
for each kind of layer and direction: minutes before the first step. It gets one length, the longest, for all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from families import FAMILIES, TINY
from measure import DTYPES, GIB, Config, Matmul, backward, clear, compared, synchronize, verdict
from model import StepRun, make_ids, make_model, prepared_step, score, shared_step
from packing import Prepared, path_rows
from peers import Implementation
from shapes import Shape, StepShape, family_of
from torch import Tensor

ROW_TILE = 128  # lengths are multiples of it, as FlexAttention's blocks are


@dataclass(frozen=True)
class Kernels:
    """What has to be known of an attention of transformers.

    Attributes:
        package: the key of ``PACKAGES`` that it needs.
        compile_s: about how long the first micro-batch compiles.
        has_one_length: all sequences are padded to the longest of all, not to that of their micro-batch.
    """

    package: str | None = None
    compile_s: float = 0.0
    has_one_length: bool = False


KERNELS = {
    "eager": Kernels(),
    "sdpa": Kernels(),
    "flash_attention_4": Kernels("fa4", compile_s=40.0),
    "flex_attention": Kernels(compile_s=70.0, has_one_length=True),
}


@dataclass(frozen=True)
class Padded:
    """Sequences of one micro-batch: the leaves at which they end, and the length to which all are padded."""

    leaves: tuple[int, ...]
    length: int


def micro_batches(shape: Shape, kernels: Kernels = KERNELS["sdpa"]) -> list[Padded]:
    """The sequences from the longest to the shortest, as many at a time as the model's family says."""
    model = family_of(shape)
    assert model is not None
    leaves = sorted(shape.leaves, key=lambda leaf: -shape.ends[leaf])
    chosen = [leaves[begin : begin + model.sequences] for begin in range(0, len(leaves), model.sequences)]
    longest = [shape.ends[(leaves if kernels.has_one_length else one)[0]] for one in chosen]
    return [Padded(tuple(one), -(-length // ROW_TILE) * ROW_TILE) for one, length in zip(chosen, longest)]


def stock_step(
    shape: StepShape, ids: Tensor, make: Callable[[str], Any], attention: str, batch: Padded
) -> tuple[Any, Callable[[], Tensor], Tensor]:
    """The model, its log-probabilities of one micro-batch, and which of all scored tokens these are."""
    device, model = ids.device, make(attention)
    rows = path_rows(shape, list(batch.leaves))
    padded = ids.new_zeros(len(rows), batch.length)
    for sequence, one in zip(padded, rows):
        sequence[: len(one)] = ids[one.to(device)]
    lengths = dict(zip(shape.leaves, shape.responses))
    firsts = dict(zip(shape.leaves, torch.tensor([0, *shape.responses]).cumsum(0).tolist()))
    scored, which = [], []
    for index, leaf in enumerate(batch.leaves):
        end = index * batch.length + shape.ends[leaf]
        scored.append(torch.arange(end - lengths[leaf] - 1, end - 1, device=device))
        which.append(torch.arange(firsts[leaf], firsts[leaf] + lengths[leaf], device=device))
    at = torch.cat(scored)
    targets = padded.flatten()[at + 1]

    def log_probabilities() -> Tensor:
        hidden = model.model(input_ids=padded, use_cache=False).last_hidden_state.flatten(0, 1)
        return score(model.lm_head, hidden.index_select(0, at), targets, shape.model.vocab)

    return model, log_probabilities, torch.cat(which)


class FamilyRun(StepRun):
    """All measurements of the step of one model of families.py.

    A pass of the stock model takes ten seconds and more: what warms up, and compiles, is one micro-batch. Peak and
    output are those of the timed passes.
    """

    def __init__(self, shape: Shape, implementations: list[Implementation], config: Config, matmul: Matmul) -> None:
        super().__init__(shape, implementations, config, matmul)
        family = family_of(shape)
        assert family is not None
        self.largest_difference = family.largest_difference
        self.outputs: dict[str, Tensor] = {}
        self.model: Any = None
        self.baseline = 0  # bytes, without the model

    def run(self) -> Iterator[str]:
        yield from super().run()
        self.model = None
        clear(self.config, after_failure=True)

    def make(self, attention: str) -> Any:
        """One model for all: to make 20B weights anew takes as long as a step."""
        config = self.config
        if self.model is None:
            self.baseline = torch.cuda.memory_allocated() if config.is_cuda else 0
            self.model = make_model(self.shape, attention, DTYPES[config.dtype], config.device, config.seed)
        self.model.set_attn_implementation(attention)
        return self.model

    def prepared(self, impl: Implementation) -> Iterator[Prepared]:
        shape = self.shape
        ids, dout = make_ids(shape, self.config.device, self.config.seed)
        if impl.is_ours:
            impl.arrange(shape, self.config.device)  # chooses the kernels
            yield prepared_step(*shared_step(shape, ids, self.make), dout)
            return
        for batch in impl.arrange(shape, self.config.device):
            yield prepared_step(*stock_step(shape, ids, self.make, attention_of(impl), batch), dout)

    def memory_pass(self, impl: Implementation) -> None:
        if not impl.is_ours:
            batches = impl.arrange(self.shape, self.config.device)
            self.facts[impl.name]["padded_tokens"] = sum(len(one.leaves) * one.length for one in batches)
        for prepared in islice(self.prepared(impl), 1):
            backward(prepared, prepared.run(), retain_graph=False)
            synchronize(self.config)

    def timed_pass(self, impl: Implementation) -> None:
        cuda, facts = (torch.cuda if self.config.is_cuda else None), self.facts[impl.name]
        self.outputs.pop(impl.name, None)
        if cuda:
            cuda.reset_peak_memory_stats()
        super().timed_pass(impl)
        if cuda:
            facts["peak_gib"] = round((cuda.max_memory_allocated() - self.baseline) / GIB, 3)
        output = self.outputs[impl.name].cpu()
        self.sample = self.sample or [output - output.mean()]
        facts["rel_diff"], facts["gradient_rel_diff"] = compared([output - output.mean()], self.sample)
        facts.update(verdict(self, facts["rel_diff"], None))

    def timed(self, impl: Implementation, prepared: Prepared) -> tuple[list[float], list[float]]:
        """The same, and the output is kept: each micro-batch has that of its own tokens."""
        kept: list[Tensor] = []

        def run() -> Tensor:
            out = prepared.run()
            kept[:] = [out.detach()]
            return out

        times = super().timed(impl, replace(prepared, run=run))
        every = torch.arange(sum(self.shape.responses), device=kept[0].device)
        output = prepared.take(kept[0], every)
        self.outputs[impl.name] = self.outputs.get(impl.name, torch.zeros_like(output)) + output
        return times


def attention_of(impl: Implementation) -> str:
    """By the name that transformers has for it."""
    return impl.name.removeprefix("stock_").removesuffix("_replicated")


def stock_implementations() -> list[Implementation]:
    """One for every attention that some family is measured on."""

    def refuses(shape: Shape, attention: str) -> str | None:
        family = family_of(shape)
        if family is None:
            return "peers have this model on their attention"
        return None if attention in family.stock else f"measured on {' and '.join(family.stock)}"

    def arrange(shape: Shape, device: torch.device, kernels: Kernels) -> list[Padded]:
        return micro_batches(shape, kernels)

    return [
        Implementation(
            f"stock_{attention}_replicated",
            partial(arrange, kernels=KERNELS[attention]),
            partial(refuses, attention=attention),
            is_replicated=True,
            package=KERNELS[attention].package,
            compile_s=KERNELS[attention].compile_s,
        )
        for attention in sorted({one for model in (FAMILIES | TINY).values() for one in model.stock})
    ]


def run_of(shape: StepShape, implementations: list[Implementation], config: Config, matmul: Matmul) -> StepRun:
    """What measures a model."""
    return (StepRun if family_of(shape) is None else FamilyRun)(shape, implementations, config, matmul)
