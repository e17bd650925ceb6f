"""Every causal LM that transformers can make from a tiny configuration: exact on shared prompts, or refused."""

from __future__ import annotations

import models_page
import pytest
import torch
from sweep import CAUSAL_LMS, EXACT, SAMPLES, any_model, causal_lm_verdict, check_page
from tiny_models import VERSION, check_equal, stock_twin

from flash_attn_dualkv import SharedPromptError


@pytest.mark.parametrize("model_type", CAUSAL_LMS)
def test_exact_or_refused(model_type: str) -> None:
    """Log-probabilities and the gradients of all parameters, in training mode."""
    verdict = causal_lm_verdict(model_type)
    assert verdict.kind != "inexact", verdict.reason
    assert verdict.kind == "exact" or VERSION < (5, 24) or model_type not in EXACT
    check_page(models_page.CAUSAL_LMS, "transformers", model_type, verdict)
    if verdict.kind == "stock":
        pytest.skip(f"the stock model cannot run: {verdict.reason}")


@pytest.mark.parametrize("model_type", CAUSAL_LMS)
def test_without_a_layout_as_stock(model_type: str) -> None:
    """Also of models that are refused with one: where a name that is not transformers' own changes them, an error."""
    ids = torch.tensor([SAMPLES.prompts[0], SAMPLES.prompts[0][::-1]])
    mask = torch.ones_like(ids)
    mask[1, -9:] = 0
    with torch.no_grad():
        try:
            model = any_model(model_type)
            got = model(ids, attention_mask=mask, use_cache=False).logits
        except SharedPromptError:
            assert VERSION < (5, 24) or model_type not in EXACT
            return
        except Exception as error:
            with pytest.raises(type(error)):
                stock_twin(model, "eager")(ids, attention_mask=mask, use_cache=False)
            pytest.skip(f"the stock model cannot run: {type(error).__name__}")
        expected = stock_twin(model, "eager")(ids, attention_mask=mask, use_cache=False).logits
    check_equal(got[mask.bool()], expected[mask.bool()], 5e-5)
