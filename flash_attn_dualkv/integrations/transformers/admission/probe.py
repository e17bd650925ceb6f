# SPDX-License-Identifier: BSD-3-Clause
"""A model tried on a pair of short sequences: does it draw noise, and does a packed row change what it computes?

Configurations and names tell only what somebody has thought of. Two kinds of faults show in any model that has them:

- Random numbers. Stock training draws noise for every copy of a prompt, a packed row would draw it once for all. If
  the pair's forward moves a generator, it is repeated: noise differs with another state, and not with an equal one.
- Modules that look at other tokens of their row, such as an adapter that averages over it, or at where in it a token
  is. The pair is computed packed, behind another sample, and alone; the difference must be one of rounding.
"""

from __future__ import annotations

import random
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from .... import guard
from ....checks import explain
from ....data.batch import PackedBatch
from ....data.pack import pack_shared_prompts
from ....errors import SharedPromptError
from ....scores import current_autocast
from ...common.buffers import Kept, described
from .nudge import nudged
from .side_effects import Generators, without_consequences
from .table import FirstUseError, fields_of, num_mixing_layers
from .unwrap import causal_lm_of, decoder_of, is_elsewhere, is_plain, replaced_forward, text_config

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

Outputs = tuple[Tensor, ...]  # hidden states and, where there is a head, logits
Watcher = Callable[[str, nn.Module, Any], None]  # before a module's forward and its hooks, or after both


def is_trying() -> bool:
    """Whether this thread runs a trial: its forwards need not be tried."""
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
        special = {one for value in tokens for one in (value if isinstance(value, list) else [value])}
        length = min(LENGTH, max(1, (getattr(text, "max_position_embeddings", None) or 2 * LENGTH) // 2))
        most = min(text.vocab_size, 3 * length + len(special))
        candidates = random.Random(number).sample(range(text.vocab_size), most)
        plain = [one for one in candidates if one not in special] or candidates
        ids = (plain * (3 * length))[: 3 * length]
        return Pair(ids[:length], (ids[length : 2 * length], ids[2 * length :]))

    def sequences(self, device: torch.device) -> Tensor:
        """(2, 2 x length)."""
        return torch.tensor([[*self.prompt, *response] for response in self.responses], device=device)


class Trial:
    """The forwards of one model.

    Args:
        stock: the transformers model.
        device: of its inputs.
        model: the outermost module around it; None from inside of its forward.
        stateless: modules that may change no buffer.
    """

    def __init__(
        self,
        stock: Any,
        device: torch.device,
        model: nn.Module | None = None,
        stateless: Iterable[nn.Module] = (),
    ) -> None:
        self.stock = stock
        self.device = device
        self.model = model
        self.outermost: nn.Module = stock if model is None else model
        self.entry: Any = stock if model is None else causal_lm_of(model)
        self.decoder: Any = decoder_of(stock)
        self._buffers: dict[str, Kept] = {}
        self._has_state = False
        self._stateless = stateless
        # Hooks of a decoder that is called directly are running already: they must not run again.
        self.decode: Any = self.decoder.forward if self.decoder is self.entry else self.decoder

    @torch.compiler.disable
    def run(self) -> None:
        """Raise FirstUseError if the model draws noise, or computes something else in a packed row."""
        devices = {self.device, *(one.device for one in self.stock.parameters())}
        token = _trying.set(True)
        try:
            with (
                warnings.catch_warnings(),
                torch.no_grad(),
                # Parameters cast without gradients are not kept for forwards with gradients.
                current_autocast(self.device.type, cache_enabled=False)(),
                torch.compiler.set_stance("force_eager"),
                guard.suspended(),
                without_consequences(self.outermost, devices) as (generators, self._buffers),
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

        def leave(name: str, module: nn.Module, output: Any) -> None:
            types.update(one.dtype for one in tensors_of(output) if one.is_floating_point())

        with watched(self.decoder, None, leave):
            alone = self._alone(pair)
        precision = max(torch.finfo(one).eps for one in types)
        if self.device.type == "cuda":
            precision = max(precision, TF32)
        draws = self._agreed(generators.have_moved(begin))
        self._has_state = self._agreed(any(one.has_changed() for one in self._buffers.values()))
        if self._has_state:
            alone = self._alone(pair)
        if draws:
            self._check_noise(generators, pair, alone)
        if self._has_state:
            self._check_state(pair, precision)
        for number in range(PAIRS):
            if number:
                pair = Pair.choose(self.stock.config, number)
                alone = self._alone(pair)
            found, most = _difference(self._packed(pair), alone), max(LEAST, precision)
            if not self._agreed(not found <= most):
                return
            most = max(most, FACTOR * self._rounding(pair, alone, precision))
            if not self._agreed(not found <= most):
                return
        self._refuse(pair, found, most)

    def _check_state(self, pair: Pair, precision: float) -> None:
        """Refuse modules whose buffers are other ones after a packed forward than after one of the sequences alone."""
        homes = {id(inner._buffers) for module in self._stateless for inner in module.modules()}
        found = [name for name, one in self._buffers.items() if id(one.home) in homes and one.has_changed()]
        self._refuse_state(found, "without state where they run in other numbers than in stock's forwards")
        before = {name: one.copy for name, one in self._buffers.items() if one.copy is not None}

        def after(forward: Callable[[Pair], Outputs]) -> dict[str, Tensor]:
            forward(pair)
            changed = {name: one.now for name, one in self._buffers.items() if one.has_changed()}
            return before | {name: one.clone() for name, one in changed.items() if one is not None}

        alone, packed, rounded = after(self._alone), after(self._packed), []
        for seed in (1, 2):
            with jittered(self.decoder, precision, seed):
                rounded.append(after(self._alone))
        odd = []
        for name, state in alone.items():
            by_rounding = max(_largest_difference(one[name], state) for one in rounded)
            # A mean that moves slowly differs by little of its size, and by much of its change.
            precision = torch.finfo(state.dtype).eps if state.is_floating_point() else 0.0
            most = max(4 * precision * _size(state), LEAST * _size(state - before[name]), FACTOR * by_rounding)
            odd += [name] * (not _largest_difference(packed[name], state) <= most)
        self._refuse_state(odd, "whose state is the same after a packed forward as after one of the sequences")

    def _refuse_state(self, names: list[str], expected: str) -> None:
        if self._agreed(bool(names)):
            got = f"one that changes {names[0] if names else 'a buffer on another rank'}"
            raise FirstUseError(explain("model", f"modules {expected}", got) + STATE_ADVICE, "self_check")

    def _check_noise(self, generators: Generators, pair: Pair, alone: Outputs) -> None:
        generators.seed(0)
        again, others = _difference(self._alone(pair), alone), 0.0
        for seed in range(1, SEEDS + 1):  # no early exit: ranks run equally many forwards
            generators.seed(seed)
            others = max(others, _difference(self._alone(pair), alone))
        if not self._agreed(others > FACTOR * again):
            return
        name = first_to_draw(self.outermost, generators, lambda: self._alone(pair)) or "it"
        mode = "training" if self.stock.training else "evaluation"
        expected, got = f"a forward without random numbers in {mode} mode", f"one in which {name} draws some"
        raise FirstUseError(explain("model", expected, got) + NOISE_ADVICE, "noise")

    def _rounding(self, pair: Pair, alone: Outputs, precision: float) -> float:
        """Differences by rounding: the pair alone computed in other ways, as a batch and with rounded layers."""
        ways = [self._run_alone(pair.sequences(self.device))]
        for seed in (1, 2):
            with jittered(self.decoder, precision, seed):
                ways.append(self._alone(pair))
        return max(_difference(way, alone) for way in ways)

    def _refuse(self, pair: Pair, found: float, most: float) -> None:
        (_, rows), length = self._batch(pair), 2 * len(pair.prompt)

        def of_packed(output: Tensor) -> Tensor | None:
            is_row = output.dim() == 3 and output.shape[0] == 1 and output.shape[1] > int(rows.max())
            return output[0].index_select(0, rows.to(output.device)) if is_row else None

        def of_alone(output: Tensor) -> Tensor | None:
            return _scoring_rows(output) if output.dim() == 3 and output.shape[:2] == (1, length) else None

        others = outputs_of(self.outermost, lambda: self._alone(pair), of_alone)
        name = ""
        for one, (module, output) in outputs_of(self.outermost, lambda: self._packed(pair), of_packed).items():
            other = others.get(one, (module, output[:0]))[1]
            if output.shape == other.shape and not _row_difference(output, other) <= most:
                name = described(one, module)
                break
        expected = "the same in a packed row as in rows of their own"
        got = f"differences of {found:.2g} of their size, where rounding makes at most {most:.2g}"
        where = f"; the first module that differs is {name}" if name else ""
        raise FirstUseError(explain("hidden states of the model", expected, got + where) + ADVICE, "self_check")

    def _agreed(self, flag: bool) -> bool:
        """Whether a condition holds on any rank that runs the same forwards, so that all run equally many."""
        if not (dist.is_available() and dist.is_initialized()):
            return flag
        value = torch.tensor(float(flag), device=self.device)
        for group in _groups(self.outermost):
            dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
        return bool(value.item())

    # Rows that score the responses, from one forward per sequence.

    def _alone(self, pair: Pair) -> Outputs:
        # State is one forward's, as in a micro-batch.
        rows = pair.sequences(self.device)
        found = [self._run_alone(one) for one in rows.split(len(rows) if self._has_state else 1)]
        return tuple(map(torch.cat, zip(*found)))

    def _run_alone(self, sequences: Tensor) -> Outputs:
        positions = torch.arange(sequences.shape[1], device=self.device).repeat(len(sequences), 1)
        return tuple(map(_scoring_rows, self._forward(input_ids=sequences, position_ids=positions)))

    def _packed(self, pair: Pair) -> Outputs:
        batch, rows = self._batch(pair)
        ids, positions, layout = batch.input_ids[None], batch.position_ids[None], batch.layout
        with guard.expect_shared_prompt(layout, num_mixing_layers(self.decoder)):
            outputs = self._forward(input_ids=ids, position_ids=positions, shared_prompt_layout=layout)
        return tuple(one[0].index_select(0, rows.to(one.device)) for one in outputs)

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

    def _forward(self, **inputs: Any) -> Outputs:
        """(B, T, ...) each."""
        if self._has_state:  # each begins with the same
            for one in self._buffers.values():
                one.put_back()
        inputs |= dict(attention_mask=None, use_cache=False)
        is_packed = "shared_prompt_layout" in inputs
        try:
            return self._answer(**inputs) if self.model is None else self._run_outermost(self.model, inputs)
        except (SharedPromptError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # A model that does not run alone raises its own error. Inside a forward, wrappers may
            # have prepared for other sequences.
            if not is_packed and self.model is not None:
                raise
            expected = f"a decoder that takes {'packed sequences' if is_packed else 'other sequences meanwhile'}"
            message = explain("model", expected, f"{type(error).__name__}: {error}")
            raise FirstUseError(message + ADVICE, "self_check") from error

    def _run_outermost(self, model: nn.Module, inputs: dict[str, Any]) -> Outputs:
        def answer(stock: Any, *args: Any, **given: Any) -> Outputs:
            inputs = {name: value for name, value in given.items() if value is not None}
            return self._answer(**inputs) if is_plain(stock, self.entry) else self._answer_as_wrapped(stock, inputs)

        with replaced_forward(self.entry, answer) as call:
            outputs: Outputs = call(model, inputs)
        return outputs

    def _answer(self, **inputs: Any) -> Outputs:
        """Outputs of decoder and head, in place of the transformers model's own forward."""
        return self._with_scores(self.decode(**inputs)[0])

    def _answer_as_wrapped(self, stock: Callable[..., Any], inputs: dict[str, Any]) -> Outputs:
        """Outputs of decoder and head, inside what is around the model's forward: accelerate's autocast, say."""
        if self.decoder is self.entry:
            return self._with_scores(stock(**inputs)[0])
        thread = threading.get_ident()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not is_elsewhere(thread):
                raise _Answered(self._with_scores(output[0]))

        handle = self.decoder.register_forward_hook(leave)
        try:
            stock(**inputs)
        except _Answered as answered:
            return answered.outputs
        finally:
            handle.remove()
        expected, got = "a forward that calls its decoder", f"one around {type(self.entry).__name__} that does not"
        raise SharedPromptError(explain("model", expected, got))

    def _with_scores(self, hidden: Tensor) -> Outputs:
        head = self.entry.get_output_embeddings()
        # Heads such as ELECTRA's have a layer before the projection.
        is_whole = getattr(head, "in_features", None) == hidden.shape[-1]
        return (hidden, head(hidden)) if is_whole else (hidden,)


class _Answered(Exception):  # noqa: N818
    """Leaves a wrapped forward behind its decoder: what follows may want labels, or one sequence a row."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs


def _scoring_rows(output: Tensor) -> Tensor:
    """(B, 2 x length, D) -> (B x length, D): what is said of each token of the responses."""
    length = output.shape[1] // 2
    return output[:, length - 1 : -1].flatten(0, 1)


def _difference(one: Outputs, other: Outputs) -> float:
    return max(map(_row_difference, one, other))


def _size(tensor: Tensor) -> float:
    """The largest magnitude of the finite elements."""
    return float(tensor.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if tensor.numel() else 0.0


def _largest_difference(one: Tensor, other: Tensor) -> float:
    """Of elements of two tensors of one shape; infinite where one of them alone is not finite."""
    difference = (one.double() - other.double()).abs().where(one != other, 0.0)
    return float(difference.nan_to_num(nan=float("inf")).max()) if difference.numel() else 0.0


def _row_difference(one: Tensor, other: Tensor) -> float:
    """The largest of the rows' differences, relative to the row; rows of `other` that are not finite say nothing."""
    one, other = one.double(), other.double()
    sizes = other.norm(dim=-1)
    relative = (one - other).norm(dim=-1) / sizes.clamp(min=torch.finfo(torch.float32).tiny)
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
def watched(model: nn.Module, enter: Watcher | None, leave: Watcher) -> Iterator[None]:
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
def jittered(model: nn.Module, size: float, seed: int) -> Iterator[None]:
    """Multiply what embeddings and decoder layers give with 1 + u, |u| <= size: errors as those of rounding."""
    generators: dict[torch.device, torch.Generator] = {}

    def jitter(module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return output
        device = first.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        factors = torch.rand(first.shape, generator=generators[device], device=device).mul_(2 * size).add_(1 - size)
        changed = (first * factors).to(first.dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    with ExitStack() as hooks:
        for one in model.modules():
            if isinstance(one, (GradientCheckpointingLayer, nn.Embedding)):
                hooks.callback(one.register_forward_hook(jitter).remove)
        yield


def first_to_draw(model: nn.Module, generators: Generators, forward: Callable[[], Any]) -> str | None:
    """The innermost of the modules that move a generator first, hooks included, with its class."""
    found: list[str] = []
    states: list[list[Any]] = []

    def enter(name: str, module: nn.Module, args: Any) -> None:
        states.append(generators.read())

    def leave(name: str, module: nn.Module, output: Any) -> None:
        if generators.have_moved(states.pop()):
            found.append(described(name, module))

    with watched(model, enter, leave):
        forward()
    return found[0] if found else None


def outputs_of(
    model: nn.Module, forward: Callable[[], Any], rows: Callable[[Tensor], Tensor | None]
) -> dict[str, tuple[nn.Module, Tensor]]:
    """What is compared of the modules' outputs in a forward, by name, from the innermost that runs first.

    Args:
        rows: of an output what is compared; None for an output of another shape.
    """
    found: dict[str, tuple[nn.Module, Tensor]] = {}

    def leave(name: str, module: nn.Module, output: Any) -> None:
        first = next(tensors_of(output), None)
        compared = None if first is None or not first.is_floating_point() else rows(first)
        if compared is not None:
            before = [found[name][1]] if name in found else []  # sequences that run one after the other
            found[name] = module, torch.cat([*before, compared.detach()])

    with watched(model, None, leave):
        forward()
    return found


def tensors_of(output: Any) -> Iterator[Tensor]:
    """An output's tensors, at any depth of tuples and of transformers' outputs."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for one in output:
            yield from tensors_of(one)
    elif isinstance(output, dict):
        for one in output.values():
            yield from tensors_of(one)
