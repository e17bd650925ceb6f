# SPDX-License-Identifier: BSD-3-Clause
"""A trainer's operators as SGLang has them with --rl-on-policy-target fsdp, so that both have the same bits.

SGLang changes its Qwen3 to what a model in float32 computes under autocast, but for products, means
and log_softmax, which are its batch-invariant kernels, and RoPE, which it compiles. A trainer takes these
from it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SharedPromptError, SharedPromptUnsupportedError
from ..common.patching import in_place_of
from ..engines.names import check_names
from ..transformers.admission.unwrap import causal_lm_of

_OPERATORS, _ROTARY = "sglang.srt.batch_invariant_ops", "sglang.srt.layers.rotary_embedding.utils"
_NAMES = {
    _OPERATORS: "disable_batch_invariant_mode enable_batch_invariant_mode is_batch_invariant_mode_enabled",
    _ROTARY: "apply_rotary_emb",
}
_MODEL = "transformers.models.qwen3.modeling_qwen3"


@contextmanager
def on_policy_operators(model: nn.Module) -> Iterator[None]:
    """Compute as SGLang with --rl-on-policy-target fsdp: forwards and backwards of Qwen3 inside of it.

    With `shared_prompt_forward(..., rounding=torch.bfloat16)` in it, log-probabilities are those that SGLang samples
    with on the attention backend dualkv. The operators are replaced in the whole process meanwhile.

    Args:
        model: a Qwen3 of transformers (dense), also wrapped, in float32, of whose products autocast makes bf16; made
            on the CPU, so that its frequencies of RoPE are those of SGLang.

    Raises:
        SharedPromptUnsupportedError: another model, or SGLang lacks these operators.
        SharedPromptError: parameters in another type, other frequencies, products in TF32, or a process in which
            SGLang has replaced torch.bmm, too.
    """
    causal_lm: Any = causal_lm_of(model)
    if causal_lm.config.model_type != "qwen3":
        raise SharedPromptUnsupportedError("model", "Qwen3, which SGLang makes on-policy", causal_lm.config.model_type)
    operators, rotate = _of_sglang()
    was_on = operators.is_batch_invariant_mode_enabled()
    _check(causal_lm)
    file: Any = importlib.import_module(_MODEL)
    stock = file.apply_rotary_pos_emb

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE of (B, H, T, d) by (B, T, d), by SGLang's function of (tokens, heads, d) and (tokens, d / 2)."""
        angles = [part.expand(len(q), -1, -1).flatten(0, 1)[:, : q.shape[-1] // 2] for part in (cos, sin)]
        rows = (x.transpose(1, 2) for x in (q, k))
        turned = [rotate(x.flatten(0, 1), *angles, True).view(x.shape).transpose(1, 2) for x in rows]
        return turned[0], turned[1]

    operators.enable_batch_invariant_mode(enable_bmm=False)
    file.apply_rotary_pos_emb = in_place_of(stock, apply_rotary_pos_emb)
    try:
        with torch.autocast(causal_lm.device.type, dtype=torch.bfloat16):
            yield
    finally:
        file.apply_rotary_pos_emb = stock
        if not was_on:
            operators.disable_batch_invariant_mode()


def _check(causal_lm: Any) -> None:
    """SharedPromptError for what has other bits than SGLang."""
    dtypes = {parameter.dtype for parameter in causal_lm.parameters()}
    rotary, precision = causal_lm.model.rotary_emb, torch.get_float32_matmul_precision()
    with torch.device("cpu"):
        frequencies = type(rotary)(causal_lm.config).inv_freq
    for name, expected, got, is_so in (
        ("model", "in float32, as are SGLang's residuals and norms", dtypes, dtypes == {torch.float32}),
        ("model", "frequencies of RoPE from the CPU", "others", torch.equal(rotary.inv_freq.cpu(), frequencies)),
        ("float32_matmul_precision", "highest, for angles of RoPE", precision, precision == "highest"),
        ("enable_bmm", "False, for angles of RoPE, in a trainer", True, inspect.isbuiltin(torch.bmm)),
    ):
        if not is_so:
            raise SharedPromptError(name, expected, got)


@functools.cache
def _of_sglang() -> tuple[Any, Any]:
    """Its batch-invariant operators, and its RoPE, compiled as it does."""
    try:
        operators, rotary = map(importlib.import_module, _NAMES)
    except ImportError as error:
        raise SharedPromptUnsupportedError("sglang", "one in the trainer's environment", str(error)) from error
    check_names(_NAMES)
    return operators, torch.compile(dynamic=True)(rotary.apply_rotary_emb)
