# SPDX-License-Identifier: BSD-3-Clause
"""Context parallelism, Ulysses, and both: on any number of ranks the same output and gradients as in one process."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import ranks as ranks_of_models
import torch
import torch.distributed as dist
from doc_examples import examples
from processes import run_ranks
from tiny_models import MIXED, VERSION, check_equal, check_gradients, dualkv, gradients, tiny_model
from torch import Tensor

from flash_attn_dualkv import (
    SharedPromptError,
    SharedPromptLayout,
    SharedPromptUnsupportedError,
    ops,
    pack_shared_prompts,
    shared_prompt_attention,
)
from flash_attn_dualkv.packed_attention import checked_tensors, packed_options
from flash_attn_dualkv.parallel.context import ContextLayout, context_parallel_attention
from flash_attn_dualkv.parallel.sharded import DividedLayout
from flash_attn_dualkv.parallel.ulysses import UlyssesLayout, gather_rows, shard_rows, ulysses_attention

WRAPPERS = ["ddp", "fsdp1", "fsdp2"]
# Sinks and windows; softcaps; values of another width.
MODELS = ["qwen3", "gpt_oss", "gemma2", "deepseek_v3"]
MODEL_RUNS = [
    *product(("context", "ulysses"), (2, 4), MODELS),
    *product(("crossed",), (4,), MODELS[:2]),
    ("context", 8, "qwen3"),
]
# Nodes are cut everywhere, or at multiples of a tile.
CUTS: dict[str, dict[str, int]] = {"anywhere": dict(tile=1), "tiles": dict(tile=16, chunks=2, pad_to_multiple_of=3)}


@dataclass(frozen=True)
class Case:
    node_lens: list[int]
    parents: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (4, 2)
    dtype: torch.dtype = torch.float64
    width: int = 8  # head dimension of v
    pad: int = 0
    head_groups: int = 1

    @property
    def layout(self) -> SharedPromptLayout:
        return SharedPromptLayout.from_tree(self.node_lens, self.parents, pad=self.pad)


PROMPTS = [40, 17, 33, 25, 9, 0, 12], [-1, 0, 0, 0, -1, 4, 4]
TREE = [21, 30, 3, 44, 18, 1, 27, 36, 2, 50], [-1, 0, 1, 2, 1, 0, 5, 6, 5, -1]
CASES = {
    "prompts": Case(*PROMPTS, pad=5),
    "tree": Case(*TREE, heads=(6, 3)),
    "one sequence": Case([97], [-1], heads=(4, 1)),
    "window": Case(*TREE, dict(sliding_window=11)),
    "sinks": Case(*PROMPTS, dict(sinks=True)),
    "window, sinks, softcap": Case(*TREE, dict(sliding_window=19, sinks=True, softcap=2.0), width=16),
    "float32": Case(*TREE, dict(sinks=True), dtype=torch.float32),
    "head groups": Case(*TREE, dict(sinks=True), heads=(6, 3), width=16, head_groups=3),
    "fewer rows than ranks": Case([2, 1], [-1, 0]),
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}
# Query and KV heads for Ulysses, and which numbers of ranks divide the query heads.
HEADS = {(8, 8): (2, 4), (8, 2): (2, 4), (8, 1): (2, 4), (12, 6): (2, 4), (12, 4): (2, 3)}
ULYSSES = {
    (heads, shape): Case(*lens_and_parents, dict(sinks=True, softcap=3.0), heads=heads, width=16, pad=8)
    for heads in HEADS
    for shape, lens_and_parents in (("prompts", PROMPTS), ("tree", TREE))
}


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor


def inputs_for(case: Case) -> tuple[Inputs, Tensor, Tensor]:
    """Also the gradients of the output and of the LSE."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(case.dtype)

    rows, (heads, kv_heads) = case.layout.num_tokens, case.heads
    inputs = Inputs(
        normal(rows, heads, 8), normal(rows, kv_heads, 8), normal(rows, kv_heads, case.width), normal(heads)
    )
    return inputs, normal(rows, heads, case.width), normal(heads, rows)


def expected(case: Case, with_lse: bool = True) -> list[Tensor]:
    """Output, LSE and gradients in one process; `with_lse`: the LSE has a gradient."""
    inputs, dout, dlse = inputs_for(case)
    dlse = dlse if with_lse else torch.zeros_like(dlse)
    leaves = [one.clone().requires_grad_() for one in inputs]
    options = {**case.options, "sinks": leaves[3] if case.options.get("sinks") else None}
    return step(whole_attention, leaves, case.layout, options, dout, dlse)


def whole_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: SharedPromptLayout, *, return_lse: bool, sinks: Tensor | None,
    sliding_window: int | None = None, softcap: float | None = None,
) -> Any:  # fmt: skip
    """`shared_prompt_attention`, which gives no LSE, with the LSE."""
    assert return_lse
    q, k, v = checked_tensors(q, k, v, sinks, "auto")
    options = packed_options(
        q, layout, softmax_scale=None, sliding_window=sliding_window, softcap=softcap, backend="auto",
        deterministic=False,
    )  # fmt: skip
    return ops.attend(q, k, v, layout.nodes, options, sinks=sinks)


def step(
    attention: Any,
    leaves: list[Tensor],
    layout: SharedPromptLayout,
    options: dict[str, Any],
    dout: Tensor,
    dlse: Tensor,
) -> list[Tensor]:
    out, lse = attention(*leaves[:3], layout, return_lse=True, **options)
    torch.autograd.backward([out, lse], [dout, dlse])
    return [out.detach(), lse.detach(), *(one.grad for one in leaves if one.grad is not None)]


def run_case(case: Case, layout: ContextLayout) -> list[Tensor]:
    """What `expected` gives, of a rank's rows."""
    inputs, dout, dlse = inputs_for(case)
    leaves = [layout.shard(one).requires_grad_() for one in inputs[:3]] + [inputs.sinks.clone().requires_grad_()]
    options = {**case.options, "sinks": leaves[3] if case.options.get("sinks") else None}
    return step(context_parallel_attention, leaves, layout, options, layout.shard(dout), layout.shard(dlse, dim=1))


def crossed_layout(layout: SharedPromptLayout, rank: int, rows_first: bool) -> DividedLayout:
    """Of 4 ranks, heads over two and rows over two."""
    neighbours = [dist.new_group(one) for one in ([0, 1], [2, 3])]
    others = [dist.new_group(one) for one in ([0, 2], [1, 3])]
    context, heads = neighbours[rank // 2], others[rank % 2]
    if rows_first:
        context, heads = others[rank % 2], neighbours[rank // 2]
    return UlyssesLayout.of(ContextLayout.of(layout, context, pad_to_multiple_of=2, tile=1), heads)


DIVISIONS: dict[str, Callable[[SharedPromptLayout, int, Any], DividedLayout]] = {
    "context": lambda whole, _, group: ContextLayout.of(whole, group, tile=1),
    "ulysses": lambda whole, _, group: UlyssesLayout.of(whole, group),
    "crossed": lambda whole, rank, _: crossed_layout(whole, rank, False),
}


def model_step(name: str, divide: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities and entropies of all response tokens, and gradients of a loss of them.

    Args:
        divide: makes the layout of a batch's; None for one process.
    """
    model = tiny_model(name).train()
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    batch = MIXED.pack(pad_to_multiple_of=12)
    layout = None if divide is None else divide(batch.layout)
    logps, entropy = dualkv.shared_prompt_forward(model, batch, layout=layout, with_entropy=True, temperature=0.7)
    weights = torch.linspace(-1, 1, len(logps), dtype=logps.dtype)
    ((logps * weights).sum() + entropy.sum()).div(1 if layout is None else layout.num_ranks).backward()
    return logps.detach(), entropy.detach(), gradients(model)


def wrapped_step(wrapper: str, group: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities under what averages gradients over the ranks, and all gradients."""
    model = ranks_of_models.CPU.model(0, torch.float32)
    wrapped = ranks_of_models.wrap(model, wrapper, torch.device("cpu"))
    batch = MIXED.pack()
    logps, _ = dualkv.shared_prompt_forward(wrapped, batch, layout=ContextLayout.of(batch.layout, group, tile=1))
    logps.sum().backward()
    return logps.detach(), ranks_of_models.whole_gradients(wrapped, model)


def page_steps() -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of the training guide's own forward, and of all steps of the page on several ranks."""
    names: dict[str, Any] = {}
    found = []
    torch.manual_seed(0)
    own = next(block for block in examples("training") if "model(" in block)
    for block in [own, *examples("long_contexts")]:
        exec(compile(block, "docs", "exec"), names)
        found.append((names["loss"].detach(), gradients(names["model"])))
    return found


def _run_rank(rank: int, ranks: int, results: Any) -> None:
    warnings.filterwarnings("error", ".*torch.distributed", FutureWarning)  # deprecated collectives
    group = dist.group.WORLD
    assert group is not None
    for (heads, shape), case in ULYSSES.items():
        if ranks in HEADS[heads]:
            results[rank, heads, shape] = run_crossed(case, UlyssesLayout.of(case.layout, group))
    if ranks == 3:
        return
    for division, _, name in (one for one in MODEL_RUNS if one[1] == ranks):
        results[rank, division, name] = model_step(name, lambda whole: DIVISIONS[division](whole, rank, group))  # noqa: B023
    for name, case in CASES.items():
        for cut, options in CUTS.items():
            layout = ContextLayout.of(case.layout, group, head_groups=case.head_groups, **options)
            results[rank, name, cut] = [layout.row_index, *run_case(case, layout)]
    if ranks == 4:
        for rows_first in (False, True):
            for name in ("tree", "window, sinks, softcap"):
                case = CASES[name]
                crossed = crossed_layout(case.layout, rank, rows_first)
                results[rank, "crossed", rows_first, name] = run_crossed(case, crossed)
    if ranks == 2:
        results[rank, "page"] = page_steps()
        for wrapper in WRAPPERS:
            results[rank, wrapper] = wrapped_step(wrapper, group)
        results[rank, "errors"] = [message(call) for call in wrong_calls(group)]
        layout = ContextLayout.of(CASES["tree"].layout, group, tile=1)
        inputs, *_ = inputs_for(CASES["tree"])
        # A group that the layout does not know.
        unknown = ContextLayout.at(CASES["tree"].layout, 2, rank, tile=1)
        parts = [layout.shard(one) for one in inputs[:3]]
        outs = [context_parallel_attention(*parts, layout), context_parallel_attention(*parts, unknown, group=group)]
        results[rank, "group"] = torch.equal(*outs)
        results[rank, "gathered"] = gathering(layout)
        results[rank, "second"] = second_derivative_of_gathered(group)


def run_crossed(case: Case, layout: DividedLayout) -> list[Tensor]:
    """Whole output and whole gradients; of the sinks this rank's."""
    inputs, dout, _ = inputs_for(case)
    leaves = [layout.shard(one).requires_grad_() for one in inputs[:3]] + [inputs.sinks.clone().requires_grad_()]
    options = {**case.options, "sinks": leaves[3] if case.options.get("sinks") else None}
    out = layout.attention(*leaves[:3], **options)
    out.backward(layout.shard(dout))
    gradients = [one.grad for one in leaves[:3] if one.grad is not None]
    whole = [layout.gather(one) for one in (out.detach(), *gradients)]
    return whole + ([] if leaves[3].grad is None else [layout.sum(leaves[3].grad)])


def gathering(layout: ContextLayout) -> list[Tensor]:
    """The whole of a rank's rows, and the gradient of a loss that every rank makes of the whole."""
    values = torch.arange(layout.num_tokens, dtype=torch.float64)
    own = layout.shard(values).requires_grad_()
    whole = layout.gather(own)
    (whole.square().sum() / layout.num_ranks).backward()
    assert own.grad is not None
    return [whole.detach(), own.detach(), own.grad]


def second_derivative(layout: ContextLayout, q: Tensor, k: Tensor) -> None:
    leaf = q.double().requires_grad_()
    out = layout.attention(leaf, k.double(), k.double())
    (gradient,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    gradient.sum().backward()


def second_derivative_of_gathered(group: Any) -> tuple[Tensor, Tensor]:
    """Of the cubes of gathered rows, which every rank sums, and these rows."""
    rows = (torch.arange(3.0) + dist.get_rank(group)).requires_grad_()
    (gradient,) = torch.autograd.grad((gather_rows(rows, group) ** 3).sum(), rows, create_graph=True)
    return torch.autograd.grad(gradient.sum(), rows)[0], rows.detach()


def wrong_calls(group: Any) -> list[Any]:
    case = CASES["tree"]
    heads = UlyssesLayout.of(case.layout, group)
    q2, k2 = torch.zeros(heads.num_local_tokens, 4, 8), torch.zeros(heads.num_local_tokens, 2, 8)
    layout = ContextLayout.of(case.layout, group)
    rows, whole = layout.num_local_tokens, layout.num_tokens
    padded = ContextLayout.at(case.layout, 2, 0, pad_to_multiple_of=whole)
    q, k = torch.zeros(rows, 4, 8), torch.zeros(rows, 2, 8)
    return [
        lambda: ContextLayout.of(case.layout, "all"),
        lambda: ContextLayout.of(layout, group),
        lambda: ContextLayout.at(case.layout, 2, 2),
        lambda: ContextLayout.of(case.layout, group, pad_to_multiple_of=0),
        lambda: context_parallel_attention(q[1:], k, k, layout),
        lambda: context_parallel_attention(q, k, k, case.layout),  # type: ignore[arg-type]
        lambda: context_parallel_attention(q, k, k, replace(layout, head_groups=3)),
        lambda: context_parallel_attention(q, k, k, ContextLayout.at(case.layout, 2, 0)),
        lambda: context_parallel_attention(q, k, k, ContextLayout.at(case.layout, 3, 0), group=group),
        lambda: ContextLayout.at(case.layout, 2, 0).gather(q),
        # A padded part may have as many rows as the whole.
        lambda: shared_prompt_attention(*[torch.zeros(whole, 2, 8)] * 3, padded),
        lambda: second_derivative(layout, q, k),
        lambda: layout.shard(torch.zeros(3)),
        lambda: layout.gather(torch.zeros(3)),
        lambda: UlyssesLayout.of(heads, group),
        lambda: UlyssesLayout.of(pack_shared_prompts([[1, 2]], [[1, 2, 3]]).layout, group),
        lambda: UlyssesLayout.of(case.layout, "all"),  # type: ignore[arg-type]
        lambda: ulysses_attention(q2[:, :3], k2[:, :1], k2[:, :1], heads),
        lambda: ulysses_attention(q2, q2[:, :3], q2[:, :3], heads),
        lambda: ulysses_attention(q2[1:], k2, k2, heads),
        lambda: ulysses_attention(q2, k2, k2, case.layout),  # type: ignore[arg-type]
        lambda: shard_rows(torch.zeros(3), group),
        lambda: pickle.dumps(heads),
        lambda: pickle.dumps(layout),
        lambda: dualkv.shared_prompt_forward(tiny_model("qwen3"), MIXED.pack(), layout=layout),
        lambda: dualkv.shared_prompt_forward(tiny_model("qwen3"), MIXED.pack(), layout=MIXED.pack().layout),
    ]


MESSAGES = [
    "group: expected a process group .*, got 'all'",
    r"layout: expected a whole row \(batch.layout\), got ContextLayout",
    "rank: expected an int >= 0 and <= 1, got 2",
    "pad_to_multiple_of: expected an int >= 1, got 0",
    r"layout: expected \d+ rows a rank in q and k, got \d+ in q, \d+ in k",
    "layout: expected a ContextLayout, got a SharedPromptLayout",
    "head_groups: expected a divisor of the 2 KV heads, got 3",
    "group: expected a process group .*, got None",
    "group: expected the 3 ranks of the layout, got 2",
    "group: expected a process group .*, got None",
    "layout: expected that of a whole row; .*, got a ContextLayout",
    "flash_attn_dualkv is differentiable once",
    r"values: expected the \d+ rows of the layout, got 3",
    r"values: expected this rank's \d+ rows, got \(3,\)",
    "layout: expected one without Ulysses, got a UlyssesLayout",
    r"layout: expected a multiple of the 2 ranks as number of rows \(pad_to_multiple_of=2\), got 5",
    "group: expected a process group .*, got 'all'",
    "q: expected a number of heads that the 2 ranks divide, got 3",
    "k: expected a number of heads that divides q's 4 heads, got 3",
    r"layout: expected \d+ rows a rank in q, k and v, got \d+, \d+, \d+",
    "layout: expected a UlyssesLayout, got a SharedPromptLayout",
    r"values: expected a multiple of the 2 ranks as rows, got \(3,\)",
    "a UlyssesLayout holds a process group",
    "a ContextLayout holds a process group",
    "layout: expected the batch's, divided, got that of another batch",
    r"layout: expected a DividedLayout \(UlyssesLayout.of, ContextLayout.of\), got a SharedPromptLayout",
]


def message(call: Any) -> str:
    try:
        call()
    except (SharedPromptError, TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


@cache
def found(ranks: int) -> dict[Any, Any]:
    """What so many ranks have found, by the rank."""
    return run_ranks(_run_rank, ranks, ranks)


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cut", CUTS)
def test_attention(cut: str, name: str, ranks: int) -> None:
    case = CASES[name]
    rows, parts = case.layout.num_tokens, [found(ranks)[rank, name, cut] for rank in range(ranks)]
    assert len({len(index) for index, *_ in parts}) == 1
    for number, (kind, one) in enumerate(zip(("out", "lse", "dq", "dk", "dv"), expected(case)), start=1):
        dim = int(kind == "lse")
        whole = torch.full_like(one, torch.nan)
        for part in parts:
            is_row = part[0] < rows
            whole.index_copy_(dim, part[0][is_row], part[number].index_select(dim, is_row.nonzero()[:, 0]))
            padding = part[number].index_select(dim, (~is_row).nonzero()[:, 0])
            assert (padding == (-torch.inf if kind == "lse" else 0)).all()
        live = slice(0, rows - case.pad)
        got, wanted = (value.movedim(dim, 0)[live] for value in (whole, one))
        torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCES[case.dtype], msg=kind)
    if "sinks" in case.options:
        total = sum(part[6] for part in parts)
        torch.testing.assert_close(total, expected(case)[5], rtol=0, atol=10 * TOLERANCES[case.dtype])


def check_whole(got: list[Tensor], case: Case) -> None:
    out, _, *wanted = expected(case, with_lse=False)
    live = slice(0, case.layout.num_tokens - case.pad)
    assert len(got) == 1 + len(wanted)
    for kind, tensor, right in zip(("out", "dq", "dk", "dv", "dsinks"), got, (out, *wanted)):
        rows = live if kind != "dsinks" else slice(None)
        torch.testing.assert_close(tensor[rows], right[rows], rtol=0, atol=1e-12, msg=kind)


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("name", ["tree", "window, sinks, softcap"])
@pytest.mark.parametrize("rank", range(4))
def test_with_ulysses(rank: int, name: str, rows_first: bool) -> None:
    check_whole(found(4)[rank, "crossed", rows_first, name], CASES[name])


@pytest.mark.parametrize(("heads", "ranks"), [(heads, ranks) for heads, able in HEADS.items() for ranks in able])
def test_heads_on_ulysses_alone(heads: tuple[int, int], ranks: int) -> None:
    for rank, shape in product(range(ranks), ("prompts", "tree")):
        check_whole(found(ranks)[rank, heads, shape], ULYSSES[heads, shape])


@pytest.mark.parametrize(
    ("division", "ranks", "name"), [pytest.param(*one, marks=[pytest.mark.slow] * (one[1] == 8)) for one in MODEL_RUNS]
)
def test_models(division: str, ranks: int, name: str) -> None:
    parts = [found(ranks)[rank, division, name] for rank in range(ranks)]
    logps, entropy, wanted = model_step(name, None)
    is_double = logps.dtype == torch.float64
    for one in parts:
        check_equal(one[0], logps, 1e-12 if is_double else 4e-6)
        check_equal(one[1], entropy, 1e-12 if is_double else 4e-6)
    # The weights of the loss cancel much; parts of Gemma 2 compute in float32.
    # An expert of which no row is on a rank has no gradient there.
    total = {key: sum(one[2][key] for one in parts if key in one[2]) for key in wanted}
    check_gradients(total, wanted, 5e-7 if is_double else 4e-5)


@pytest.mark.parametrize("rank", range(2))
def test_the_page(rank: int) -> None:
    (loss, wanted), *others = found(2)[rank, "page"]
    assert len(others) == 2
    for other, got in others:
        check_equal(other, loss, 1e-6)
        check_gradients(got, wanted, 2e-6)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("rank", range(2))
def test_wrappers(rank: int, wrapper: str) -> None:
    model = ranks_of_models.CPU.model(0, torch.float32)
    logps, _ = dualkv.shared_prompt_forward(model, MIXED.pack())
    logps.sum().backward()
    got, all_gradients = found(2)[rank, wrapper]
    check_equal(got, logps.detach(), 4e-6)
    check_gradients(all_gradients, gradients(model), 1e-5)


def test_images_are_refused() -> None:
    batch = pack_shared_prompts([[5, 6]], [[1, 2]], images={"pixel_values": [torch.ones(2, 4)]})
    with pytest.raises(SharedPromptError, match="images: expected none in a row that ranks divide"):
        dualkv.row_inputs(tiny_model("qwen3"), batch, ContextLayout.at(batch.layout, 2, 0))


def test_a_layout_without_a_group_is_pickled() -> None:
    layout = ContextLayout.at(CASES["tree"].layout, 3, 1, tile=1)
    copy = pickle.loads(pickle.dumps(layout))
    assert layout.row_index is not None and layout.gather_index is not None
    assert torch.equal(copy.row_index, layout.row_index) and torch.equal(copy.gather_index, layout.gather_index)
    assert torch.equal(copy.nodes, layout.nodes)


@pytest.mark.parametrize("rank", range(2))
def test_errors(rank: int) -> None:
    for error, wanted in zip(found(2)[rank, "errors"], MESSAGES, strict=True):
        assert re.match(wanted, error), error


@pytest.mark.parametrize("rank", range(2))
def test_rows(rank: int) -> None:
    assert found(2)[rank, "group"]
    whole, own, gradient = found(2)[rank, "gathered"]
    assert torch.equal(whole, torch.arange(len(whole), dtype=torch.float64))
    assert torch.equal(gradient, 2 * own)
    second, rows = found(2)[rank, "second"]
    assert torch.equal(second, 6 * 2 * rows)


ROPE = dict(rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
FACTORS = dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "yarn"])
def test_angles_of_the_longest_sequence(kind: str) -> None:
    """Ranks would see the longest one of their own part: refused in rows in which one may have other angles."""
    name = "rope_parameters" if VERSION >= (5, 0) else "rope_scaling"
    rope = ROPE | dict(rope_type=kind) | (FACTORS if kind == "longrope" else {})
    model = tiny_model("llama", max_position_embeddings=32, **{name: rope})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for length in (8, 15):
            batch = pack_shared_prompts([[5] * 20] * 2, [[1] * length, [2] * 7])
            layout = ContextLayout.of(batch.layout, dist.group.WORLD)
            if length == 15 and kind != "yarn":
                expected = rf"expected sequences of at most 3[12] tokens on several ranks, .*, got 35 \({kind}\)"
                with pytest.raises(SharedPromptUnsupportedError, match=expected):
                    dualkv.shared_prompt_forward(model, batch, layout=layout)
            else:
                found = dualkv.shared_prompt_forward(model, batch, layout=layout)[0]
                check_equal(found, dualkv.shared_prompt_forward(model, batch)[0], 1e-9)
    finally:
        dist.destroy_process_group()
