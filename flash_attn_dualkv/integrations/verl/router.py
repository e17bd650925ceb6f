# SPDX-License-Identifier: BSD-3-Clause
"""Prints the path of router.yaml, which names the router of `verl_router`.

actor_rollout_ref.rollout.router_config_path=$(python -m flash_attn_dualkv.integrations.verl.router)
"""

from ..verl_router import ROUTER_YAML, SiblingRouter

__all__ = ["ROUTER_YAML", "SiblingRouter"]

if __name__ == "__main__":
    print(ROUTER_YAML)
