"""verl's workers as a case configures them: those of this process beside the other ranks', or actors of Ray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from verl_cases import Case

EXTERNAL_LIB = "flash_attn_dualkv.integrations.verl"


def configuration(case: Case, folder: str, ranks: int) -> Any:
    """verl's own, of its ppo_trainer.yaml."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    tokens, micro = case.tokens or 16384, case.micro if case.tokens is None else "null"
    settings = [
        f"actor_rollout_ref.model.path={folder}",
        f"+actor_rollout_ref.model.override_config.attn_implementation={case.attention}",
        "actor_rollout_ref.model.use_remove_padding=True",
        f"{actor}.strategy={case.engine}",
        f"{actor}.fsdp_config.ulysses_sequence_parallel_size={case.sp}",
        f"{actor}.optim.lr={case.learning_rate}",
        f"{actor}.optim.total_training_steps={max(1, case.updates)}",
        f"{actor}.ppo_mini_batch_size={case.batch.prompts // case.minis}",
        f"{rollout}.n={case.batch.responses}",
        f"trainer.n_gpus_per_node={ranks}",
    ]
    for prefix in (f"{actor}.ppo", f"{rollout}.log_prob", "actor_rollout_ref.ref.log_prob", "critic.ppo"):
        where, _, name = prefix.rpartition(".")
        flag = f"{where}.use_dynamic_bsz" if name == "ppo" else f"{prefix}_use_dynamic_bsz"
        settings += [
            f"{flag}={case.tokens is not None}",
            f"{prefix}_micro_batch_size_per_gpu={micro}",
            f"{prefix}_max_token_len_per_gpu={tokens}",
        ]
    if case.role == "critic":
        settings += [
            f"critic.strategy={case.engine}",
            f"critic.fsdp.ulysses_sequence_parallel_size={case.sp}",
            f"critic.model.path={folder}",
            f"+critic.model.override_config.attn_implementation={case.attention}",
            f"critic.optim.lr={case.learning_rate}",
            f"critic.optim.total_training_steps={max(1, case.updates)}",
            f"+critic.ppo_infer_max_token_len_per_gpu={tokens}",
            "critic.model.use_remove_padding=True",
        ]
    if case.shares:
        settings += [f"{one}.model.external_lib={EXTERNAL_LIB}" for one in ("actor_rollout_ref", "critic")]
    config_folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(config_folder), version_base=None):
        config = compose("ppo_trainer", overrides=[*settings, *case.overrides])
    OmegaConf.resolve(config)
    return config


def worker_of(case: Case, config: Any) -> tuple[Any, dict[str, str]]:
    """verl's worker with its model, and the names of its calls."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker, TrainingWorkerConfig

    if case.role == "critic":
        from functools import partial

        from verl.workers.utils.losses import value_loss

        critic = omega_conf_to_dataclass(config.critic)
        critic.engine.use_dynamic_bsz = case.tokens is not None
        critic.engine.infer_max_token_len_per_gpu = critic.engine.max_token_len_per_gpu = case.tokens
        critic.engine.infer_micro_batch_size_per_gpu = critic.engine.micro_batch_size_per_gpu = case.micro
        worker = TrainingWorker(
            config=TrainingWorkerConfig(
                model_type="value_model",
                model_config=critic.model,
                engine_config=critic.engine,
                optimizer_config=critic.optim,
                checkpoint_config=critic.checkpoint,
            )
        )
        worker.reset()
        worker.set_loss_fn(partial(value_loss, config=critic))
        return worker, {"infer": "infer_batch", "update": "train_mini_batch"}
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role=case.role)
    worker.init_model()
    return worker, {
        "infer": {"actor": "compute_log_prob", "ref": "compute_ref_log_prob"}[case.role],
        "update": "update_actor",
    }


class Processes:
    """A worker in this process; the other ranks' are in theirs, which do the same."""

    def __init__(self, case: Case, config: Any, ranks: int) -> None:
        self.parallel, self.ranks = ranks // case.sp, ranks
        self.position = int(os.environ["RANK"]) // case.sp
        self.worker, self.calls = worker_of(case, config)

    def engine(self) -> str:
        return engine_name(self.worker)

    def share(self, data: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        return data if self.parallel == 1 else tu.chunk_tensordict(data, self.parallel)[self.position]

    def every(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(found, mine)
        return found

    def call(self, kind: str, data: Any) -> Any:
        return getattr(self.worker, self.calls[kind])(data)

    def divide(self, case: Case) -> None:
        """Into the micro-batches of another case, as the worker's configuration says them to each call."""
        engine = engine_of(self.worker).engine_config
        engine.use_dynamic_bsz = case.tokens is not None
        engine.micro_batch_size_per_gpu = engine.infer_micro_batch_size_per_gpu = case.micro
        engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = case.tokens

    def close(self) -> None:
        """Free what the model takes: something of PyTorch's may hold the first one of a process until its end."""
        engine = engine_of(self.worker)
        for tensor in (*engine.module.parameters(), *engine.module.buffers()):
            tensor.grad = None
            getattr(tensor, "_local_tensor", tensor).untyped_storage().resize_(0)
        if engine.optimizer is not None:
            engine.optimizer.state.clear()

    def memory(self) -> float:
        """The peak since the last call, in GiB."""
        from verl.utils.device import get_torch_device

        device = get_torch_device()
        device.synchronize()
        peak = device.max_memory_allocated() / 2**30
        device.reset_peak_memory_stats()
        return peak


class Ray:
    """Workers that are actors of Ray; this process is verl's driver. Of the role "actor"."""

    def __init__(self, case: Case, config: Any, ranks: int) -> None:
        if case.role != "actor":
            raise ValueError(f"role: expected actor under Ray, got {case.role}")
        import ray
        from verl.single_controller.base.decorator import Dispatch, register
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
        from verl.utils.device import get_device_name
        from verl.workers.engine_workers import ActorRolloutRefWorker

        class Worker(ActorRolloutRefWorker):
            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            def prepare(self) -> None:
                join_ranks(self.rank, self.world_size)

            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            def engine(self) -> str:
                return engine_name(self)

        pool = RayResourcePool([ranks], use_gpu=get_device_name() != "cpu", max_colocate_count=1)
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
        return {"infer": self.group.compute_log_prob, "update": self.group.update_actor}[kind](data)

    def close(self) -> None: ...  # the actors end with the case

    def memory(self) -> float:
        return 0.0


def engine_of(worker: Any) -> Any:
    parts = [one for name in ("actor", "ref") if (one := getattr(worker, name, None)) is not None]
    return (parts[0] if parts else worker).engine


def engine_name(worker: Any) -> str:
    engine = type(engine_of(worker))
    return f"{engine.__module__}.{engine.__name__}"


def join_ranks(rank: int, ranks: int) -> None:
    """On the CPU; verl, which does it elsewhere, would ask for two backends of one device."""
    from verl.utils.device import get_device_name

    if get_device_name() == "cpu":
        torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
        torch.set_num_threads(1)
