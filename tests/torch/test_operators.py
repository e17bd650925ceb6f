# SPDX-License-Identifier: BSD-3-Clause
"""The operators: what PyTorch and the compiled module get of them; and the function of FlashAttention-2."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from calls import (
    NO_KEYS,
    NO_ROWS,
    NOTHING,
    ONE_GROUP,
    TWO_GROUPS,
    Call,
    Operators,
    batch_of,
    leaves_of,
    packed,
    packed_with_sinks,
    tree,
)
from groups import Batch, Group
from legal_calls import Library
from torch import Tensor

import flash_attn_dualkv
from flash_attn_dualkv import (
    build_info,
    checks,
    flash_attn_dualkv_varlen_func,
    flash_attn_tree_varlen_func,
    flash_attn_varlen_func,
    kernels,
    ops,
)
from flash_attn_dualkv.calls import BackwardCall, ForwardCall, unpack


def offsets_of(batch: Batch) -> tuple[Tensor | None, ...]:
    return batch.cu_seqlens_q, batch.cu_seqlens_k_decoded, batch.cu_seqlens_context, batch.cu_seqs_per_context


def nodes_of(batch: Batch) -> Tensor:
    nodes: Tensor = ops.sequence_nodes(*offsets_of(batch), len(batch.k_context))
    return nodes


# scale, causal, window_left, softcap, reference, mean_keys, deterministic
PLAIN = (0.25, True, 7, 2.0, False, 30, True)

# Operators

ALL_SHAPES = pytest.mark.parametrize(
    "groups", [ONE_GROUP, TWO_GROUPS, NOTHING, NO_ROWS, NO_KEYS], ids=["one", "two", "nothing", "no rows", "no keys"]
)


@ALL_SHAPES
def test_operators_of_tables_pass_opcheck(groups: Sequence[Group], device: str) -> None:
    batch = batch_of(groups, device)
    torch.library.opcheck(ops.sequence_nodes, (*offsets_of(batch), len(batch.k_context)))
    torch.library.opcheck(ops.sequence_nodes, (*offsets_of(batch)[:2], None, None, None))
    rest = tree(device=device).rest
    torch.library.opcheck(ops.tree_nodes, (rest["cu_seqlens"], rest["parents"], 1000))


def check_operators(inputs: Sequence[Tensor | None], nodes: Tensor, dout: Tensor) -> None:
    """forward, and backward with and without a gradient of the LSE, of q, k, v, k_decoded, v_decoded, sinks."""
    leaves = [None if one is None else one.detach().clone().requires_grad_() for one in inputs]
    torch.library.opcheck(ops.forward, (*leaves, nodes, *PLAIN))
    out, lse = ops.forward(*inputs, nodes, *PLAIN)
    for dlse in (None, torch.randn_like(lse)):
        arguments = (dout, dlse, *inputs, out, lse, nodes, *PLAIN)
        torch.library.opcheck(ops.backward, arguments)
        gradients, given = ops.backward(*arguments), [one for one in inputs if one is not None]
        assert [one.shape for one in gradients] == [one.shape for one in given]
        storages = {one.untyped_storage()._cdata for one in (*gradients, *given, out, lse)}
        assert len(storages) == len(gradients) + len(given) + 2


@ALL_SHAPES
def test_operators_with_two_tensors_of_keys_pass_opcheck(groups: Sequence[Group], device: str) -> None:
    batch = batch_of(groups, device, head_dim=16 if device == "cpu" else 64)
    check_operators([*batch.inputs, None], nodes_of(batch), batch.dout)


@pytest.mark.parametrize("make", [packed_with_sinks, tree])
def test_operators_with_one_tensor_of_keys_pass_opcheck(make: Callable[..., Call], device: str) -> None:
    call = make(device=device)
    q, k, v, *sinks = call.tensors
    nodes = call.rest.nodes if make is not tree else ops.tree_nodes(*call.rest.values(), len(q))
    check_operators([q, k, v, None, None, sinks[0] if sinks else None], nodes, call.dout)


def test_gradcheck_of_what_no_public_function_offers() -> None:
    """Output and LSE: windows without causality, values of another width, and a tree in two storages."""
    rows = [[0, 2, 0, 0, 2, 0, -1, 4], [2, 0, 2, 2, 1, 2, 0, 3], [2, 3, 2, 4, 2, 3, 1, 3], [5, 2, 2, 3, 1, 2, 0, 4]]
    nodes, heads = torch.tensor(rows, dtype=torch.int32), (2, 1)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    inputs = [normal(8, heads[0], 8)]
    inputs += [normal(count, heads[1], width) for count in (4, 2) for width in (8, 16)]

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = (*tensors, *[None] * (6 - len(tensors)))
        out, lse = ops.forward(*given, nodes, 0.4, False, 2, 0.0, False, 30, False)
        assert out.shape == (8, heads[0], 16)
        return out, lse.nan_to_num(neginf=0.0)

    assert torch.autograd.gradcheck(outputs, [one.requires_grad_() for one in inputs])


# Determinism


@pytest.mark.parametrize("flag", [True, False])
def test_argument_of_the_context_free_function_reaches_the_operator(flag: bool, device: str) -> None:
    batch = batch_of(ONE_GROUP, device)
    q, _, _, k, v = leaves_of(batch)
    with Operators() as operators:
        offsets = batch.cu_seqlens_q, batch.cu_seqlens_k_decoded
        flash_attn_varlen_func(q, k, v, *offsets, 4, 6, deterministic=flag).sum().backward()
    assert operators.of_ours()["backward"][-1] is flag


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library.stand_in(monkeypatch)


def tensors_of_a_call() -> tuple[Tensor, ...]:
    """q, k, v, k_decoded, v_decoded, sinks, nodes."""
    q, k, v = (torch.randn(rows, heads, 16).bfloat16() for rows, heads in ((6, 2), (4, 1), (4, 1)))
    nodes = torch.tensor([[0, 6, 0, 0, 4, 0, -1, 1]], dtype=torch.int32)
    return q, k, v, k[:2].clone(), v[:2].clone(), torch.zeros(2), nodes


def test_what_makes_the_kernels_deterministic(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, *_, nodes = tensors_of_a_call()

    def asked(flag: bool) -> bool:
        library.calls.clear()
        given = (q, None, q, k, v, None, None, None, q, torch.zeros(2, 6), nodes)
        ops._backward_cuda(unpack(BackwardCall, (*given, *PLAIN[:-1], flag)))
        *_, options, deterministic = library.calls[0][1][0]
        assert options == (*PLAIN[:-1], flag)
        return bool(deterministic)

    assert asked(True) and not asked(False)
    torch.use_deterministic_algorithms(True)
    try:
        assert asked(False)
    finally:
        torch.use_deterministic_algorithms(False)
    for value, wanted in (("0", False), ("1", True)):
        monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", value)
        assert asked(False) == wanted


@pytest.mark.parametrize("name", ["DUALKV_DEBUG", "FLASH_ATTENTION_DETERMINISTIC"])
def test_switches_in_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_on = ops.checks_values if name == "DUALKV_DEBUG" else lambda: kernels.is_deterministic(False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv(name, raising=False)
    assert not is_on()
    for text in ("1", "true", "Yes", "ON", "0", "no", ""):
        monkeypatch.setenv(name, text)
        assert is_on() is (text not in ("0", "no", ""))
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ValueError, match=f"the environment's {name}: expected 1 or 0 .*, got 'maybe'"):
        is_on()


# The kernel library


def test_tables_refuse_what_the_library_would_misread(library: Library) -> None:
    good, parents = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([-1, 0], dtype=torch.int32)
    for bad, error in (
        (good.long(), TypeError),
        (good[:1], ValueError),
        (good[None], ValueError),
        (good.repeat(2)[::2], ValueError),
    ):
        for place in range(1, 4):
            offsets = [good] * 4
            offsets[place] = bad
            with pytest.raises(error, match=r"^cu_seq"):
                ops._sequence_nodes_cuda(*offsets, 5)
        with pytest.raises(error, match=r"^(parents|cu_seqlens): expected"):
            ops._tree_nodes_cuda(good, bad, 5)
    for given in ((good, good, good, None, 5), (good, good, None, good, 5), (good, good, good, good, None)):
        with pytest.raises(ValueError, match=r"^(cu_seq\w+|total_context): expected"):
            ops._sequence_nodes_cuda(*given)
    assert library.calls == [] and ops._tree_nodes_cuda(good, parents, 5).shape == (2, 8)


@pytest.mark.parametrize("softcap", [1000.1, 0.009])
def test_the_kernels_refuse_what_they_lack(softcap: float, library: Library) -> None:
    """Unless the reference is asked for."""
    call = packed()
    q, k, v = call.tensors
    given, lse = (q, k, v, None, None), q.new_zeros(q.shape[1::-1])
    functions: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.unpacking(ForwardCall, ops._forward_cuda), (*given, None, call.rest.nodes)),
        (ops.unpacking(BackwardCall, ops._backward_cuda), (call.dout, None, *given, None, q, lse, call.rest.nodes)),
    ]
    for function, tensors in functions:
        with pytest.raises(NotImplementedError, match="^softcap: expected .* for the CUDA kernels"):
            function(*tensors, 0.25, True, -1, softcap, False, 9, False)
        assert all(isinstance(one, Tensor) for one in function(*tensors, 0.25, True, -1, softcap, True, 9, False))
    assert library.calls == []


def test_softcaps_of_the_kernels_are_those_of_the_header() -> None:
    header = (Path(__file__).parents[2] / "csrc/core/softcap.h").read_text()
    least, largest = (re.search(rf"{name} = ([0-9.]+)", header) for name in ("kMinSoftcap", "kMaxSoftcap"))
    assert least and largest and (float(least[1]), float(largest[1])) == checks.KERNEL_SOFTCAPS


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What setup.py wrote where it left the kernels out."""
    path = tmp_path / "without_kernels.txt"
    path.write_text("no GPU was visible\n")
    monkeypatch.setattr(kernels, "WITHOUT_KERNELS", path)
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "libdualkv.so")
    return path


@pytest.mark.parametrize("capability", [None, (8, 0), (7, 5)])
@pytest.mark.parametrize("reason", ["no GPU was visible at install", "none were built in", "undefined symbol: cuda"])
def test_cuda_call_without_kernels_names_the_fix(
    reason: str, capability: tuple[int, int] | None, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "load", lambda: (None, reason if "symbol" in reason else None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if "none" in reason:
        written.unlink()
    arch = 80 if capability else 90
    command = f"DUALKV_ARCHS={arch} pip install --no-deps --force-reinstall --no-cache-dir ."
    monkeypatch.setattr(kernels, "current_device", lambda: -1)
    q, k, v, *_, nodes = tensors_of_a_call()
    functions: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.unpacking(ForwardCall, ops._forward_cuda), (q, k, v, None, None, None, nodes, *PLAIN)),
        (ops.unpacking(BackwardCall, ops._backward_cuda), (q, None, q, k, v, None, None, None, q, q, nodes, *PLAIN)),
        (ops._sequence_nodes_cuda, (nodes[0], nodes[0], None, None, None)),
        (ops._tree_nodes_cuda, (nodes[0], nodes[0, 1:], 3)),
    ]  # fmt: skip
    for function, given in functions:
        with pytest.raises(RuntimeError, match="install a wheel with kernels") as caught:
            function(*given)
        assert "nvcc" in str(caught.value)
        assert reason in str(caught.value) and f"`{command}`" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [({}, True), ({"text": "DUALKV_PURE_PYTHON was set\n"}, False), ({"gpu": False}, False), ({"cuda": None}, False),
     ({"visible": ""}, False), ({"visible": "1"}, True), ({"library": True}, False)],
)  # fmt: skip
def test_the_import_says_that_a_gpu_has_no_kernels(
    change: dict[str, Any], says: bool, written: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """As where pip's cache had the wheel of a machine without a GPU. Not where it was asked for, or no GPU is used."""
    gpu = written.with_name("nvidiactl")
    monkeypatch.setattr(kernels, "GPU_DEVICE", gpu)
    monkeypatch.setattr(torch.version, "cuda", change.get("cuda", "13.0"))
    written.write_text(change.get("text", written.read_text()))
    for path, is_there in ((gpu, change.get("gpu", True)), (kernels.LIBRARY, change.get("library", False))):
        if is_there:
            path.touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if "visible" in change:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", change["visible"])
    kernels.warn_without_kernels()
    assert len(recwarn) == says
    for one in recwarn:
        assert re.search("no GPU was visible at install.*ARCHS=90 pip install .*--no-cache-dir .`", str(one.message))


def test_a_library_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name; and so is an installation whose module is not for this Python."""
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "libdualkv.so")
    kernels.load.cache_clear()
    assert kernels.load() == (None, None)
    (tmp_path / "libdualkv.so").touch()
    (tmp_path / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    module = ModuleType("flash_attn_dualkv._C")
    module.open_library = lambda path: "0.0.1"  # type: ignore[attr-defined]
    for given, words in ((module, "of version 0.0.1, the Python package of"), (None, "no module .*_C.cpython-39-")):
        monkeypatch.setitem(sys.modules, "flash_attn_dualkv._C", given)  # type: ignore[arg-type]
        kernels.load.cache_clear()
        found, error = kernels.load()
        assert found is None and error is not None and re.search(words, error)
    kernels.load.cache_clear()


@pytest.mark.parametrize(("capability", "warns"), [((7, 5), False), ((8, 9), False), ((9, 0), False), ((12, 0), True)])
def test_ptx_is_said_once(
    capability: tuple[int, int], warns: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    built = Mock(build_info=lambda: "archs\t80;90\nptx\t80\ncuda\t13.0\nhead_dims sm80\t64 128\n")
    monkeypatch.setattr(kernels, "load", lambda: (built, None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    info = build_info()
    assert info["head_dims"] == {"sm80": [64, 128]} and info["archs"] == ["80", "90"]
    assert info["gpus"] == {"0: a GPU": "PTX" if warns else "nothing" if capability[0] == 7 else "machine code"}
    kernels.prepare.cache_clear()
    kernels.prepare(0), kernels.prepare(0)
    kernels.prepare.cache_clear()
    assert len(recwarn) == warns and all("DUALKV_ARCHS" in str(one.message) for one in recwarn)


def test_the_reference_can_be_forced(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """For debugging; said once."""
    monkeypatch.setenv("DUALKV_FORCE_REFERENCE", "1")
    ops.forces_reference.cache_clear()
    q, k, v, *_, nodes = tensors_of_a_call()
    with pytest.warns(UserWarning, match="DUALKV_FORCE_REFERENCE is set"):
        out, lse = ops._forward_cuda(unpack(ForwardCall, (q, k, v, None, None, None, nodes, *PLAIN)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops._backward_cuda(unpack(BackwardCall, (q, None, q, k, v, None, None, None, out, lse, nodes, *PLAIN)))
        ops._sequence_nodes_cuda(*[torch.tensor([0, 2, 5], dtype=torch.int32)] * 2, None, None, None)
        ops._tree_nodes_cuda(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([-1], dtype=torch.int32), 5)
    ops.forces_reference.cache_clear()
    assert library.calls == []


def test_build_info() -> None:
    info = build_info()
    assert info["version"] == flash_attn_dualkv.__version__
    assert info["torch"] == torch.__version__
    assert info["compiled"] == (kernels.load()[0] is not None) == bool(info["archs"]) == bool(info["head_dims"])
    assert info["installation"] in ("checkout", "package")
    assert set(info) >= {"ptx", "gpus", "dtypes", "cuda", "torch_cuda", "python", "platform", "compiled_error"}


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_raw_operators_refuse_tensors_of_the_wrong_rank(name: str, device: str) -> None:
    """Whatever reads sizes or strides comes after the check."""
    batch = batch_of(ONE_GROUP, device)
    q, k, v, k_decoded, v_decoded = batch.inputs
    tensors = {"q": q, "k": k, "v": v, "k_decoded": k_decoded, "v_decoded": v_decoded}
    options = ("softmax_scale", "causal", "window_left", "softcap", "reference")
    options += ("mean_keys", "deterministic")
    rest = {"nodes": nodes_of(batch), "sinks": None, **dict(zip(options, PLAIN))}
    if name == "backward":
        tensors |= {"dout": q, "out": q}
        rest |= {"dlse": None, "lse": torch.zeros(q.shape[1::-1], device=device, dtype=q.dtype)}
    for wrong, one in tensors.items():
        for given in (one[0, 0, 0], one.flatten(), one[0], one[None]):
            expected = "shape" if wrong in ("dout", "out") else "3 dimensions"
            with pytest.raises(ValueError, match=rf"^{wrong}: expected {expected} .*, got shape"):
                getattr(ops, name)(**{**rest, **tensors, wrong: given})


# The FlashAttention-2 function


FLASH_ATTENTION_2 = (
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, "
    "block_table=None"
)
PUBLISHED = (
    "q, k_context, v_context, k_decoded, v_decoded, cu_seqlens_q, cu_seqlens_k_decoded, max_seqlen_q, context_seqlen, "
    "max_seqlen_k_decoded, softmax_scale=None, causal=True"
)
OF_TREES = "q, k, v, cu_seqlens, parents, softmax_scale=None"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (flash_attn_varlen_func, FLASH_ATTENTION_2),
        (flash_attn_dualkv_varlen_func, PUBLISHED),
        (flash_attn_tree_varlen_func, OF_TREES),
    ],
)
def test_signatures(function: Any, expected: str) -> None:
    """That of FlashAttention-2 entirely; of the others what may be given by its place."""
    parameters = inspect.signature(function).parameters.values()
    found = [
        one.name if one.default is one.empty else f"{one.name}={one.default!r}"
        for one in parameters
        if one.kind is one.POSITIONAL_OR_KEYWORD or function is flash_attn_varlen_func
    ]
    assert ", ".join(found) == expected
