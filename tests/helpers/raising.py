# SPDX-License-Identifier: BSD-3-Clause
"""Makes the second micro-batch of an engine's first update raise; the update then runs again, as if nothing had been.

For `external_lib` of verl, behind the plug-in.
"""

from __future__ import annotations

from typing import Any

from flash_attn_dualkv.integrations.verl.engine import SharedPromptFSDPEngine

STOCK = SharedPromptFSDPEngine.forward_backward_batch


def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
    if forward_only or getattr(self, "has_raised", False):
        return STOCK(self, data, loss_function, forward_only)
    self.has_raised, calls = True, []

    def raises(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise ArithmeticError("no loss")
        return loss_function(*args, **kwargs)

    try:
        STOCK(self, data.clone(), raises)
    except ArithmeticError as error:
        said = [*error.args, *getattr(error, "__notes__", [])]
        assert "in part 0.1 (prompt_once): .grad has gradients of the passes before it" in str(said)
        assert self.passes is None
    else:
        raise AssertionError("the second micro-batch has not raised")
    self.optimizer_zero_grad()  # as verl's context does it for an error
    return STOCK(self, data, loss_function)


SharedPromptFSDPEngine.forward_backward_batch = forward_backward_batch  # type: ignore[method-assign]
