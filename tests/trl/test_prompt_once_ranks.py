# SPDX-License-Identifier: BSD-3-Clause
"""TRL's prompt_once on two processes, whose slices share prompts in ways of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_trl
import torch
from ranks import whole_gradients, wrap
from tiny_models import check_equal, check_gradients, tiny_model
from tiny_trl import check_runs, in_windows, prepared, shared, slices_of, train, trainer, window
from trl_ranks import RANKS, join, on_ranks, run_of

GRPO = shared.SharedPromptGRPOTrainer
STEP: dict[str, Any] = dict(
    per_device_train_batch_size=2, gradient_accumulation_steps=4, num_generations=8, steps_per_generation=8, beta=0.1
)
# Groups of each rank's 4 slices. A prompt in all of them, beside one in the second and the third and
# a last slice alone, where the other rank's prompts run behind it; and beside a rank where no
# slices share any.
CASES = {
    "unequal": [[(9, [5, 9, 3, 7, 4, 2, 6, 1])], [(11, [5, 9]), (6, [3, 2, 7, 5]), (4, [2, 5])]],
    "none": [[(9, [5, 9, 3, 7, 4, 2, 6, 1])], [(11, [5, 9]), (6, [3, 2]), (7, [7, 5]), (4, [2, 5])]],
}
WRAPPERS = ["ddp", "fsdp1", "fsdp1, flat parameters", "fsdp2"]


class SomeRanks(GRPO):
    """The first rank has no plan for every other window, the other one has."""

    def training_step(self, *args: Any) -> Any:
        ratio = 99.0 if self.accelerator.process_index == 0 and self.state.global_step % 2 else 1.02
        self._sharing.options = self._sharing.options._replace(min_dedup_ratio=ratio)
        return super().training_step(*args)


def _run_rank(rank: int, port: int, model: str, folder: str, results: Any) -> None:
    join(rank, port)
    once = dict(prompt_once=True)
    for name, cls, arguments in (
        ("stock", in_windows(tiny_trl.StockInGroups, 4), {}), ("once", GRPO, once), ("some ranks", SomeRanks, once),
    ):  # fmt: skip
        run = train(trainer(cls, model, Path(folder), arguments=arguments, **STEP))
        results[rank, name] = run.logs, run.after
    for wrapper in WRAPPERS:
        for case, groups in CASES.items():
            for name, options in (("stock", {}), ("once", once)):
                made = _windows(wrapper, slices_of(groups[rank], 2), Path(folder), options)
                results[rank, wrapper, case, name] = made
    torch.distributed.destroy_process_group()


def _windows(wrapper: str, slices: list[dict[str, Any]], folder: Path, options: dict[str, Any]) -> Any:
    """Losses and gradients of the second of two windows, and scores without gradients in between."""
    cls = GRPO if options else tiny_trl.trl.GRPOTrainer
    made = prepared(cls, tiny_model("qwen3", dtype=torch.float32, attention="sdpa"), folder, slices, **options)
    wrapped = wrap(made.model, wrapper, torch.device("cpu"))
    made.create_optimizer()
    window(made, wrapped)
    wrapped.zero_grad()
    ids, mask = (
        torch.cat([torch.cat([own[f"{side}_{kind}"] for side in ("prompt", "completion")], 1) for own in slices])
        for kind in ("ids", "mask")
    )
    with torch.no_grad(), tiny_trl.quiet():
        logps, *_ = made._get_per_token_logps_and_entropies(wrapped, ids, mask, 9, batch_size=2)
    losses = window(made, wrapped)
    return losses, logps, whole_gradients(wrapped, made.model)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both ranks do, in one start of the processes; and the parameters that they begin with."""
    return on_ranks(_run_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ["once", "some ranks"])
def test_training_equals_stock(name: str, found: Any) -> None:
    results, start = found
    for rank in range(RANKS):
        got, stock = (run_of(results[rank, run], start) for run in (name, "stock"))
        check_runs(got, stock)
        fallbacks = [log["shared_prompt/fallbacks"] for log in got.logs]
        assert (sum(fallbacks) > 0) == (name == "some ranks")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_windows_equal_stock(wrapper: str, case: str, found: Any) -> None:
    results, _ = found
    for rank in range(RANKS):
        losses, logps, gradients = results[rank, wrapper, case, "stock"]
        got_losses, got_logps, got_gradients = results[rank, wrapper, case, "once"]
        assert got_losses == pytest.approx(losses, rel=1e-5, abs=1e-6)
        check_equal(got_logps, logps, 1e-5)
        check_gradients(got_gradients, gradients, 5e-6)
