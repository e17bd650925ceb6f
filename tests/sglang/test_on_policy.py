# SPDX-License-Identifier: BSD-3-Clause
"""SGLang's --rl-on-policy-target and a trainer: its sampler's roundings, on the code of the installed SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import sglang_python
import torch
from torch import Tensor, nn

if not sglang_python.install():
    pytest.skip("SGLang is not installed: .ci/run puts its Python code on the path", allow_module_level=True)

# Modules compile functions where they are imported, which takes a real Triton.
with mock.patch.object(torch, "compile", return_value=lambda function: function):
    from sglang.srt.layers import sampler as stock

from flash_attn_dualkv.scores import score_in_chunks

# --- log-probabilities ----------------------------------------------------------------------------


class Told(SimpleNamespace):
    """What SGLang's sampler is told, None of the most."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


def sampled(logits: Tensor, tokens: Tensor, temperature: float, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Log-probabilities of SGLang's sampler, which draws these tokens."""
    told = Told(rl_on_policy_target="fsdp", enable_deterministic_inference=True)
    told.deterministic = told.kernel = told.features = told
    for name in ("get_global_server_args", "get_exec", "get_server_args"):
        monkeypatch.setattr(stock, name, lambda: told, raising=False)
    monkeypatch.setattr(stock.Sampler, "_sample_from_logprobs", lambda *_: tokens)
    info = Told(temperatures=torch.full((len(logits), 1), temperature), device="cpu")
    output = SimpleNamespace(next_token_logits=logits.clone())
    counts, positions = [0] * len(logits), torch.zeros(len(logits), dtype=torch.long)
    stock.Sampler()(output, info, True, counts, [None] * len(logits), positions)
    found: Tensor = output.next_token_logprobs
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.6, 1.3, 0.1, 3.0])
def test_log_probabilities(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the bit, of logits as SGLang's head gives them: products in bf16, copied to float32."""
    torch.manual_seed(0)
    rows, vocabulary = 300, 1003
    head, hidden = nn.Linear(64, vocabulary, bias=False).bfloat16(), torch.randn(rows, 64).mul(4).bfloat16()
    tokens = torch.randint(vocabulary, (rows,))
    with torch.no_grad():
        expected = sampled(head(hidden).float(), tokens, temperature, monkeypatch)
        options = dict(rows=64, temperature=temperature, rounding=torch.bfloat16)
        logps, _ = score_in_chunks(head, hidden, tokens, **options)
        assert torch.equal(logps, expected.float()) and expected.dtype == torch.bfloat16
        plain, _ = score_in_chunks(head, hidden, tokens, rows=64, temperature=temperature)
    assert not torch.equal(plain, expected.float())
