"""A rank of verl_rig.py: runs all cases one after another and writes what they found.

What verl's trainer does around its workers is done here: the batch of `verl_inputs` is balanced over ranks and cut into
their shares.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl_cases import Case, Found
from verl_inputs import Model, Sample, worker_input
from verl_workers import Processes, Ray, configuration, join_ranks


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
        flat = value if isinstance(value, list) else [value]
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
