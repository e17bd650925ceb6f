# SPDX-License-Identifier: BSD-3-Clause
"""verl's policy update on random weights and a random batch, in processes of their own.

`run` saves the models, starts one process a rank, all cases one after another in each, and returns what they found.
What verl's trainer does around its workers is done in such a process: the batch of `verl_inputs` is balanced over ranks
and cut into their shares. Workers are those of this process beside the other ranks', or actors of Ray.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl_cases import Case, Found
from verl_inputs import Model, Sample, worker_input


def run(
    cases: Sequence[Case],
    ranks: int,
    environment: dict[str, str],
    timeout_s: float,
    on_ray: bool = False,
    keep: Callable[[dict[str, Found]], None] | None = None,
) -> dict[str, Found]:
    """All cases, in this order, in processes of one start; on GPUs one each. Their output goes to this process's.

    `on_ray`: each case in actors of its own under verl's RayWorkerGroup, which then cuts the batch into shares.
    `keep`: is called with all that there is, behind each case; what there was before a failure or the end of the time
    is then enough.

    Raises:
        RuntimeError: a rank has failed; its output says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, whose memory is freed with it.
        models = json.dumps([asdict(model) for model in dict.fromkeys(case.model for case in cases)])
        maker = _start(["models", folder, models], environment)
        try:
            if maker.wait(timeout_s):
                raise RuntimeError("a model could not be saved; the output says why")
        finally:
            maker.kill()
        torch.save(list(cases), Path(folder) / "cases.pt")
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        children = []
        for rank in range(1 if on_ray else ranks):
            own: dict[str, Any] = dict(RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
            own |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            own |= dict(CUDA_VISIBLE_DEVICES=visible[rank] if visible else rank)
            if on_ray:
                own = dict(RIG_RANKS=ranks, RAY_USAGE_STATS_ENABLED=0, RAY_memory_monitor_refresh_ms=0)
            own |= dict(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", VERL_LOGGING_LEVEL="WARN")
            children.append(_start(["ray" if on_ray else "rank", folder], {**own, **environment}))
        path, saved = Path(folder) / "found.pt", 0.0
        end = time.monotonic() + timeout_s
        codes: list[int | None] = [None]
        try:
            # One that failed leaves the others waiting for it.
            while None in codes and not any(codes) and time.monotonic() < end:
                time.sleep(0.2)
                if keep and path.exists() and (now := path.stat().st_mtime) > saved:
                    keep(torch.load(path, weights_only=False))
                    saved = now
                codes = [child.poll() for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        found: dict[str, Found] = torch.load(path, weights_only=False) if path.exists() else {}
        if any(code != 0 for code in codes):
            message = f"verl's ranks ended with {codes} behind {list(found)}"
            if not found or keep is None:
                raise RuntimeError(message)
            print(message, file=sys.stderr)
        if keep:
            keep(found)
        return found


def _start(arguments: list[str], environment: dict[str, Any]) -> subprocess.Popen[bytes]:
    variables = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    return subprocess.Popen([sys.executable, __file__, *arguments], env=variables)


def configuration(case: Case, folder: str, ranks: int) -> Any:
    """verl's own, of its ppo_trainer.yaml."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    tokens, micro = case.tokens or 16384, case.micro if case.tokens is None else "null"
    settings = [
        f"{actor}.ppo_mini_batch_size={case.batch.prompts // case.minis}",
        f"{rollout}.n={case.batch.responses}",
        f"trainer.n_gpus_per_node={ranks}",
    ]
    roles = {"actor_rollout_ref": (actor, f"{actor}.fsdp_config")}
    if case.role == "critic":
        roles["critic"] = "critic", "critic.fsdp"
        settings.append(f"+critic.ppo_infer_max_token_len_per_gpu={tokens}")
    for role, (trained, fsdp) in roles.items():
        settings += [
            f"{role}.model.path={folder}",
            f"+{role}.model.override_config.attn_implementation={case.attention}",
            f"{role}.model.use_remove_padding=True",
            f"{trained}.strategy={case.engine}",
            f"{fsdp}.ulysses_sequence_parallel_size={case.sp}",
            f"{trained}.optim.lr={case.learning_rate}",
            f"{trained}.optim.total_training_steps={max(1, case.updates)}",
        ]
    for prefix in (f"{actor}.ppo", f"{rollout}.log_prob", "actor_rollout_ref.ref.log_prob", "critic.ppo"):
        where, _, name = prefix.rpartition(".")
        flag = f"{where}.use_dynamic_bsz" if name == "ppo" else f"{prefix}_use_dynamic_bsz"
        settings += [f"{flag}={case.tokens is not None}", f"{prefix}_micro_batch_size_per_gpu={micro}"]
        settings.append(f"{prefix}_max_token_len_per_gpu={tokens}")
    if case.shares:
        plugin = "flash_attn_dualkv.integrations.verl"
        settings += [f"{one}.model.external_lib={plugin}" for one in ("actor_rollout_ref", "critic")]
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
        from verl.workers.utils.losses import value_loss

        critic = omega_conf_to_dataclass(config.critic)
        critic.engine.use_dynamic_bsz = case.tokens is not None
        critic.engine.infer_max_token_len_per_gpu = critic.engine.max_token_len_per_gpu = case.tokens
        critic.engine.infer_micro_batch_size_per_gpu = critic.engine.micro_batch_size_per_gpu = case.micro
        configs = dict(model_config=critic.model, engine_config=critic.engine, optimizer_config=critic.optim)
        configs |= dict(checkpoint_config=critic.checkpoint, model_type="value_model")
        worker = TrainingWorker(config=TrainingWorkerConfig(**configs))
        worker.reset()
        worker.set_loss_fn(partial(value_loss, config=critic))
        return worker, {"infer": "infer_batch", "update": "train_mini_batch"}
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role=case.role)
    worker.init_model()
    infer = {"actor": "compute_log_prob", "ref": "compute_ref_log_prob"}[case.role]
    return worker, {"infer": infer, "update": "update_actor"}


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


def balanced(case: Case, samples: list[Sample], ranks: int) -> list[int]:
    """The order in which the samples go to the ranks, an equal number to each."""
    if case.balance == "none" or ranks == 1:
        return list(range(len(samples)))
    prompts, responses = [len(one.prompt) for one in samples], [len(one.response) for one in samples]
    if case.balance == "groups":
        from flash_attn_dualkv.integrations.verl.balance import partitions

        parts = partitions(prompts, responses, [one.uid for one in samples], ranks)
    else:
        from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

        work = calculate_workload(torch.tensor(prompts) + torch.tensor(responses))
        parts = get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)
    return [index for part in parts for index in part]


class Session:
    """One case: its workers and its batch."""

    def __init__(
        self,
        case: Case,
        folder: str,
        ranks: int,
        kind: type[Processes] | type[Ray],
        group: Processes | Ray | None = None,
    ) -> None:
        """`group`: of the case before, if this one keeps it."""
        self.case, self.ranks = case, ranks
        torch.manual_seed(0)  # of LoRA's weights
        self.config = configuration(case, folder, ranks)
        if isinstance(group, Processes):
            group.divide(case)
        self.group = group or kind(case, self.config, ranks)
        samples = case.batch.samples(case.model.vocabulary)
        self.order = balanced(case, samples, ranks // case.sp)
        self.samples = [samples[index] for index in self.order]
        tokens = sum(len(one.prompt) + len(one.response) for one in samples)
        self.found = Found(self.group.engine(), tokens)
        self.known: dict[str, list[Tensor]] = {}

    def of_some(self, count: int) -> Session:
        """With the first samples of each rank, and with results of its own."""
        some, each = copy.copy(self), len(self.samples) // (self.ranks // self.case.sp)
        firsts = range(0, len(self.samples), each)
        some.samples = [one for first in firsts for one in self.samples[first : first + count]]
        some.order = list(range(len(some.samples)))
        some.case = replace(self.case, warm=0, inferences=1, updates=1, infers_at_the_end=False)
        some.found, some.known = Found(), {}
        return some

    def run(self) -> Found:
        if self.case.warm:
            self.of_some(self.case.warm).run()
        first = self.infer()
        scores = first["log_probs" if "log_probs" in first else "values"]
        ones = [torch.full_like(old, one.advantage) for old, one in zip(scores, self.samples)]
        self.known = {"old_log_probs": scores, "ref_log_prob": [old - 0.1 for old in scores], "advantages": ones}
        if self.case.role == "critic":
            self.known = {"values": scores, "returns": ones}
        for _ in range(self.case.inferences - 1):
            self.infer()
        if self.case.role != "ref":
            for _ in range(self.case.updates):
                self.update()
            if self.case.infers_at_the_end:
                self.infer()
        return self.found

    def given(self, known: dict[str, list[Tensor]], **settings: Any) -> Any:
        """The batch as the trainer hands it over."""
        case = self.case
        return worker_input(self.samples, known, case.trainer, case.extra, case.position_rows, **settings)

    def infer(self) -> dict[str, list[Tensor]]:
        """Values of response tokens, of all ranks' samples."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

        v0 = {"calculate_sum_pi_squared": False} if self.case.trainer == "v0" else {}
        data = self.given({}, calculate_entropy=self.case.role == "actor", compute_loss=False, **v0)
        if "loss_mask" not in data:
            data["loss_mask"] = data["response_mask"]
        data = self.group.share(data)
        output, seconds, memory = self._timed("infer", data.clone())
        self.found.infer_gib = max(self.found.infer_gib, memory)
        mine: dict[str, list[Tensor]] | None = None
        if output is not None:
            mine = {}
            for name in ("log_probs", "entropy", "values"):
                if name in output:
                    if self.case.trainer == "v0":
                        rows = no_padding_2_padding(output[name], data).unbind()
                    else:
                        rows = response_from_nested(output[name], data["response_mask"]).unbind()
                    mine[name] = [row.float().cpu().clone() for row in rows]
            self.found.infer_metrics.append(_numbers(tu.get(output, "metrics")))
        parts = [part for part in self.group.every(mine) if part is not None]
        whole = {}
        for name in parts[0]:
            rows = [row for part in parts for row in part[name]]
            whole[name] = [row[: len(one.response)] for row, one in zip(rows, self.samples, strict=True)]
        back = torch.tensor(self.order).argsort().tolist()
        self.found.values.append({name: [rows[i] for i in back] for name, rows in whole.items()})
        self.found.infer_s.append(seconds)
        return whole

    def update(self) -> None:
        from verl.utils import tensordict_utils as tu

        actor = self.config.actor_rollout_ref.actor
        mini = len(self.samples) // self.case.minis
        v0 = {"compute_loss": True, "multi_turn": False} if self.case.trainer == "v0" else {}
        data = self.given(
            self.known,
            calculate_entropy=actor.calculate_entropy or actor.entropy_coeff != 0.0,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=mini,
            mini_batch_size=mini,
            epochs=1,
            seed=actor.data_loader_seed,
            dataloader_kwargs={"shuffle": actor.shuffle},
            **v0,
        )
        output, seconds, memory = self._timed("update", self.group.share(data))
        self.found.update_s.append(seconds)
        self.found.update_gib = max(self.found.update_gib, memory)
        if output is not None:
            self.found.metrics.append(_numbers(tu.get(output, "metrics")))

    def _timed(self, kind: str, data: Any) -> tuple[Any, float, float]:
        """The output, and of the slowest rank seconds and peak memory in GiB."""
        self.group.memory()
        self.group.every(None)  # all begin together
        begin = time.perf_counter()
        output = self.group.call(kind, data)
        if hasattr(output, "get") and hasattr(output, "futures"):  # of Ray
            output = output.get()
        peak = self.group.memory()
        mine = (time.perf_counter() - begin, peak)
        every = self.group.every(mine)
        return output, max(one[0] for one in every), max(one[1] for one in every)


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """The mean of each, as verl's trainer logs it."""

    def number(value: Any) -> float:
        return float(value.aggregate() if hasattr(value, "aggregate") else value)

    found: dict[str, Any] = {}
    for name, value in metrics.items():
        flat = [value]
        while flat and isinstance(flat[0], list):
            flat = [one for part in flat for one in part]
        if flat and all(isinstance(one, (int, float)) or hasattr(one, "aggregate") for one in flat):
            found[name] = sum(map(number, flat)) / len(flat)
    return found


def _run_rank(folder: str, on_ray: bool) -> None:
    cases: list[Case] = torch.load(Path(folder) / "cases.pt", weights_only=False)
    models = {model: f"{folder}/model{i}" for i, model in enumerate(dict.fromkeys(case.model for case in cases))}
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("RIG_RANKS") or os.environ["WORLD_SIZE"])
    if on_ray:
        import ray

        ray.init(num_cpus=2 * ranks + 2, include_dashboard=False, logging_level="warning")
    else:
        join_ranks(rank, ranks)
    found: dict[str, Found] = {}
    kept: Processes | Ray | None = None
    left = 0.0
    for case, following in zip(cases, [*cases[1:], None]):
        begin = time.perf_counter()
        if kept is None and torch.cuda.is_available() and not on_ray:
            left = torch.cuda.memory_allocated() / 2**30
        session = None
        try:
            session = Session(case, models[case.model], ranks, Ray if on_ray else Processes, kept)
            found[case.name] = session.run()
            found[case.name].left_gib = left
        except Exception as error:
            if ranks > 1:  # the others wait for this one
                raise
            found[case.name] = replace(session.found if session else Found(), error=f"{type(error).__name__}: {error}")
        group = session.group if session is not None else kept
        keeps = following is not None and following.keeps_worker and following.worker == case.worker
        kept = group if keeps and found[case.name].error is None else None
        if group is not None and kept is None:
            group.close()
        del session, group
        gc.collect()
        if torch.cuda.is_available() and not on_ray:
            torch.cuda.empty_cache()
        if rank == 0:
            torch.save(found, Path(folder) / "found.tmp")  # whole at once for who reads it
            Path(folder, "found.tmp").replace(Path(folder) / "found.pt")
            one = found[case.name]
            times = [round(value, 3) for value in (*one.infer_s, *one.update_s)]
            print(f"{case.name}: {time.perf_counter() - begin:.1f} s, {times}", one.error or "", flush=True)
    if on_ray:
        ray.shutdown()
    else:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "models":
        for number, one in enumerate(json.loads(sys.argv[3])):
            Model(**one).save(Path(sys.argv[2]) / f"model{number}")
    else:
        _run_rank(sys.argv[2], sys.argv[1] == "ray")
