# SPDX-License-Identifier: BSD-3-Clause
"""verl_rig's cases with verl's loss on a random teacher's top-k: of those named "alone" without any other loss."""

import os
import sys
from functools import partial
from typing import Any

import torch
import verl_rig
from tensordict import TensorDict
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import DistillationConfig, DistillationLossConfig
from verl_inputs import Case

TOP = 8


class Distilling(verl_rig.Processes):
    def __init__(self, case: Case, config: Any, ranks: int) -> None:
        super().__init__(case, config, ranks)
        self.is_alone, self.vocabulary = "alone" in case.name, case.model.vocabulary
        loss = DistillationLossConfig(
            loss_mode="forward_kl_topk", topk=TOP, use_task_rewards=not self.is_alone, use_policy_gradient=False
        )
        settings = DistillationConfig(distillation_loss=loss)
        actor = self.worker.loss_fn.keywords["config"]
        self.worker.set_loss_fn(partial(distillation_ppo_loss, config=actor, distillation_config=settings))

    def call(self, kind: str, data: Any) -> Any:
        if kind == "update":
            self.teach(data)
            tu.assign_non_tensor(data, distillation_use_topk=True, distillation_only=self.is_alone)
        return super().call(kind, data)

    def teach(self, data: TensorDict) -> None:
        """A teacher's tokens and log-probabilities for every token, as jagged as the tokens are."""
        offsets, source = data["input_ids"].offsets(), torch.Generator().manual_seed(3)
        logits = 3.0 * torch.randn(int(offsets[-1]), self.vocabulary, generator=source)
        values, tokens = logits.log_softmax(-1).topk(TOP)
        data["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(values, offsets)
        data["teacher_ids"] = torch.nested.nested_tensor_from_jagged(tokens, offsets)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        start = ["-m", "torch.distributed.run", f"--nproc-per-node={sys.argv[2]}", "--local-addr=127.0.0.1"]
        start += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", *sys.argv]
        os.execv(sys.executable, [sys.executable, *start])
    verl_rig.Processes = Distilling  # type: ignore[misc]
    verl_rig.main(sys.argv[1], int(sys.argv[2]))
