# SPDX-License-Identifier: BSD-3-Clause
"""SGLang's --rl-on-policy-target and a trainer: its sampler's roundings, on the code of the installed SGLang."""

from __future__ import annotations

import itertools
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
    from sglang.srt.layers import activation, layernorm, sampler
    from sglang.srt.layers.rotary_embedding import utils as rotary

from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from flash_attn_dualkv import pack_shared_prompts
from flash_attn_dualkv.errors import SharedPromptError, SharedPromptUnsupportedError
from flash_attn_dualkv.integrations.sglang import on_policy
from flash_attn_dualkv.integrations.transformers import register, shared_prompt_forward
from flash_attn_dualkv.scores import score_in_chunks


class Told(SimpleNamespace):
    """Arguments that SGLang's modules read, most of them None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """That --rl-on-policy-target is fsdp."""
    options = Told(rl_on_policy_target="fsdp", enable_deterministic_inference=True)
    options.deterministic = options.kernel = options.features = options
    names = "get_global_server_args", "get_server_args", "get_exec"
    for module, name in itertools.product((activation, layernorm, sampler), names):
        monkeypatch.setattr(module, name, lambda: options, raising=False)


# --- log-probabilities ----------------------------------------------------------------------------


def sampled(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of SGLang's sampler, which draws these tokens."""
    info = Told(temperatures=torch.full((len(logits), 1), temperature), device="cpu")
    output = SimpleNamespace(next_token_logits=logits.clone())
    with mock.patch.object(sampler.Sampler, "_sample_from_logprobs", return_value=tokens):
        sampler.Sampler()(output, info, True, [0] * len(logits), [None] * len(logits), torch.zeros(len(logits)))
    found: Tensor = output.next_token_logprobs
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.6, 1.3, 0.1, 3.0])
def test_log_probabilities(temperature: float) -> None:
    """Equal to the bit, of logits as SGLang's head gives them: products in bf16, copied to float32."""
    torch.manual_seed(0)
    rows, vocabulary = 300, 1003
    head, hidden = nn.Linear(64, vocabulary, bias=False).bfloat16(), torch.randn(rows, 64).mul(4).bfloat16()
    tokens = torch.randint(vocabulary, (rows,))
    with torch.no_grad():
        expected = sampled(head(hidden).float(), tokens, temperature)
        options = dict(rows=64, temperature=temperature, rounding=torch.bfloat16)
        logps, _ = score_in_chunks(head, hidden, tokens, **options)
        assert torch.equal(logps, expected.float()) and expected.dtype == torch.bfloat16
        plain, _ = score_in_chunks(head, hidden, tokens, rows=64, temperature=temperature)
    assert not torch.equal(plain, expected.float())


# --- operators ------------------------------------------------------------------------------------


def tiny_qwen3() -> Any:
    register()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, attn_implementation="dualkv",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5)
    return model.eval()


def test_operators_are_those_of_qwen3() -> None:
    """Norms behind residuals in float32, norms of heads, RoPE and the activation have the bits of transformers'."""
    model = tiny_qwen3()
    first = model.model.layers[0]
    hidden, branch = torch.randn(5, 64), torch.randn(5, 64).bfloat16()
    wide = dict(weight_dtype=torch.float32, cast_x_before_out_mul=True)

    def norm_of(theirs: Any, **options: Any) -> Any:
        made = layernorm.RMSNorm(len(theirs.weight), eps=theirs.variance_epsilon, **wide, **options)
        made.weight = theirs.weight
        return made.forward_native

    residual = norm_of(first.input_layernorm, override_orig_dtype=torch.float32, fp32_residual=True)
    assert torch.equal(residual(hidden), first.input_layernorm(hidden))
    out, summed = residual(branch, hidden)
    assert torch.equal(summed, hidden + branch) and torch.equal(out, first.input_layernorm(summed))
    q = torch.randn(5, 4, 32).bfloat16()
    normed = norm_of(first.self_attn.q_norm)(q)
    assert torch.equal(normed, first.self_attn.q_norm(q)) and normed.dtype == torch.float32
    cos, sin = model.model.rotary_emb(hidden, torch.arange(3, 8)[None])
    turned, _ = modeling_qwen3.apply_rotary_pos_emb(*(normed.transpose(0, 1)[None],) * 2, cos, sin)
    assert torch.equal(rotary.apply_rotary_emb(normed, cos[0, :, :16], sin[0, :, :16], True), turned[0].transpose(0, 1))
    gate_up = torch.randn(5, 192).bfloat16()
    gate, up = gate_up.chunk(2, -1)
    assert torch.equal(activation.SiluAndMul().forward_native(gate_up), first.mlp.act_fn(gate) * up)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's batch-invariant mode, in the place of whose kernels for GPUs nothing stands."""
    calls: list[Any] = []
    made = SimpleNamespace(
        calls=calls, is_on=False, is_batch_invariant_mode_enabled=lambda: made.is_on,
        enable_batch_invariant_mode=lambda enable_bmm: calls.append(enable_bmm),
        disable_batch_invariant_mode=lambda: calls.append("off"),
    )  # fmt: skip
    monkeypatch.setattr(on_policy, "_of_sglang", lambda: (made, rotary.apply_rotary_emb))
    return made


def test_on_policy_operators(operators: Any) -> None:
    """Scores in it are in bf16 of products in bf16; behind it everything is as before, and gradients flow."""
    model, stock_rope = tiny_qwen3(), modeling_qwen3.apply_rotary_pos_emb
    batch = pack_shared_prompts([[1, 2, 3, 4]] * 2, [[5, 6], [7, 8, 9]])
    with on_policy.on_policy_operators(model):
        assert operators.calls == [False] and modeling_qwen3.apply_rotary_pos_emb is not stock_rope
        logps, _ = shared_prompt_forward(model, batch, temperature=0.7, rounding=torch.bfloat16)
        logps.sum().backward()
    assert torch.equal(logps, logps.bfloat16().float()) and model.lm_head.weight.grad is not None
    assert operators.calls == [False, "off"] and modeling_qwen3.apply_rotary_pos_emb is stock_rope
    assert not torch.is_autocast_enabled("cpu")
    plain, _ = shared_prompt_forward(model, batch, temperature=0.7)
    torch.testing.assert_close(logps, plain, atol=0.1, rtol=0)
    operators.is_on = True  # by the trainer, which leaves it on
    with pytest.raises(ZeroDivisionError), on_policy.on_policy_operators(model):
        raise ZeroDivisionError
    assert operators.calls[2:] == [False] and modeling_qwen3.apply_rotary_pos_emb is stock_rope
    with pytest.raises(SharedPromptError, match="rounding.*torch.bfloat16 or None.*float16"):
        shared_prompt_forward(model, batch, rounding=torch.float16)


def test_models_and_processes_that_have_other_bits(operators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(model: Any, message: str, error: type[Exception] = SharedPromptError) -> None:
        with pytest.raises(error, match=message), on_policy.on_policy_operators(model):
            pass

    refused(tiny_qwen3().bfloat16(), "model.*in float32")
    other = tiny_qwen3()
    other.model.rotary_emb.inv_freq *= 1 + 1e-6
    refused(other, "frequencies of RoPE from the CPU")
    other.config.model_type = "qwen3_moe"
    refused(other, "Qwen3.*qwen3_moe", SharedPromptUnsupportedError)
    for name, made, message in (
        ("bmm", lambda *_: None, "enable_bmm.*False"),
        ("get_float32_matmul_precision", lambda: "high", "float32_matmul_precision.*highest"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch, name, made)
            refused(tiny_qwen3(), message)
    monkeypatch.undo()
    monkeypatch.setattr(on_policy, "_NAMES", {"sglang_that_is_missing": "", **on_policy._NAMES})
    refused(tiny_qwen3(), "sglang.*in the trainer's environment", SharedPromptUnsupportedError)
