# SPDX-License-Identifier: BSD-3-Clause
"""TRL's trainers on shared prompts: change the class, and every prompt is computed once.

    trainer = SharedPromptGRPOTrainer(model=..., reward_funcs=..., args=..., train_dataset=...)

The same arguments, losses, log-probabilities and gradients as those of the trainer that it stands
for. Rollouts, evaluation of rewards and everything else are TRL's own. Needs TRL 1.16 or newer.
"""

from ..common.versions import TRL
from .trainers import (
    SharedPromptDPOTrainer,
    SharedPromptGRPOTrainer,
    SharedPromptMixin,
    SharedPromptRewardTrainer,
    SharedPromptRLOOTrainer,
    SharedPromptSFTTrainer,
)
from .tree import use_dualkv_for_tree_attention

TRL.check_classes(
    SharedPromptDPOTrainer,
    SharedPromptGRPOTrainer,
    SharedPromptRLOOTrainer,
    SharedPromptRewardTrainer,
    SharedPromptSFTTrainer,
)

__all__ = [
    "SharedPromptDPOTrainer",
    "SharedPromptGRPOTrainer",
    "SharedPromptMixin",
    "SharedPromptRLOOTrainer",
    "SharedPromptRewardTrainer",
    "SharedPromptSFTTrainer",
    "use_dualkv_for_tree_attention",
]
