# SPDX-License-Identifier: BSD-3-Clause
"""Shared prompts in verl: actor update, log-probabilities, reference and critic, without a fork.

    actor_rollout_ref.model.external_lib=flash_attn_dualkv.integrations.verl

is all: verl imports this module in every worker, before it builds the engine, and takes these
engines for FSDP and Megatron instead of its own; and in the driver, where the trainers then keep the responses
to a prompt on one rank, which verl's balancing would scatter. Where a micro-batch cannot be shared
(images, for example) the engines do what verl's own do. docs/trainers.md: options, metrics, and cases.

Made for verl 0.9.
"""

import logging

import verl.workers.engine

from ...errors import SharedPromptUnsupportedError
from ..common.options import Options
from ..common.versions import VERL
from .balance import install as install_balance
from .engine import SharedPromptFSDPEngine, SharedPromptFSDPValueEngine, install

__all__ = ["Options", "SharedPromptFSDPEngine", "SharedPromptFSDPValueEngine", "install"]

VERL.check_classes(SharedPromptFSDPEngine, SharedPromptFSDPValueEngine)
install()
install_balance()
if verl.workers.engine.MegatronEngine is not None:  # where megatron-core is installed
    try:
        from .megatron import install as install_megatron

        install_megatron()
    except (ImportError, SharedPromptUnsupportedError) as error:  # no reason for workers of FSDP to end
        message = "flash_attn_dualkv: on Megatron prompts are NOT shared, its engines stay verl's own: %s"
        logging.getLogger(__name__).warning(message, error)
