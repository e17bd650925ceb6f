# SPDX-License-Identifier: BSD-3-Clause
"""A model tried on a pair of short sequences: does it draw noise, and does a packed row change what it computes?

Configurations and names tell only of known models. Three kinds of faults show in any model that has them:

- Random numbers. Stock training draws noise for every copy of a prompt, a packed row would draw it once for all. If
  the pair's forward moves a generator, it is repeated: noise differs with another state, and not with an equal one.
- Modules that look at other tokens of their row, such as an adapter that averages over it, or at where in it a token
  is. The pair is computed packed, after another sample, and alone; the difference must be one of rounding.
- State. Buffers that a forward changes must be the same after a packed forward as after one of the sequences.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from .... import guard
from ....checks import explain
from ....data.batch import PackedBatch
from ....data.pack import pack_shared_prompts
from ....errors import SharedPromptError
from ....parallel.agreement import all_ranks, largest_of_ranks
from ....scores import current_autocast
from ...common.buffers import Kept, described
from .nudge import nudged
from .side_effects import Generators, without_side_effects
from .table import FirstUseError, fields_of, num_mixing_layers
from .unwrap import causal_lm_of, decoder_of, is_plain, kept_outputs, replaced_forward, text_config

# Length of the prompt, of each of two responses and of what is packed in front: twice 32 tokens
# alone, 63 packed.
LENGTH = 16
# Additional states of the generators: rare noise (layer drop) shows in one of them.
SEEDS = 8
# Pairs that must all differ. Rounding may send a token to another expert, in any of the five
# computations of a pair. The chance that the packed one is the odd one out is one in five, and one
# in 400,000 eight times in a row.
PAIRS = 8
# Threshold of a difference, relative to that between computations of the pair alone. The ratio is
# 0.3 to 1.0 in exact models of 16 and 32 bits, but for single routes of experts, and 7 or more if a
# module averages over its row.
FACTOR = 2.0
# Rounding of float32 over many layers, in which softmax and rotary embeddings always are.
LEAST = 64 * torch.finfo(torch.float32).eps
TF32 = 2.0**-10  # rounding of float32 products on a GPU

ADVICE = (
    ". If a module between embedding and head looks at other tokens of its row, the model cannot share prompts; if you "
    "know it to be exact, self_check=False trusts you"
)
STATE_ADVICE = ". A mean over rows, or a count of tokens, weighs a shared prompt once: freeze it, or do not share"
NOISE_ADVICE = ". One copy of a prompt has one draw, not one for each response: switch the noise off"
_TOKENS = re.compile(r"token_(id|ids|index)$")
_trying: ContextVar[bool] = ContextVar("dualkv_trying", default=False)

# Before a module's forward and its hooks (the module's arguments), or after both (its output).
Watcher = Callable[[str, nn.Module, Any], None]


def is_trying() -> bool:
    """True if this thread runs a trial: its forwards need not be tried."""
    return _trying.get()


class Pair(NamedTuple):
    """Token ids of a prompt and of two responses, equally many."""

    prompt: list[int]
    responses: tuple[list[int], list[int]]

    @staticmethod
    def choose(config: Any, number: int) -> Pair:
        """Tokens of a pair, the same on every rank and without special tokens (of images, for example)."""
        text = text_config(config)
        tokens = (value for name, value in fields_of(config.to_dict()) if _TOKENS.search(name))
        special = {token for value in tokens for token in (value if isinstance(value, list) else [value])}
        length = min(LENGTH, max(1, (getattr(text, "max_position_embeddings", None) or 2 * LENGTH) // 2))
        most = min(text.vocab_size, 3 * length + len(special))
        candidates = random.Random(number).sample(range(text.vocab_size), most)
        plain = [token for token in candidates if token not in special] or candidates
        ids = (plain * (3 * length))[: 3 * length]
        return Pair(ids[:length], (ids[length : 2 * length], ids[2 * length :]))

    def sequences(self, device: torch.device) -> Tensor:
        """(2, 2 x length)."""
        return torch.tensor([[*self.prompt, *response] for response in self.responses], device=device)


class Outcome(NamedTuple):
    """Results of forwards of a pair: the rows that score the responses, and small buffers afterwards if any change."""

    rows: tuple[Tensor, ...]  # of hidden states and, where there is a head, of logits
    state: dict[str, Tensor]


@dataclass
class Trial:
    """The forwards of one model.

    Args:
        stock: the transformers model.
        device: of its inputs.
        model: the outermost module around it; None from inside of its forward.
        stateless: modules that may change no buffer.
    """

    stock: Any
    device: torch.device
    model: nn.Module | None = None
    stateless: Iterable[nn.Module] = ()

    def __post_init__(self) -> None:
        self.outermost: nn.Module = self.stock if self.model is None else self.model
        self.entry: Any = self.stock if self.model is None else causal_lm_of(self.model)
        self.decoder: Any = decoder_of(self.stock)
        self._buffers: dict[str, Kept] = {}
        self._has_state = False
        self._precision = 0.0  # of the type that the model computes in

    @torch.compiler.disable
    def run(self) -> None:
        """Raise FirstUseError if the model draws noise, or computes something else in a packed row."""
        devices = {self.device, *(parameter.device for parameter in self.stock.parameters())}
        token = _trying.set(True)
        try:
            with (
                warnings.catch_warnings(),
                torch.no_grad(),
                # Parameters cast without gradients are not kept for forwards with gradients.
                current_autocast(self.device.type, cache_enabled=False)(),
                torch.compiler.set_stance("force_eager"),
                guard.suspended(),
                without_side_effects(self.outermost, devices) as (generators, self._buffers),
                nudged(self.stock),
            ):
                warnings.simplefilter("ignore")  # checkpointed layers miss gradients
                self._run(generators)
        finally:
            _trying.reset(token)
            # Casts that autocast inside of a wrapped forward has kept have no gradients either.
            torch.clear_autocast_cache()

    def _run(self, generators: Generators) -> None:
        pair = Pair.choose(self.stock.config, 0)
        begin = generators.seed(0)
        types: set[torch.dtype] = set()  # autocast and mixed precision show in outputs alone
        with watched(self.decoder, lambda _, module, output: types.update(each.dtype for each in floats_of(output))):
            alone = self._alone(pair)
        least = TF32 if self.device.type == "cuda" else 0.0
        self._precision = max(least, *(torch.finfo(dtype).eps for dtype in types))
        draws = self._agreed(generators.have_moved(begin))
        self._has_state = self._agreed(any(buffer.has_changed() for buffer in self._buffers.values()))
        if self._has_state:
            homes = {id(inner._buffers) for module in self.stateless for inner in module.modules()}
            kept = self._buffers.items()
            changed = [name for name, buffer in kept if id(buffer.home) in homes and buffer.has_changed()]
            self._refuse_state(changed, "without state where they run in other numbers than in stock's forwards")
            generators.seed(0)
            alone = self._alone(pair)
        if draws:
            self._check_noise(generators, pair, alone)
        for number in range(PAIRS):
            if number:
                pair = Pair.choose(self.stock.config, number)
                alone = self._alone(pair)
            found, limits = self._differences(self._packed(pair), alone), dict[str, float]()
            if not self._agreed(bool(_odd(found, limits))):
                return
            # Differences by rounding: the pair alone in other ways, as a batch and with rounded layers.
            ways = [self._run_alone(pair.sequences(self.device))]
            for seed in (1, 2):
                generators.seed(seed)
                with jittered(self.decoder, self._precision):
                    ways.append(self._alone(pair))
            for way in ways:
                for name, difference in self._differences(way, alone).items():
                    limits[name] = max(limits.get(name, 1.0), FACTOR * difference)
            if not self._agreed(bool(_odd(found, limits))):
                return
            names = [name for name in _odd(found, limits) if name]
            self._refuse_state(names, "whose state is the same after a packed forward as after one of the sequences")
        self._refuse_rows(pair, found[""], limits[""])

    def _differences(self, outcome: Outcome, other: Outcome) -> dict[str, float]:
        """The largest of rows, "", and of each buffer, in multiples of what rounding makes at least."""
        rows = max(map(_row_difference, outcome.rows, other.rows)) / max(LEAST, self._precision)
        return {"": rows} | {name: self._state_difference(name, outcome, other) for name in other.state}

    def _state_difference(self, name: str, outcome: Outcome, other: Outcome) -> float:
        before, state = self._buffers[name].copy, other.state[name]
        precision = torch.finfo(state.dtype).eps if state.is_floating_point() else 0.0
        # A mean that moves slowly differs by little of its size, and by much of its change.
        least = max(4 * precision * _size(state), LEAST * _size(state, before), torch.finfo(torch.float32).tiny)
        return _size(outcome.state[name], state, infinite=float("inf")) / least

    def _refuse_state(self, names: list[str], expected: str) -> None:
        if self._agreed(bool(names)):
            got = f"one that changes {names[0] if names else 'a buffer on another rank'}"
            raise FirstUseError(explain("model", f"modules {expected}", got) + STATE_ADVICE)

    def _check_noise(self, generators: Generators, pair: Pair, alone: Outcome) -> None:
        generators.seed(0)
        again, others = self._differences(self._alone(pair), alone)[""], 0.0
        for seed in range(1, SEEDS + 1):  # no early exit: ranks run equally many forwards
            generators.seed(seed)
            others = max(others, self._differences(self._alone(pair), alone)[""])
        if not self._agreed(others > FACTOR * again):
            return
        name = first_to_draw(self.outermost, generators, lambda: self._alone(pair)) or "it"
        mode = "training" if self.stock.training else "evaluation"
        expected, got = f"a forward without random numbers in {mode} mode", f"one in which {name} draws some"
        raise FirstUseError(explain("model", expected, got) + NOISE_ADVICE, "noise")

    def _refuse_rows(self, pair: Pair, found: float, most: float) -> None:
        """Raise the error, which names the first module whose output differs."""
        unit, where = max(LEAST, self._precision), ""
        batch, rows = self._batch(pair)
        others = outputs_of(self.outermost, lambda: self._alone(pair))
        for name, (module, outputs) in outputs_of(self.outermost, lambda: self._packed(pair)).items():
            alone = [output for output in others.get(name, (module, []))[1] if output.shape[1] == 2 * len(pair.prompt)]
            if not alone or len(outputs) > 1 or outputs[0].shape[:2] != (1, batch.layout.num_tokens):
                continue
            packed, other = outputs[0][0].index_select(0, rows.to(outputs[0].device)), torch.cat(alone)
            other = _scoring_rows(other)
            if packed.shape == other.shape and not _row_difference(packed, other) <= most * unit:
                where = f"; the first module that differs is {described(name, module)}"
                break
        expected = "the same in a packed row as in rows of their own"
        got = f"differences of {found * unit:.2g} of their size, where rounding makes at most {most * unit:.2g}{where}"
        raise FirstUseError(explain("hidden states of the model", expected, got) + ADVICE)

    def _agreed(self, flag: bool) -> bool:
        """True if a condition holds on any rank that runs the same forwards, so that all run equally many."""
        (largest,) = largest_of_ranks([flag], *(_groups(self.outermost) if all_ranks() is not None else ()))
        return bool(largest)

    def _alone(self, pair: Pair) -> Outcome:
        """From one forward per sequence; state is one forward's, as in a micro-batch."""
        rows = pair.sequences(self.device)
        return self._run_alone(*rows.split(len(rows) if self._has_state else 1))

    def _run_alone(self, *batches: Tensor) -> Outcome:
        found = []
        for sequences in batches:
            positions = torch.arange(sequences.shape[1], device=self.device).repeat(len(sequences), 1)
            found.append(map(_scoring_rows, self._forward(input_ids=sequences, position_ids=positions)))
        return Outcome(tuple(map(torch.cat, zip(*found))), self._state())

    def _packed(self, pair: Pair) -> Outcome:
        batch, rows = self._batch(pair)
        ids, positions, layout = batch.input_ids[None], batch.position_ids[None], batch.layout
        with guard.expect_shared_prompt(layout, num_mixing_layers(self.decoder)):
            outputs = self._forward(input_ids=ids, position_ids=positions, shared_prompt_layout=layout)
        return Outcome(tuple(output[0].index_select(0, rows.to(output.device)) for output in outputs), self._state())

    def _batch(self, pair: Pair) -> tuple[PackedBatch, Tensor]:
        """The pair behind another sample, and the rows that score its responses."""
        # Else the pair's first tokens would be the row's: whatever is done to these (a hook that
        # steers the first token, say) would look as it does alone. But state sees all tokens.
        other = [] if self._has_state else pair.responses[0]
        cut = max(1, len(other) // 2)
        prompts, responses = [[pair.prompt] * 2, [*pair.responses]]
        if other:
            prompts, responses = [other[:cut], *prompts], [other[cut:], *responses]
        batch = pack_shared_prompts(prompts, responses, device=self.device)
        return batch, batch.token_index[len(other) - cut :] if other else batch.token_index

    def _state(self) -> dict[str, Tensor]:
        """The small buffers after a forward. Those of another shape are caches, which have no say."""
        kept = self._buffers.items() if self._has_state else ()
        now = {name: buffer.now if buffer.has_changed() else buffer.copy for name, buffer in kept}
        return {name: tensor.clone() for name, tensor in now.items() if tensor is not None}

    def _forward(self, **inputs: Any) -> tuple[Tensor, ...]:
        """(B, T, ...) each."""
        if self._has_state:  # each begins with the same
            for buffer in self._buffers.values():
                buffer.put_back()
        inputs |= dict(attention_mask=None, use_cache=False)
        is_packed = "shared_prompt_layout" in inputs
        try:
            if self.model is None:
                return self._answer(self.entry.forward, **inputs)
            with replaced_forward(self.entry, self._answer) as call:
                outputs: tuple[Tensor, ...] = call(self.model, inputs)
            return outputs
        except (SharedPromptError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # A model that does not run alone raises its own error. Inside a forward, wrappers may
            # have prepared for other sequences.
            if not is_packed and self.model is not None:
                raise
            expected = f"a decoder that takes {'packed sequences' if is_packed else 'other sequences meanwhile'}"
            message = explain("model", expected, f"{type(error).__name__}: {error}")
            raise FirstUseError(message + ADVICE) from error

    def _answer(self, stock: Callable[..., Any], *args: Any, **given: Any) -> tuple[Tensor, ...]:
        """Outputs of decoder and head, in place of the transformers model's own forward."""
        inputs = {name: value for name, value in given.items() if value is not None}
        if self.decoder is self.entry:  # whose hooks are running already
            hidden = stock(**inputs)[0]
        elif self.model is None or is_plain(stock, self.entry):
            hidden = self.decoder(**inputs)[0]
        else:  # inside of what is around the model's forward: accelerate's autocast, say
            with kept_outputs(self.decoder) as outputs:
                try:
                    stock(**inputs)
                except Exception:  # what follows the decoder may want labels, or one sequence a row
                    if not outputs:
                        raise
            if not outputs:
                got = f"one around {type(self.entry).__name__} that does not"
                raise SharedPromptError("model", "a forward that calls its decoder", got)
            hidden = outputs[0][0]
        head = self.entry.get_output_embeddings()
        # Heads such as ELECTRA's have a layer before the projection.
        is_whole = getattr(head, "in_features", None) == hidden.shape[-1]
        return (hidden, head(hidden)) if is_whole else (hidden,)


def _odd(found: dict[str, float], limits: dict[str, float]) -> list[str]:
    """What differs by more than its limit, or by no number."""
    return [name for name, difference in found.items() if not difference <= limits.get(name, 1.0)]


def _scoring_rows(output: Tensor) -> Tensor:
    """(B, 2 x length, D) -> (B x length, D): what is said of each token of the responses."""
    length = output.shape[1] // 2
    return output[:, length - 1 : -1].flatten(0, 1)


def _size(tensor: Tensor, other: Tensor | None = None, infinite: float = 0.0) -> float:
    """The largest magnitude of elements, or of their differences; `infinite` stands for those that are not finite."""
    values = tensor.double()
    if other is not None:
        values = (values - other.double()).where(tensor != other, 0.0)
    return float(values.abs().nan_to_num(infinite, infinite).max()) if tensor.numel() else 0.0


def _row_difference(tensor: Tensor, other: Tensor) -> float:
    """The largest of the rows' differences, relative to the row; rows of `other` that are not finite say nothing."""
    other = other.double()
    sizes = other.norm(dim=-1)
    relative = (tensor.double() - other).norm(dim=-1) / sizes.clamp(min=torch.finfo(torch.float32).tiny)
    relative = relative.where(sizes.isfinite(), 0.0).nan_to_num(nan=float("inf"))
    return float(relative.max())


def _groups(model: nn.Module) -> list[Any]:
    """The process groups whose ranks run a model's forwards together."""
    found: dict[int, Any] = {}
    for module in model.modules():
        group = getattr(module, "process_group", None)  # DDP and FSDP1
        if isinstance(group, dist.ProcessGroup):
            found[id(group)] = group
    for parameter in model.parameters():
        own: list[Any] = [getattr(parameter, "ds_process_group", None)]  # ZeRO-3
        if isinstance(parameter, DTensor):
            own = parameter.device_mesh.get_all_groups()
        found |= {id(group): group for group in own if group is not None}
    return list(found.values())


# Modules, watched or disturbed while a forward runs


@contextmanager
def watched(model: nn.Module, leave: Watcher, enter: Watcher | None = None) -> Iterator[None]:
    """Call `enter` with a module's name, itself and its arguments, and `leave` with its output in their stead."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if enter is not None:
                before = lambda module, args, name=name: enter(name, module, args)  # noqa: E731
                hooks.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            after = lambda module, args, output, name=name: leave(name, module, output)  # noqa: E731
            hooks.callback(module.register_forward_hook(after).remove)
        yield


@contextmanager
def jittered(model: nn.Module, size: float) -> Iterator[None]:
    """Multiply what embeddings and decoder layers give with 1 + u, |u| <= size: errors as those of rounding."""

    def jitter(module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return output
        factors = torch.rand_like(first, dtype=torch.float32).mul_(2 * size).add_(1 - size)
        changed = (first * factors).to(first.dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, (GradientCheckpointingLayer, nn.Embedding)):
                hooks.callback(module.register_forward_hook(jitter).remove)
        yield


def first_to_draw(model: nn.Module, generators: Generators, forward: Callable[[], Any]) -> str | None:
    """The innermost of the modules that move a generator first, hooks included, with its class."""
    found: list[str] = []
    states: list[list[Any]] = []

    def leave(name: str, module: nn.Module, output: Any) -> None:
        if generators.have_moved(states.pop()):
            found.append(described(name, module))

    with watched(model, leave, enter=lambda *_: states.append(generators.read())):
        forward()
    return found[0] if found else None


def outputs_of(model: nn.Module, forward: Callable[[], Any]) -> dict[str, tuple[nn.Module, list[Tensor]]]:
    """The first tensor of each output of the modules, (B, T, D), by name, from the innermost that runs first."""
    found: dict[str, tuple[nn.Module, list[Tensor]]] = {}

    def leave(name: str, module: nn.Module, output: Any) -> None:
        for first in [tensor for tensor in floats_of(output) if tensor.dim() == 3][:1]:
            found.setdefault(name, (module, []))[1].append(first.detach())

    with watched(model, leave):
        forward()
    return found


def floats_of(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, at any depth of tuples and of transformers' outputs."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
