# SPDX-License-Identifier: BSD-3-Clause
"""TRL's trainers on a tiny random model with a vocabulary of numbers: no network, no files but the model's own.

Importing this skips the test module when TRL is not installed.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", "1.16", reason="needs TRL 1.16 or newer")
import tiny_models
import trl
from datasets import Dataset
from tiny_models import check_equal, check_gradients, gradients
from tiny_tokenizer import tokenizer

# The parts that tests look into; `shared` is what users import.
shared = importlib.import_module("flash_attn_dualkv.integrations.trl")
parts = importlib.import_module("flash_attn_dualkv.integrations.trl.trainers")
VOCABULARY = tiny_models.VOCABULARY
PROMPTS = (5, 19, 13, 7)  # words in each


class StockInGroups(parts.SiblingsTogetherMixin, trl.GRPOTrainer):
    """Stock forwards in the micro-batches that sharing trainers have: rounding is the only difference left."""


def drawing(seed: int) -> Callable[[int], list[int]]:
    """A function that draws so many tokens."""
    source = torch.Generator().manual_seed(seed)
    return lambda count: torch.randint(3, VOCABULARY, (count,), generator=source).tolist()


def prompts() -> Dataset:
    draw = drawing(3)
    return Dataset.from_dict({"prompt": [" ".join(map(str, draw(length))) for length in PROMPTS]})


def reward(completions: list[str], **_: Any) -> list[float]:
    """How many of the numbers are even, which differs within a group."""
    return [sum(int(word) % 2 == 0 for word in text.split()) / 8 for text in completions]


def model_on_disk(folder: Path, name: str = "qwen3", attention: str = "sdpa", **options: Any) -> str:
    """A model that trainers load: the reference model of TRL is loaded from the same place."""
    path = folder / f"{name}-{len(list(folder.iterdir()))}"
    tiny_models.tiny_model(name, dtype=torch.float32, attention=attention, **options).save_pretrained(path)
    return str(path)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of TRL and transformers about each other's arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


CONFIGS = {
    trl.GRPOTrainer: trl.GRPOConfig,
    trl.RLOOTrainer: trl.RLOOConfig,
    trl.DPOTrainer: trl.DPOConfig,
    trl.SFTTrainer: trl.SFTConfig,
    trl.RewardTrainer: trl.RewardConfig,
}


def trainer(cls: Any, model: Any, out: Path, *, arguments: dict[str, Any] | None = None, **config: Any) -> Any:
    """A trainer with the defaults of these tests; `arguments` are those of its constructor."""
    kind = next(kind for stock, kind in CONFIGS.items() if issubclass(cls, stock))
    given = dict(
        output_dir=str(out), per_device_train_batch_size=8, max_steps=3, learning_rate=0.2, optim="sgd",
        logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", bf16=False, disable_tqdm=True,
        model_init_kwargs=dict(dtype="float32") if isinstance(model, str) else None,
    )  # fmt: skip
    kwargs: dict[str, Any] = dict(processing_class=tokenizer())
    if kind in (trl.GRPOConfig, trl.RLOOConfig):
        given |= dict(num_generations=4, max_completion_length=8)
        kwargs |= dict(reward_funcs=reward, train_dataset=prompts())
    elif kind is trl.DPOConfig:
        kwargs["train_dataset"] = preferences()
    torch.manual_seed(0)
    with quiet():
        return cls(model=model, args=kind(**{**given, **config}), **{**kwargs, **(arguments or {})})


def preferences() -> Dataset:
    draw = drawing(4)

    def words(length: int) -> str:
        return " ".join(map(str, draw(length)))

    rows = [dict(prompt=words(n) + " ", chosen=words(n // 2 + 1), rejected=words(9)) for n in (9, 4, 17, 11) * 4]
    return Dataset.from_list(rows)


@dataclass
class Run:
    """A finished training."""

    trainer: Any
    logs: list[dict[str, Any]]  # of each step
    before: dict[str, Tensor]
    after: dict[str, Tensor]

    def metric(self, name: str) -> list[float]:
        return [log[f"shared_prompt/{name}"] for log in self.logs]


def train(made: Any) -> Run:
    before = {name: tensor.detach().clone() for name, tensor in made.model.named_parameters()}
    with quiet():
        made.train()
    after = {name: tensor.detach() for name, tensor in made.model.named_parameters()}
    logs = [log for log in made.state.log_history if "loss" in log]
    assert len(logs) == made.args.max_steps
    return Run(made, logs, before, after)


def check_runs(got: Run, expected: Run) -> None:
    """Rollouts, rewards, losses and norms of every step, and what training has made of the parameters."""
    for ours, stock in zip(got.logs, expected.logs):
        # Times; and which of two rewards of DPO is larger before the first step has made them
        # differ.
        for name in stock.keys() - {"step_time", "epoch", "rewards/accuracies"}:
            wanted = stock[name]
            assert ours[name] == (wanted if wanted is None else pytest.approx(wanted, rel=2e-5, abs=2e-6)), name
    check_parameters(got, expected)


def pair(make: Callable[[], Any], out: Path, own: dict[str, Any] | None = None, **config: Any) -> tuple[Any, Any]:
    """A stock GRPO trainer and ours, of a model each; `own`: arguments of ours."""
    ours = shared.SharedPromptGRPOTrainer
    return trainer(trl.GRPOTrainer, make(), out, **config), trainer(ours, make(), out, arguments=own, **config)


def both(
    ours: Any, stock: Any, model: Any, out: Path, own: dict[str, Any] | None = None, make: Any = trainer, **config: Any
) -> tuple[Run, Run]:
    """A run of our trainer, which shares in every forward, and the stock one's, which it equals.

    Args:
        model: a path, or a function that makes one.
        own: arguments that only our trainer has.
        make: of trainers.
    """
    arguments = config.pop("arguments", {})
    expected, got = (
        train(make(cls, model() if callable(model) else model, out, arguments={**arguments, **others}, **config))
        for cls, others in ((stock, {}), (ours, own or {}))
    )
    check_runs(got, expected)
    assert sum(got.metric("fallbacks")) == 0
    return got, expected


def check_parameters(got: Run, expected: Run) -> None:
    """Every parameter, relative to its change and to what its type can hold."""
    moved = 0
    for name, start in expected.before.items():
        assert torch.equal(got.before[name], start)
        change = (expected.after[name] - start).abs().max().item()
        moved += change > 1e-4
        rounding = 2 * len(got.logs) * torch.finfo(start.dtype).eps * start.abs().max().item()
        assert (got.after[name] - expected.after[name]).abs().max().item() <= 1e-5 * change + rounding, name
    assert moved > 5


def score(made: Any, ids: Tensor, mask: Tensor, width: int, **options: Any) -> Any:
    """What the trainer's losses are made of."""
    with quiet():
        return made._get_per_token_logps_and_entropies(made.model, ids, mask, width, **options)


VALUE, GRADIENT = 1e-5, 5e-6


def lora(task_type: str = "CAUSAL_LM", **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type=task_type, **options)


def lora_model() -> Any:
    """A model with an adapter that changes it, always the same."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    plain = tiny_models.tiny_model("qwen3", dtype=torch.float32, attention="sdpa")
    return peft.get_peft_model(plain, lora(init_lora_weights=False))


def padded(samples: list[tuple[list[int], list[int]]], padding: int = 0) -> tuple[Tensor, Tensor, int]:
    """input_ids, attention_mask and the width of the completions of (prompt, completion), as TRL pads them."""
    left, right = (max(len(sample[side]) for sample in samples) for side in (0, 1))
    ids, mask = torch.zeros((2, len(samples), left + right + padding), dtype=torch.int64)
    for row, (prompt, completion) in enumerate(samples):
        span = slice(left - len(prompt), left + len(completion))
        ids[row, span] = torch.tensor([*prompt, *completion])
        mask[row, span] = 1
    return ids, mask, right + padding


def batch(
    groups: list[tuple[int, list[int]]], order: list[int] | None = None, padding: int = 0
) -> tuple[Tensor, Tensor, int]:
    """`padded` samples of groups, which are the lengths of a prompt and of its completions."""
    source = torch.Generator().manual_seed(9)
    rows = [
        (prompt, torch.randint(3, 90, (length,), generator=source).tolist())
        for prompt_length, lengths in groups
        for prompt in [torch.randint(0, 90, (prompt_length,), generator=source).tolist()]  # pad tokens too
        for length in lengths
    ]
    return padded([rows[at] for at in order or range(len(rows))], padding)


def compare(stock: Any, ours: Any, ids: Tensor, mask: Tensor, width: int, **options: Any) -> None:
    """Values and gradients of one call, with losses that weigh every token differently."""
    weights = torch.rand((2, len(ids), width), generator=torch.Generator().manual_seed(2))
    found = []
    for made in (stock, ours):
        made.model.train()
        logps, entropies, _ = score(made, ids, mask, width, compute_entropy=True, **options)
        ((logps * weights[0]).sum() + (entropies * weights[1]).sum()).backward()
        found.append((logps.detach(), entropies.detach(), gradients(made.model)))
    (logps, entropies, expected), (got_logps, got_entropies, got) = found
    assert got_logps.shape == (len(ids), width)
    check_equal(got_logps, logps, VALUE)
    check_equal(got_entropies, entropies, VALUE)
    check_gradients(got, expected, GRADIENT)
    with torch.no_grad():
        again, nothing, aux_loss = score(ours, ids, mask, width, **options)
    assert torch.equal(again, got_logps) and nothing is aux_loss is None


def refused(made: Any, *call: Any, **options: Any) -> tuple[str, Any]:
    """The reason for which a call has run on stock attention, and what it gives."""
    made._sharing.take()
    scores = score(made, *call, **options)
    ((reason, count),) = made._sharing.tally.fallbacks.items()
    assert count == made._sharing.tally.calls
    assert made._sharing.tally.tokens == made._sharing.tally.replicated == call[1].sum()
    return reason, scores


# --- windows: the slices of one optimizer step ------------------------------------------------------------------------


def in_windows(cls: type, window: int) -> type:
    """The trainer with slices as prompt_once lays them."""
    return type(cls.__name__, (cls,), dict(siblings_window=window))


def slices_of(shapes: list[tuple[int, list[int]]], rows: int, order: list[int] | None = None) -> list[dict[str, Any]]:
    """Slices as TRL buffers them, of groups given as for `batch`."""
    ids, mask, width = batch(shapes, order)
    count, columns = len(ids), ids.shape[1] - width
    generator = torch.Generator().manual_seed(3)
    whole = dict(
        prompt_ids=ids[:, :columns], prompt_mask=mask[:, :columns], completion_ids=ids[:, columns:],
        completion_mask=mask[:, columns:], advantages=torch.randn(count, generator=generator),
        old_per_token_logps=torch.randn(count, width, generator=generator) * 0.1 - 4.5,
    )  # fmt: skip
    return [
        {
            **{name: value[at : at + rows] for name, value in whole.items()},
            "num_items_in_batch": mask[:, columns:].sum(),
        }
        for at in range(0, count, rows)
    ]


def prepared(cls: Any, model: Any, out: Path, slices: list[dict[str, Any]], **options: Any) -> Any:
    """A trainer whose window has these slices."""
    count, rows = len(slices), len(slices[0]["prompt_ids"])
    config = dict(per_device_train_batch_size=rows, gradient_accumulation_steps=count, loss_type="dapo")
    made = trainer(cls, model, out, arguments=options, num_generations=count * rows, **config)
    made._prepare_inputs = lambda _: made._buffered_inputs[made._step % count]
    made._buffered_inputs, made.current_gradient_accumulation_steps = slices, count
    made.create_optimizer()
    return made


def window(made: Any, model: Any = None) -> list[float]:
    """Losses of the steps of a window, whose gradients are left in the model; of a wrapped one, as trainers do it."""
    losses, model = [], made.model if model is None else model
    made.callback_handler.on_step_begin(made.args, made.state, made.control)
    last = len(made._buffered_inputs) - 1
    for place in range(last + 1):
        made.accelerator.gradient_state._set_sync_gradients(place == last)
        with quiet(), nullcontext() if place == last else made.accelerator.no_sync(model):
            losses.append(made.training_step(model, {}, None).item())
    return losses


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
