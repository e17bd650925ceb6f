# SPDX-License-Identifier: BSD-3-Clause
"""verl_rig's cases under Ray: workers are actors of verl's RayWorkerGroup, which cuts the batch into shares."""

import sys
from typing import Any

import ray
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.device import get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl_inputs import Case
from verl_rig import Processes, engine_name, join_ranks, run_cases


class Worker(ActorRolloutRefWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prepare(self) -> None:
        join_ranks(self.rank, self.world_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def engine(self) -> str:
        return engine_name(self)


class Actors(Processes):
    """Of the role "actor"; they end with the case."""

    def __init__(self, case: Case, config: Any, ranks: int) -> None:
        pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
        made = RayClassWithInitArgs(ray.remote(Worker), config=config.actor_rollout_ref, role="actor")
        self.group = RayWorkerGroup(pool, made, device_name=get_device_name())
        self.group.prepare()
        self.group.init_model()

    def engine(self) -> str:
        return str(self.group.engine()[0])

    def share(self, data: Any) -> Any:
        return data

    def every(self, mine: Any) -> list[Any]:
        return [mine]

    def call(self, kind: str, data: Any) -> Any:
        output = {"infer": self.group.compute_log_prob, "update": self.group.update_actor}[kind](data)
        return output.get() if hasattr(output, "futures") else output

    def close(self) -> None: ...

    def memory(self) -> float:
        return 0.0


if __name__ == "__main__":
    ranks = int(sys.argv[2])
    ray.init(num_cpus=2 * ranks + 2, include_dashboard=False, logging_level="warning")
    run_cases(sys.argv[1], ranks, Actors)
    ray.shutdown()
