"""Small batches and calls for the tests of how the functions live with the rest of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from groups import Batch, Group, build_groups
from torch import Tensor

from flash_attn_dualkv import flash_attn_dualkv_varlen_func

NAMES = ("q", "k_context", "v_context", "k_decoded", "v_decoded")
TWO_GROUPS = (Group(5, ((3, 3), (0, 0), (4, 4), (5, 0))), Group(9, ((6, 2), (2, 5))))
ONE_GROUP = (Group(7, ((3, 3), (4, 6))),)
OTHER_GROUPS = (Group(3, ((2, 2),)), Group(11, ((1, 4), (5, 5), (2, 0))))
NOTHING = (Group(0, ()),)
NO_ROWS = (Group(0, ((0, 0), (0, 0))), Group(0, ()))
NO_KEYS = (Group(0, ((3, 0),)),)


def batch_of(groups: Sequence[Group], device: str, **options: Any) -> Batch:
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    return build_groups(groups, **{"head_dim": 64, "heads": (4, 2), "dtype": dtype, "device": device, **options})


def assert_close(actual: Tensor | None, expected: Tensor | None) -> None:
    """Equal on the CPU; on a GPU the order of atomic additions may differ from one call to the next."""
    if actual is None or expected is None:
        assert actual is expected
    elif actual.is_cuda:
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def options_of(batch: Batch) -> dict[str, Any]:
    return {
        "cu_seqlens_q": batch.cu_seqlens_q,
        "cu_seqlens_k_decoded": batch.cu_seqlens_k_decoded,
        "max_seqlen_q": 6,
        "context_seqlen": batch.longest_context,
        "max_seqlen_k_decoded": 6,
        "cu_seqlens_context": batch.cu_seqlens_context,
        "cu_seqs_per_context": batch.cu_seqs_per_context,
    }


def leaves_of(batch: Batch) -> list[Tensor]:
    return [one.detach().clone().requires_grad_() for one in batch.inputs]


def attend(batch: Batch, inputs: Any, **options: Any) -> Any:
    return flash_attn_dualkv_varlen_func(*inputs, **options_of(batch) | options)
