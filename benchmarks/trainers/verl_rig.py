# SPDX-License-Identifier: BSD-3-Clause
"""verl's policy update on random weights and a random batch, in processes of their own.

`run` saves the models, starts one process a rank, all cases one after another in each, and returns what they found.
What verl's trainer does around its workers is done in such a process: the batch of `verl_inputs` is balanced over ranks
and cut into their shares.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from verl_inputs import Case, Found, Model, Sample, drawn, worker_input

QUIET = dict(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", VERL_LOGGING_LEVEL="WARN")


def run(
    cases: Sequence[Case], ranks: int, environment: dict[str, str], timeout_s: float, driver: str | None = None
) -> dict[str, Found]:
    """All cases, in this order, in processes of one start; on GPUs one each. Their output goes to this process's.

    `driver`: a program that is started instead, once, and gets the folder and the number of ranks.

    What there was before a failure, or the end of the time, is returned.

    Raises:
        RuntimeError: there was nothing yet; the output of the ranks says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save(list(cases), Path(folder) / "cases.pt")
        # torchrun would leave each rank one thread.
        variables = {"OMP_NUM_THREADS": str(os.cpu_count()), **os.environ, **QUIET, **environment}
        # Megatron writes its choice of attention there, and refuses that of a model in this process.
        variables = {name: value for name, value in variables.items() if not name.startswith("NVTE_")}
        # In a process of its own, whose memory is freed with it.
        subprocess.run([sys.executable, __file__, folder, "0"], env=variables, check=True, timeout=timeout_s)
        # One rank that fails ends the others, which would wait for it.
        start = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--local-addr=127.0.0.1"]
        start += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", __file__]
        process = subprocess.Popen(
            [sys.executable, *([driver] if driver else start), folder, str(ranks)], env=variables
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        finally:
            process.terminate()
            process.wait()
        path = Path(folder) / "found.pt"
        found: dict[str, Found] = torch.load(path, weights_only=False) if path.exists() else {}
    if process.returncode:
        message = f"verl's ranks ended with {process.returncode} behind {list(found)}"
        if not found:
            raise RuntimeError(message)
        print(message, file=sys.stderr)
    return found


def models_of(cases: Sequence[Case]) -> list[Model]:
    return list(dict.fromkeys(case.model for case in cases))


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
    is_megatron = case.engine == "megatron"
    roles = {"actor_rollout_ref": (actor, f"{actor}.{'megatron' if is_megatron else 'fsdp_config'}")}
    if case.role == "critic":
        roles["critic"] = "critic", f"critic.{'megatron' if is_megatron else 'fsdp'}"
        settings.append(f"+critic.ppo_infer_max_token_len_per_gpu={tokens}")
    for role, (trained, engine) in roles.items():
        settings += [
            f"{role}.model.path={folder}",
            f"{role}.model.use_remove_padding=True",
            f"{trained}.strategy={case.engine}",
            f"{trained}.optim.lr={case.learning_rate}",
            f"{trained}.optim.total_training_steps={max(1, case.updates)}",
        ]
        if is_megatron:
            # The bridge that is on PyPI.
            settings += ["model_engine=megatron", f"{engine}.vanilla_mbridge=True"]
        else:
            settings.append(f"+{role}.model.override_config.attn_implementation={case.attention}")
            settings.append(f"{engine}.ulysses_sequence_parallel_size={case.sp}")
        if case.shares and case.once is not None:
            settings.append(f"+{role}.model.override_config.shared_prompt_prompt_once={case.once}")
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


def divide(engine: Any, case: Case) -> None:
    """Into the micro-batches of a case, as the engine's configuration says them to each call."""
    engine.use_dynamic_bsz = case.tokens is not None
    engine.micro_batch_size_per_gpu = engine.infer_micro_batch_size_per_gpu = case.micro
    engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = case.tokens


def worker_of(case: Case, config: Any) -> tuple[Any, dict[str, str]]:
    """verl's worker with its model, and the names of its calls."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker, TrainingWorkerConfig

    if case.role == "critic":
        from verl.workers.utils.losses import value_loss

        critic = omega_conf_to_dataclass(config.critic)
        divide(critic.engine, case)
        configs = dict(model_config=critic.model, engine_config=critic.engine, optimizer_config=critic.optim)
        configs |= dict(checkpoint_config=critic.checkpoint, model_type="value_model")
        worker = TrainingWorker(config=TrainingWorkerConfig(**configs))
        worker.reset()
        worker.set_loss_fn(partial(value_loss, config=critic))
        return worker, {"infer": "infer_batch", "update": "train_mini_batch"}
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role=case.role)
    with drawn(case.model):
        worker.init_model()
    infer = {"actor": "compute_log_prob", "ref": "compute_ref_log_prob"}[case.role]
    return worker, {"infer": infer, "update": "update_actor"}


class Processes:
    """A worker in this process; the other ranks' are in theirs, which do the same."""

    def __init__(self, case: Case, config: Any, ranks: int) -> None:
        self.parallel, self.ranks = ranks // case.sp, ranks
        self.worker, self.calls = worker_of(case, config)
        # Not by the rank: the stages of a pipeline are the first and the last ranks, say.
        self.position = engine_of(self.worker).get_data_parallel_rank()
        self.is_megatron = case.engine == "megatron"

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

    def close(self) -> None:
        """Free what the model takes: something of PyTorch's may hold the first one of a process until its end."""
        engine = engine_of(self.worker)
        if self.is_megatron:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            return
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

    def __init__(self, case: Case, config: Any, ranks: int, group: Processes) -> None:
        self.case, self.config, self.ranks, self.group = case, config, ranks, group
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
        if "routed_experts" in first:
            self.known["routed_experts"] = first["routed_experts"]
            self.found.routes = self.found.values[0].pop("routed_experts")
        for _ in range(self.case.inferences - 1):
            self.infer()
        if self.case.role != "ref":
            for _ in range(self.case.updates):
                self.update()
            if self.case.infers_at_the_end:
                self.infer()
        return self.found

    def infer(self) -> dict[str, list[Tensor]]:
        """Values of response tokens, of all ranks' samples."""
        from verl.workers.utils.padding import no_padding_2_padding

        v0 = {"calculate_sum_pi_squared": False} if self.case.trainer == "v0" else {}
        settings = dict(calculate_entropy=self.case.role == "actor", compute_loss=False, **v0)
        data = self.group.share(worker_input(self.samples, {}, self.case.trainer, **settings))
        output, seconds, memory = self._timed("infer", data.clone())
        self.found.infer_gib = max(self.found.infer_gib, memory)
        mine: dict[str, list[Tensor]] | None = None
        if output is not None:
            names = [name for name in ("log_probs", "entropy", "values") if name in output]
            mine = {name: [*no_padding_2_padding(output[name], data).float().cpu()] for name in names}
            if "routed_experts" in output:
                mine["routed_experts"] = [*output["routed_experts"].unbind()]
        self.found.infer_metrics.append(self._metrics(output))
        parts = [part for part in self.group.every(mine) if part is not None]
        whole = {}
        for name in parts[0]:
            rows = [row for part in parts for row in part[name]]
            whole[name] = [row[: len(one.response)] for row, one in zip(rows, self.samples, strict=True)]
            if name == "routed_experts":
                whole[name] = rows
        back = torch.tensor(self.order).argsort().tolist()
        self.found.values.append({name: [rows[i] for i in back] for name, rows in whole.items()})
        self.found.infer_s.append(seconds)
        return whole

    def update(self) -> None:
        actor = self.config.actor_rollout_ref.actor
        mini = len(self.samples) // self.case.minis
        v0 = {"compute_loss": True, "multi_turn": False} if self.case.trainer == "v0" else {}
        settings = dict(global_batch_size=mini, mini_batch_size=mini, epochs=1, seed=actor.data_loader_seed)
        settings |= dict(distillation_use_topk=False, distillation_only=False)
        settings["calculate_entropy"] = actor.calculate_entropy or actor.entropy_coeff != 0.0
        settings["dataloader_kwargs"] = {"shuffle": actor.shuffle}
        data = worker_input(self.samples, self.known, self.case.trainer, **settings, **v0)
        output, seconds, memory = self._timed("update", self.group.share(data))
        self.found.update_s.append(seconds)
        self.found.update_gib = max(self.found.update_gib, memory)
        self.found.metrics.append(self._metrics(output))

    def _metrics(self, output: Any) -> dict[str, Any]:
        """Those of the first rank that has some: in a pipeline it is one of the last stage."""
        from verl.utils import tensordict_utils as tu

        mine = None if output is None else _numbers(tu.get(output, "metrics"))
        found: dict[str, Any] = next(one for one in self.group.every(mine) if one is not None)
        return found

    def _timed(self, kind: str, data: Any) -> tuple[Any, float, float]:
        """The output, and of the slowest rank seconds and peak memory in GiB."""
        self.group.memory()
        self.group.every(None)  # all begin together
        begin = time.perf_counter()
        output = self.group.call(kind, data)
        peak = self.group.memory()
        mine = (time.perf_counter() - begin, peak)
        every = self.group.every(mine)
        return output, max(one[0] for one in every), max(one[1] for one in every)


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """The mean of each, as verl's trainer logs it."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        parts = [one.aggregate() if hasattr(one, "aggregate") else one for one in tree_leaves(value)]
        if parts and all(isinstance(one, Real) for one in parts):
            found[name] = float(sum(parts) / len(parts))
    return found


def run_cases(folder: str, ranks: int, kind: type[Processes]) -> None:
    """What every process does. `kind` makes the workers of a case. The first process writes what was found."""
    cases: list[Case] = torch.load(Path(folder) / "cases.pt", weights_only=False)
    models, rank = models_of(cases), int(os.environ.get("RANK", 0))
    found: dict[str, Found] = {}
    kept: Processes | None = None
    for case, following in zip(cases, [*cases[1:], None]):
        begin, session, group = time.perf_counter(), None, kept
        try:
            torch.manual_seed(0)  # of LoRA's weights
            config = configuration(case, f"{folder}/model{models.index(case.model)}", ranks)
            if group:
                engine = engine_of(group.worker)
                divide(engine.engine_config, case)
                if case.shares:
                    engine.options = engine.options._replace(prompt_once=case.once)
            group = group or kind(case, config, ranks)
            if rank == 0:
                print(f"{case.name}: a worker after {time.perf_counter() - begin:.1f} s", flush=True)
            session = Session(case, config, ranks, group)
            found[case.name] = session.run()
        except Exception as error:
            if ranks > 1:  # the others wait for this one
                raise
            found[case.name] = replace(session.found if session else Found(), error=f"{type(error).__name__}: {error}")
        one = found[case.name]
        stays = following is not None and following.worker == case.worker and not case.learning_rate
        kept = group if stays and one.error is None else None
        if group is not None and kept is None:
            group.close()
        del session, group
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if rank == 0:
            torch.save(found, Path(folder) / "found.tmp")  # whole at once for who reads it
            Path(folder, "found.tmp").replace(Path(folder) / "found.pt")
            times = [round(value, 3) for value in (*one.infer_s, *one.update_s)]
            print(f"{case.name}: {time.perf_counter() - begin:.1f} s, {times}", one.error or "", flush=True)


def main(folder: str, ranks: int) -> None:
    """One rank; of 0 ranks: the models."""
    if not ranks:
        for number, model in enumerate(models_of(torch.load(Path(folder) / "cases.pt", weights_only=False))):
            model.save(Path(folder) / f"model{number}")
        return
    # As under Ray, every process sees one GPU.
    local, visible = int(os.environ["LOCAL_RANK"]), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible != "":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local] if visible else str(local)
    os.environ |= dict(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    join_ranks(int(os.environ["RANK"]), ranks)
    run_cases(folder, ranks, Processes)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
