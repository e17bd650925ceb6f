# SPDX-License-Identifier: BSD-3-Clause
"""Savings by sharing a prompt in training: tokens, operations, time and memory, computed before anything is run.

    python -m flash_attn_dualkv.predict --responses 16 --prompt 8K --response 131..2048 --model qwen3-8b
    python -m flash_attn_dualkv.predict --prompt 600 --response 500,900,1200 --rates h200 --json

For N responses R to one prompt P, replicated packing computes N (P + R) tokens and shared packing P + N R; their ratio
is rho (Gai et al., DualKV, 2026). A decoder layer has two kinds of work. Token-wise work (norms, projections, MLP) is
proportional to tokens, so it shrinks by rho. Attention is proportional to visible (query, key) pairs; these shrink by
less than rho, since every response still attends to the whole prompt.

Tokens, pairs and operations are exact counts. The paper contradicts itself here: for N = 16, P = 32K, R = 2K attention
shrinks by 8.76 according to its Eq. 34, N (P + R)^2 / (P^2 + N R (P + R)), and by 6.1 according to its text. Counting
pair by pair gives 5.90, and this module trusts the count. Eq. 34 takes half of the pairs of a response with its prompt,
as if they were causal; all of them are visible, so that the denominator should be P^2 + N R (2 P + R).

Times divide operations by rates; attention takes some time for each token beside. Both belong to a GPU and the kernels
on it: they are an argument (`Rates`), never a constant of the prediction. With the default, `equal`, every operation
takes equally long and nothing else any time, so that time ratios are ratios of operations.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .. import checks
from ..data.parts import plan_parts, walk
from ..data.prefix_tree import PrefixTree
from ..data.split import split_by_token_budget
from ..model_shape import (
    DIRECTIONS,
    LAYER_BACKWARD,
    MODELS,
    ModelShape,
    attention_flops,
    replicated_pairs,
    shared_pairs,
)
from .command import CommandLine, add_group, name_or_values, number, spread

GIB = 1 << 30
COPY_RATES = {"h200": 4.27e12}  # bytes a second, read and written, that copies of 2 GB reach
ROUTERS = ("samples", "prompts")  # a replica for each sample, as verl's own balancer, or for a prompt
BYTES_PER_PARAMETER = 4.0  # a 16-bit weight and its gradient
LOWEST_RHO = 1.1  # below, less than a tenth of the tokens are saved
LOWEST_LAYER_SPEEDUP = 1.05
COLUMNS = 4096  # heads * head_dim of the queries for which `Rates` gives the time of a token


@dataclass(frozen=True)
class Rates:
    """Rates that a GPU sustains, in TFLOP/s of the operations that each implementation executes.

    Attributes:
        token_wise: a layer's matrix products with the element-wise work around them: less than of only the products.
        shared_forward, shared_backward: attention of this library, of long sequences.
        replicated_forward, replicated_backward: the attention kernels that it is compared with.
        shared_forward_ns, shared_backward_ns, replicated_forward_ns, replicated_backward_ns: ns of the same that a
            token takes in addition to its pairs, with 4096 query columns (32 heads of 128): its bytes, tiles that are
            partly masked, the beginnings and ends of blocks. With short sequences this is most of the time.
    """

    token_wise: float
    shared_forward: float
    shared_backward: float
    replicated_forward: float
    replicated_backward: float
    shared_forward_ns: float = 0.0
    shared_backward_ns: float = 0.0
    replicated_forward_ns: float = 0.0
    replicated_backward_ns: float = 0.0

    def __post_init__(self) -> None:
        for name, rate in dataclasses.asdict(self).items():
            checks.number(name, rate, zero=name.endswith("_ns"))

    def attention_ms(self, packing: str, model: ModelShape, tokens: int, pairs: int) -> float:
        """Forward and backward of the attention of one layer. `packing`: "shared" or "replicated"."""
        columns, total = model.heads * model.head_dim, 0.0
        for direction in DIRECTIONS:
            rate, ns = (getattr(self, f"{packing}_{direction}{kind}") for kind in ("", "_ns"))
            flops = attention_flops(model.heads, model.head_dim, pairs, direction)
            total += flops / rate / 1e9 + tokens * ns * columns / COLUMNS / 1e6
        return total


# Measured rates, bf16 and head dimension 128: this library's Hopper kernels, and FlashAttention-2
# or, where the name says so, FlashAttention-4. Layers of benchmarks/results are predicted to within
# 6%, the attention of sequences of 1K tokens and more to within 10%, and of shorter ones to within
# 20% if it takes 2 ms. benchmarks/bench_kernel.py and benchmarks/bench_layer.py measure your own.
RATES = {
    "equal": Rates(1.0, 1.0, 1.0, 1.0, 1.0),
    "h200": Rates(562.0, 678.0, 595.0, 364.0, 328.0, 7.5, 30.0, 14.0, 48.0),
    "h200-fa4": Rates(562.0, 678.0, 595.0, 675.0, 635.0, 7.5, 30.0, 12.0, 42.0),
    "h100": Rates(550.0, 685.0, 575.0, 357.0, 322.0, 8.0, 25.0, 12.5, 40.0),
    "h100-fa4": Rates(550.0, 685.0, 575.0, 680.0, 640.0, 8.0, 25.0, 12.0, 54.0),
}


@dataclass(frozen=True)
class Packing:
    """One way of packing a group: the forward and backward of one layer, and memory between the two.

    Attributes:
        tokens, pairs: what is computed; pairs are those of one head.
        attention_tflop, layer_tflop: operations / 10^12.
        attention_ms, layer_ms: at the given `Rates`.
        layer_gib: 16-bit activations that one layer keeps for its backward, its parameters, gradients and states.
        model_gib: the same for all layers and the embeddings.
        checkpointed_gib: the same when every layer keeps its input and computes the rest again.
    """

    tokens: int
    pairs: int
    attention_tflop: float
    layer_tflop: float
    attention_ms: float
    layer_ms: float
    layer_gib: float
    model_gib: float
    checkpointed_gib: float


@dataclass(frozen=True)
class Prediction:
    """Replicated against shared packing of one group.

    Attributes:
        rho: replicated tokens / shared tokens.
        attention_speedup, layer_speedup: replicated time / shared time of forward and backward.
        memory_ratio: shared `layer_gib` / replicated `layer_gib`.
        warnings: why sharing does not pay here, if it does not.
    """

    rho: float
    attention_speedup: float
    layer_speedup: float
    memory_ratio: float
    replicated: Packing
    shared: Packing
    warnings: tuple[str, ...]


def predict(
    prompt: int,
    responses: Sequence[int],
    model: ModelShape,
    rates: Rates = RATES["equal"],
    bytes_per_parameter: float = BYTES_PER_PARAMETER,
) -> Prediction:
    """Savings by sharing the prompt of one group, in one decoder layer and in the activations of a model.

    Args:
        prompt: tokens of the prompt, >= 1.
        responses: tokens of each response, at least one response, each >= 1.
        model: the decoder.
        rates: what the GPU sustains; with the default a time ratio is a ratio of operations.
        bytes_per_parameter: what a GPU holds for each parameter: 4 for a 16-bit weight and its gradient (the default),
            16 to 18 with a float32 copy and Adam's moments, divided by the number of GPUs where these are sharded.

    Returns:
        Counts, times and memory of both packings, and their ratios.

    Raises:
        ValueError: a length is below 1, there is no response, or `bytes_per_parameter` is negative or not finite.
    """
    checks.integer("prompt", prompt, 1)
    if not checks.lengths("responses", responses, least=1):
        raise ValueError(checks.explain("responses", "at least one", "none"))
    checks.number("bytes_per_parameter", bytes_per_parameter, zero=True)

    def packing(name: str, copies: int, pairs: int) -> Packing:
        tokens = copies * prompt + sum(responses)
        token_wise = sum(model.token_flops(tokens, direction) for direction in DIRECTIONS)
        attention = sum(attention_flops(model.heads, model.head_dim, pairs, direction) for direction in DIRECTIONS)
        attention_ms = rates.attention_ms(name, model, tokens, pairs)
        activations = tokens * model.saved_bytes_per_token()
        # One layer at a time holds all its activations during the backward.
        checkpointed = 2 * tokens * model.hidden * model.layers + activations
        model_bytes = bytes_per_parameter * model.parameters
        return Packing(
            tokens=tokens,
            pairs=pairs,
            attention_tflop=attention / 1e12,
            layer_tflop=(attention + token_wise) / 1e12,
            attention_ms=attention_ms,
            layer_ms=attention_ms + token_wise / rates.token_wise / 1e9,
            layer_gib=(activations + bytes_per_parameter * model.layer_parameters) / GIB,
            model_gib=(model.layers * activations + model_bytes) / GIB,
            checkpointed_gib=(checkpointed + model_bytes) / GIB,
        )

    n = len(responses)
    replicated = packing("replicated", n, replicated_pairs(prompt, responses))
    shared = packing("shared", 1, shared_pairs(prompt, responses))
    return Prediction(
        rho=replicated.tokens / shared.tokens,
        attention_speedup=replicated.attention_ms / shared.attention_ms,
        layer_speedup=replicated.layer_ms / shared.layer_ms,
        memory_ratio=shared.layer_gib / replicated.layer_gib,
        replicated=replicated,
        shared=shared,
        warnings=tuple(_warnings(n, replicated, shared)),
    )


@dataclass(frozen=True)
class DecodePrediction:
    """Keys and values that attention reads in a decoding step of a group, all layers, and the time of that.

    Attributes:
        apart_gb, shared_gb: the prompt read for each response, and once on each replica that has one of them.
        apart_ms, shared_ms: the same at the rate at which a GPU copies, of all replicas together.
        ratio: of the two.
        copies: replicas that compute the prompt and keep it.
    """

    apart_gb: float
    shared_gb: float
    apart_ms: float
    shared_ms: float
    ratio: float
    copies: float


def predict_decode(
    prompt: int,
    responses: Sequence[int],
    model: ModelShape,
    copy_rate: float = COPY_RATES["h200"],
    replicas: int = 1,
    router: str = ROUTERS[0],
) -> DecodePrediction:
    """Savings by one read of a shared prompt in generating its responses (docs/rollouts.md has what was measured).

    A step in the middle of the rollout: half of each response is there. 16-bit keys and values. Decoding is bound by
    bytes: a kernel that reads the prompt once reaches 0.6 to 1.0 of the copy rate.

    Args:
        prompt: tokens of the prompt, >= 1.
        responses: tokens of each response, at least one response, each >= 1.
        model: the decoder.
        copy_rate: bytes a second that the GPU copies, read and written.
        replicas: of the engine, among which a router divides the samples of many groups.
        router: "samples" draws a replica for each of them, "prompts" keeps those of a prompt together. With 8 replicas
            and 16 responses that is 7.1 copies and 1; verl's own balancer makes 7.2 and `SiblingRouter` 1.1 to 1.3.

    Raises:
        ValueError: a length or `replicas` is below 1, there is no response, `copy_rate` is not above 0, or `router` is
            none of the two.
    """
    checks.integer("prompt", prompt, 1)
    if not checks.lengths("responses", responses, least=1):
        raise ValueError(checks.explain("responses", "at least one", "none"))
    checks.number("copy_rate", copy_rate)
    checks.integer("replicas", replicas, 1)
    checks.choice("router", router, ROUTERS)
    copies = 1.0 if router == "prompts" else replicas * (1 - (1 - 1 / replicas) ** len(responses))
    token = 2 * 2 * model.kv_heads * model.head_dim * model.layers
    own = sum(responses) / 2
    apart, shared = (token * (count * prompt + own) for count in (len(responses), copies))
    return DecodePrediction(
        apart / 1e9, shared / 1e9, 1e3 * apart / copy_rate, 1e3 * shared / copy_rate, apart / shared, copies
    )


@dataclass(frozen=True)
class CutPrediction:
    """A group in micro-batches of a budget: divided, with the prompt computed in each, and with the prompt's keys kept.

    Forward and backward with checkpointed layers; a division, like a part, is a whole number of responses.

    Attributes:
        divisions, divided_tokens: micro-batches, and the rows of all of them.
        parts: that the responses make beside the keys that are kept.
        kept_gib: keys and values of the prompt in all layers, and the sums of their gradients.
        ratio: forwards of rows in micro-batches over those in parts, where a prompt has five and another row four.
    """

    divisions: int
    divided_tokens: int
    parts: int
    kept_gib: float
    ratio: float


def predict_cut(prompt: int, responses: Sequence[int], model: ModelShape, max_tokens: int) -> CutPrediction | None:
    """Cost of a group that does not fit into `max_tokens`; None for one that does.

    Raises:
        SharedPromptError: a response fits into no micro-batch, or beside no kept prompt.
    """
    lengths = tuple(prompt + length for length in responses)
    tree = PrefixTree((prompt, *responses), (-1, *[0] * len(responses)), tuple(range(1, len(lengths) + 1)), lengths)
    cost, total = model.kept_cost(is_checkpointed=True), prompt + sum(responses)
    cut = plan_parts(tree, max_tokens, kept=cost)
    if cut.is_whole:
        return None
    divisions = len(split_by_token_budget(tree, max_tokens=max_tokens))
    divided = divisions * prompt + sum(responses)
    row = model.hidden * model.layers * 2 + LAYER_BACKWARD * model.saved_bytes_per_token()
    parts = sum(not piece.parts for piece in walk(cut.pieces))
    return CutPrediction(divisions, divided, parts, cost * row * prompt / GIB, 4 * divided / (4 * total + prompt))


def _warnings(num_responses: int, replicated: Packing, shared: Packing) -> list[str]:
    found = []
    rho, speedup = replicated.tokens / shared.tokens, replicated.layer_ms / shared.layer_ms
    if num_responses == 1:
        found.append("there is one response, so nothing is shared: use plain packing")
    elif rho < LOWEST_RHO:
        found.append(f"rho is {rho:.2f}: the prompt is a small part of the tokens, sharing it saves little")
    if shared.attention_ms > replicated.attention_ms:
        found.append("at these rates the attention alone is slower with a shared prompt")
    if speedup < LOWEST_LAYER_SPEEDUP:
        found.append(f"a layer becomes only {speedup:.2f}x as fast: packing may cost what it saves")
    return found


def table(prediction: Prediction, has_rates: bool) -> str:
    """The prediction as text; without measured rates (`has_rates`) there are no milliseconds."""
    rows = [
        ("tokens (the ratio is rho)", "tokens", 0),
        ("visible pairs per head", "pairs", 0),
        ("attention, TFLOP a layer", "attention_tflop", 2),
        ("layer, TFLOP", "layer_tflop", 2),
        *([("attention, ms a layer", "attention_ms", 2), ("layer, ms", "layer_ms", 2)] if has_rates else []),
        ("memory between forward and backward, GiB a layer", "layer_gib", 2),
        ("the same, whole model", "model_gib", 1),
        ("the same, layers checkpointed", "checkpointed_gib", 1),
    ]
    lines = [f"{'':<48}{'replicated':>20}{'shared':>20}{'ratio':>9}"]
    for name, field, digits in rows:
        before, after = (float(getattr(packing, field)) for packing in (prediction.replicated, prediction.shared))
        lines.append(f"{name:<48} {before:>19,.{digits}f} {after:>19,.{digits}f} {before / after:>7.2f}x")
    return "\n".join([*lines, *(f"warning: {text}" for text in prediction.warnings)])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints the prediction. Where an argument makes no sense it exits with 2 and one line."""
    parser = CommandLine("predict", __doc__)
    add_group(parser, required=True)
    add, ratio = parser.add_argument, number(0, 1_000_000, whole=False)
    model = "a name or layers,hidden,intermediate,heads,kv_heads,head_dim; names: " + ", ".join(MODELS)
    rates = f"{', '.join(RATES)} (default: equal, so that times are operations), or a number for each field of Rates, "
    rates += "of which those in ns may be left out"
    states = "a GPU holds of weight, gradient and optimizer (default: %(default)s, a 16-bit weight and gradient)"
    add("--model", type=name_or_values(MODELS, (6,), number(1, 1 << 24)), default="qwen3-8b", help=model)
    add("--no-qk-norm", action="store_true", help="queries and keys have no norm of their own")
    add("--rates", type=name_or_values(RATES, (5, 9), ratio), default="equal", help=rates)
    add("--bytes-per-parameter", type=number(0, 1000, whole=False), default=BYTES_PER_PARAMETER, help=states)
    add("--decode", choices=COPY_RATES, help="also the bytes that a decoding step reads, and their time on this GPU")
    add("--replicas", type=number(1, 1 << 16), help="of the engine that decodes (default: 1)")
    add("--router", choices=ROUTERS, help=f"what it places on a replica (default: {ROUTERS[0]}, as verl's balancer)")
    add("--max-tokens", type=number(1, 1 << 24), help="also what a group costs in micro-batches of so many tokens")
    add("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)

    responses = spread(parser, options.response, options.responses)
    shape = dataclasses.replace(options.model, qk_norm=options.model.qk_norm and not options.no_qk_norm)
    prediction = predict(options.prompt, responses, shape, options.rates, options.bytes_per_parameter)
    assumed = {"model": dataclasses.asdict(shape), "rates": dataclasses.asdict(options.rates)}
    given = (("--decode", options.decode), ("--replicas", options.replicas), ("--router", options.router))
    for (needed, value), (name, other) in pairwise(given):
        if other is not None and value is None:
            parser.error(f"argument {name}: expected with {needed}")
    replicas, router = options.replicas or 1, options.router or ROUTERS[0]
    decode = options.decode and predict_decode(
        options.prompt, responses, shape, COPY_RATES[options.decode], replicas, router
    )
    cut = None
    if options.max_tokens is not None:
        try:
            cut = predict_cut(options.prompt, responses, shape, options.max_tokens)
        except ValueError as error:
            parser.error(str(error))
    if options.json:
        also = {name: dataclasses.asdict(found) for name, found in (("decode", decode), ("cut", cut)) if found}
        print(json.dumps({**dataclasses.asdict(prediction), **assumed, **also}, indent=1))
        return 0
    shortest, longest = min(responses), max(responses)
    lengths = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    print(f"{len(responses)} responses of {lengths} tokens to a prompt of {options.prompt:,}; forward and backward")
    for what, values in assumed.items():
        print(f"{what}: {', '.join(f'{name} {value}' for name, value in values.items())}")
    print(f"\n{table(prediction, options.rates != RATES['equal'])}")
    if decode:
        sizes = f"{decode.apart_gb:.2f} GB of keys and values, {decode.shared_gb:.2f} GB with the prompt read once"
        times = f"at least {decode.apart_ms:.2f} and {decode.shared_ms:.2f} ms"
        print(f"\na decoding step, all layers: {sizes} ({decode.ratio:.2f}x less); {times}")
        if replicas > 1:
            print(f"{replicas} replicas, of which {decode.copies:.1f} compute, keep and read the prompt; sums of all")
    if cut:
        print(f"\nmicro-batches of {options.max_tokens:,} tokens: {cut.divisions} with {cut.divided_tokens:,} tokens")
        kept = f"{cut.kept_gib:.1f} GiB of the prompt's keys and sums kept"
        print(f"the prompt once, checkpointed: {cut.parts} parts, {kept}, {cut.ratio:.2f}x fewer forwards of rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
