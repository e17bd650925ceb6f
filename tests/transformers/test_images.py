# SPDX-License-Identifier: BSD-3-Clause
"""Images in shared prompts: computed once a group, exact, and never shared by equal tokens alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import TOLERANCES, check_equal, check_gradients, dualkv, gradients, stock_twin
from tiny_multimodal import QWEN, Pictured, multimodal_model

pytestmark = pytest.mark.usefixtures("restored_registry")
# One image, text alone, two images of other sizes; siblings apart.
MIXED = Pictured.random([([(1, 4, 4)], [5, 3, 0]), ([], [2, 4]), ([(1, 4, 6), (1, 2, 4)], [3, 1])]).take(
    [0, 3, 5, 1, 4, 2, 6]
)


def calls_of_tower(model: Any) -> list[int]:
    """Counts patches in each call."""
    found: list[int] = []
    tower = next(one for name, one in model.named_modules() if name.endswith("visual"))
    tower.register_forward_pre_hook(lambda _, args, kwargs: found.append(len(args[0])), with_kwargs=True)
    return found


@pytest.mark.parametrize("boundary", ["replicate", "gather"])
@pytest.mark.parametrize("model_type", QWEN)
def test_images_are_exact(model_type: str, boundary: str) -> None:
    """Log-probabilities and the gradients of all parameters, those of the tower too, which runs once a group."""
    is_wide = "moe" not in model_type  # experts have no float64
    dtype = torch.float64 if is_wide else torch.float32
    options = dict(num_experts_per_tok=4) if not is_wide else {}
    model = multimodal_model(model_type, dtype=dtype, **options).train()
    stock = stock_twin(model, "eager")
    batch = MIXED.pack(boundary=boundary, pad_to_multiple_of=8)
    patches = calls_of_tower(model)
    got, _ = dualkv.shared_prompt_forward(model, batch)
    expected = MIXED.stock_logps(stock)
    weights = torch.linspace(-1, 1, len(got), dtype=got.dtype)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    check_equal(got.detach(), expected.detach(), TOLERANCES[dtype].value * 2)
    of_stock = gradients(stock)
    assert any("visual" in name for name in of_stock)
    check_gradients(gradients(model), of_stock, 1e-5)
    assert patches[-1] == 16 + 24 + 8 and len([one for one in patches if one == patches[-1]]) == 1
