# SPDX-License-Identifier: BSD-3-Clause
"""All models of text, and of more, that transformers makes of tiny configurations: exact or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models_page
import pytest
import torch
from sweep import CAUSAL_LMS, MULTIMODAL, SAMPLES, any_model, check_page, model_verdict
from tiny_models import VERSION, check_equal, stock_twin
from tiny_multimodal import any_multimodal

from flash_attn_dualkv import SharedPromptError

pytestmark = pytest.mark.usefixtures("restored_registry")
EXACT = {title: models_page.exact(title) for title in (models_page.CAUSAL_LMS, models_page.MULTIMODAL)}
MODELS = [
    *((models_page.CAUSAL_LMS, any_model, name) for name in CAUSAL_LMS),
    *((models_page.MULTIMODAL, any_multimodal, name) for name in MULTIMODAL),
]
# Beside every causal LM.
USED = ("qwen3_5", "qwen3_vl", "qwen2_5_vl", "gemma3", "gemma4", "mistral3", "llava")
# One of each way to be exact, and one of each reason to be refused. All others behind -m slow.
QUICK = {
    "bert", "biogpt", "codegen", "ctrl", "dbrx", "deepseek_v2", "diffllama", "falcon_h1", "gemma3n_text", "gemma4_text",
    "gpt2", "gpt_bigcode", "gpt_oss", "jetmoe", "kimi_linear", "llama", "longcat_flash", "modernbert-decoder", "phimoe",
    "qwen3_5_text", "zamba2",
    "bart", "big_bird", "bloom", "deepseek_v32", "deepseek_v4", "doge", "falcon", "gpt_neo", "jamba", "llama4_text",
    "mamba", "minimax_m3_vl_text", "opt", "recurrent_gemma", "roberta", "rwkv", "xglm", "xlnet", "zaya",
    "gemma3", "idefics", "kosmos-2", "llava", "mllama", "molmo2", "qwen2_5_vl", "qwen3_5", "udop",
}  # fmt: skip


def sweep(models: list[tuple[str, Callable[[str], Any], str]]) -> Any:
    marks = {False: [pytest.mark.slow], True: []}
    params = [pytest.param(*one, marks=marks[one[2] in QUICK], id=f"{one[0]}-{one[2]}") for one in models]
    return pytest.mark.parametrize(("title", "make", "name"), params)


def must_be_exact(title: str, name: str) -> bool:
    return VERSION >= (5, 24) and name in EXACT[title]


@sweep(MODELS)
def test_exact_or_refused(title: str, make: Callable[[str], Any], name: str) -> None:
    """Log-probabilities of text and the gradients of all parameters, in training mode."""
    verdict = model_verdict(make, name)
    assert verdict.kind != "inexact", verdict.reason
    assert verdict.kind == "exact" or not must_be_exact(title, name)
    check_page(title, "transformers", name, verdict)
    if verdict.kind == "stock":
        pytest.skip(f"the stock model cannot run on text: {verdict.reason}")


@sweep([one for one in MODELS if one[1] is any_model or one[2] in USED])
def test_without_a_layout_as_stock(title: str, make: Callable[[str], Any], name: str) -> None:
    """Also of models that are refused with one: where a name that is not transformers' own changes them, an error."""
    ids = torch.tensor([SAMPLES.prompts[0], SAMPLES.prompts[0][::-1]])
    mask = torch.ones_like(ids)
    mask[1, -9:] = 0
    with torch.no_grad():
        try:
            model = make(name)
            got = model(ids, attention_mask=mask, use_cache=False).logits
        except SharedPromptError:
            assert not must_be_exact(title, name)
            return
        except Exception as error:
            with pytest.raises(type(error)):
                stock_twin(model, "eager")(ids, attention_mask=mask, use_cache=False)
            pytest.skip(f"the stock model cannot run: {type(error).__name__}")
        expected = stock_twin(model, "eager")(ids, attention_mask=mask, use_cache=False).logits
    check_equal(got[mask.bool()], expected[mask.bool()], 5e-5)
