"""What sharing a prompt saves in training: tokens, operations, time and memory, computed before anything is run.

    python -m flash_attn_dualkv.predict --responses 16 --prompt 8192 --response 1024 --model qwen3-8b
    python -m flash_attn_dualkv.predict --responses 8 --prompt 600 --response 900 --rates h200 --json

For N responses R to one prompt P, replicated packing computes N (P + R) tokens and shared packing P + N R; their ratio
is rho (Gai et al., DualKV, 2026). A decoder layer has two kinds of work. Token-wise work (norms, projections, MLP) is
proportional to tokens, so it shrinks by rho. Attention is proportional to visible (query, key) pairs; these shrink by
less than rho, since every response still attends to the whole prompt.

Tokens, pairs and operations are exact counts. Times divide operations by rates. Rates belong to a GPU and the kernels
on it: they are an argument (`Rates`), never a constant of the prediction. With the default, `equal`, every operation
takes equally long, so that time ratios are ratios of operations.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

FLOPS_PER_PAIR = 4  # two products of head_dim multiply-adds each: Q K^T and P V
BACKWARD_OVER_FORWARD = 2.5  # attention: five products instead of two, since S is computed again
TOKEN_BACKWARD_OVER_FORWARD = 2.0  # a linear layer: one product for its input's gradient, one for its weight's

DIRECTIONS = ("forward", "backward")

GIB = 1 << 30
BYTES_PER_PARAMETER = 4.0  # a 16-bit weight and its gradient
LOWEST_RHO = 1.1  # below it fewer than a tenth of the tokens are saved
LOWEST_LAYER_SPEEDUP = 1.05
SHORT_PROMPT = 256  # two tiles of the kernels: the boundary tiles are then a large part of all tiles of the prompt


def causal_pairs(length: int) -> int:
    """Visible (query, key) pairs of a causal sequence with itself."""
    return length * (length + 1) // 2


def shared_pairs(prompt: int, responses: Sequence[int]) -> int:
    """Visible pairs of one head, the prompt stored once: its own, and each response's with the prompt and itself."""
    return causal_pairs(prompt) + sum(length * prompt + causal_pairs(length) for length in responses)


def replicated_pairs(prompt: int, responses: Sequence[int]) -> int:
    """Visible pairs of one head with a copy of the prompt in front of each response."""
    return sum(causal_pairs(prompt + length) for length in responses)


def shared_tokens(prompt: int, responses: Sequence[int]) -> int:
    """P + sum of R_i."""
    return prompt + sum(responses)


def replicated_tokens(prompt: int, responses: Sequence[int]) -> int:
    """Sum of P + R_i."""
    return len(responses) * prompt + sum(responses)


def attention_flops(heads: int, head_dim: int, pairs: int, direction: str) -> float:
    """Operations of attention over `pairs` visible pairs of each of `heads` query heads.

    Raises:
        ValueError: `direction` is neither "forward" nor "backward".
    """
    return FLOPS_PER_PAIR * heads * head_dim * pairs * _factor(direction, BACKWARD_OVER_FORWARD)


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers: attention with H query and H_k KV heads of dimension d, and a gated MLP.

    Attributes:
        qk_norm: queries and keys go through an RMSNorm per head, which keeps its inputs for the backward.
        vocab, tied: rows of the embedding; whether the LM head is the same matrix. Only `parameters` depends on them.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = True
    vocab: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: expected a multiple of kv_heads ({self.kv_heads}), got {self.heads}")

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrix products: q, k, v and o projections, gate, up and down."""
        projections = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return projections + 3 * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: `layer_weights` and its norms."""
        return self.layer_weights + 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; without `vocab` those of embedding and LM head are left out."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + self.hidden + embeddings

    def attention_flops(self, pairs: int, direction: str) -> float:
        """Operations of one layer's attention: `attention_flops` of its heads."""
        return attention_flops(self.heads, self.head_dim, pairs, direction)

    def token_flops(self, tokens: int, direction: str) -> float:
        """Operations of one layer's matrix products over `tokens`; what is element-wise is not counted.

        Raises:
            ValueError: `direction` is neither "forward" nor "backward".
        """
        return 2 * self.layer_weights * tokens * _factor(direction, TOKEN_BACKWARD_OVER_FORWARD)

    def layer_flops(self, tokens: int, pairs: int, direction: str) -> float:
        """Operations of one layer: `token_flops` and `attention_flops`."""
        return self.token_flops(tokens, direction) + self.attention_flops(pairs, direction)

    def saved_bytes_per_token(self, element_bytes: int = 2) -> int:
        """What one layer in plain PyTorch keeps of a token between forward and backward, without checkpointing.

        Norms are PyTorch's fused ones for GPUs, which keep their input and one statistic.
        The inputs of both norms, of the projections and of the MLP (4 hidden); queries, keys and values as attention
        gets them, queries and keys before their norm, and the attention's output; gate, silu(gate), up and their
        product (4 intermediate). Statistics are float32: one of each norm, and the attention's LSE.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        elements = 4 * self.hidden + 4 * self.intermediate + 2 * (queries + keys)
        statistics = 2 + self.heads
        if self.qk_norm:
            elements += queries + keys
            statistics += self.heads + self.kv_heads
        return element_bytes * elements + 4 * statistics


MODELS = {
    "qwen3-0.6b": ModelShape(28, 1024, 3072, 16, 8, 128, vocab=151936, tied=True),
    "qwen3-1.7b": ModelShape(28, 2048, 6144, 16, 8, 128, vocab=151936, tied=True),
    "qwen3-4b": ModelShape(36, 2560, 9728, 32, 8, 128, vocab=151936, tied=True),
    "qwen3-8b": ModelShape(36, 4096, 12288, 32, 8, 128, vocab=151936),
    "qwen3-14b": ModelShape(40, 5120, 17408, 40, 8, 128, vocab=151936),
    "qwen3-32b": ModelShape(64, 5120, 25600, 64, 8, 128, vocab=151936),
    "llama3-8b": ModelShape(32, 4096, 14336, 32, 8, 128, qk_norm=False, vocab=128256),
    "llama3-70b": ModelShape(80, 8192, 28672, 64, 8, 128, qk_norm=False, vocab=128256),
}


@dataclass(frozen=True)
class Rates:
    """What a GPU sustains, in TFLOP/s of the operations that each implementation executes.

    Attributes:
        token_wise: the matrix products of a layer together with the element-wise work around them, so below the rate of
            a matrix product alone.
        shared_forward, shared_backward: attention of this library.
        replicated_forward, replicated_backward: the attention kernels that it is compared with.
    """

    token_wise: float
    shared_forward: float
    shared_backward: float
    replicated_forward: float
    replicated_backward: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name}: expected a rate > 0, got {getattr(self, field.name)}")


# GPUs by name are bf16, head dimension 128, prompts from 4K on: this library's Hopper kernels, and FlashAttention-2.
# With them the times of the layers in benchmarks/results are predicted to within 6%.
# Measure your own with benchmarks/bench_kernel.py and benchmarks/bench_layer.py.
RATES = {
    "equal": Rates(1.0, 1.0, 1.0, 1.0, 1.0),
    "h200": Rates(
        token_wise=550.0,
        shared_forward=650.0,
        shared_backward=540.0,
        replicated_forward=350.0,
        replicated_backward=305.0,
    ),
    "h100": Rates(
        token_wise=550.0,
        shared_forward=665.0,
        shared_backward=545.0,
        replicated_forward=335.0,
        replicated_backward=305.0,
    ),
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
    """What sharing the prompt of one group saves, in one decoder layer and in the activations of a model.

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
        ValueError: a length is below 1, there is no response, or `bytes_per_parameter` is negative.
    """
    if prompt < 1:
        raise ValueError(f"prompt: expected at least 1 token, got {prompt}")
    if not responses:
        raise ValueError("responses: expected at least one, got none")
    if min(responses) < 1:
        raise ValueError(f"responses: expected at least 1 token each, got {min(responses)}")
    if not bytes_per_parameter >= 0:
        raise ValueError(f"bytes_per_parameter: expected a number >= 0, got {bytes_per_parameter}")
    replicated = _packing(
        replicated_tokens(prompt, responses),
        replicated_pairs(prompt, responses),
        model,
        (rates.token_wise, rates.replicated_forward, rates.replicated_backward),
        bytes_per_parameter,
    )
    shared = _packing(
        shared_tokens(prompt, responses),
        shared_pairs(prompt, responses),
        model,
        (rates.token_wise, rates.shared_forward, rates.shared_backward),
        bytes_per_parameter,
    )
    return Prediction(
        rho=replicated.tokens / shared.tokens,
        attention_speedup=replicated.attention_ms / shared.attention_ms,
        layer_speedup=replicated.layer_ms / shared.layer_ms,
        memory_ratio=shared.layer_gib / replicated.layer_gib,
        replicated=replicated,
        shared=shared,
        warnings=tuple(_warnings(prompt, responses, replicated, shared)),
    )


def _factor(direction: str, backward: float) -> float:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: expected one of {DIRECTIONS}, got {direction!r}")
    return backward if direction == "backward" else 1.0


def _packing(
    tokens: int, pairs: int, model: ModelShape, rates: tuple[float, float, float], bytes_per_parameter: float
) -> Packing:
    """`rates`: of token-wise work, and of attention forward and backward."""
    token_wise = sum(model.token_flops(tokens, direction) for direction in DIRECTIONS)
    attention = [model.attention_flops(pairs, direction) for direction in DIRECTIONS]
    attention_ms = sum(flops / rate for flops, rate in zip(attention, rates[1:])) / 1e9
    activations = tokens * model.saved_bytes_per_token()
    # During the backward one layer at a time has all its activations again.
    checkpointed = 2 * tokens * model.hidden * model.layers + activations
    model_bytes = bytes_per_parameter * model.parameters
    return Packing(
        tokens=tokens,
        pairs=pairs,
        attention_tflop=sum(attention) / 1e12,
        layer_tflop=(sum(attention) + token_wise) / 1e12,
        attention_ms=attention_ms,
        layer_ms=attention_ms + token_wise / rates[0] / 1e9,
        layer_gib=(activations + bytes_per_parameter * model.layer_parameters) / GIB,
        model_gib=(model.layers * activations + model_bytes) / GIB,
        checkpointed_gib=(checkpointed + model_bytes) / GIB,
    )


def _warnings(prompt: int, responses: Sequence[int], replicated: Packing, shared: Packing) -> list[str]:
    found = []
    rho = replicated.tokens / shared.tokens
    if len(responses) == 1:
        found.append("there is one response, so nothing is shared: use plain packing")
    elif rho < LOWEST_RHO:
        found.append(f"rho is {rho:.2f}: the prompt is a small part of the tokens, sharing it saves little")
    if prompt < SHORT_PROMPT:
        found.append(
            f"the prompt has {prompt} tokens: below about {SHORT_PROMPT} the attention kernels work mostly on tiles "
            "that are partly masked, and slower than the rates assumed here"
        )
    if shared.attention_ms > replicated.attention_ms:
        found.append("at these rates the attention alone is slower with a shared prompt")
    if replicated.layer_ms / shared.layer_ms < LOWEST_LAYER_SPEEDUP:
        found.append(
            f"a layer becomes only {replicated.layer_ms / shared.layer_ms:.2f}x as fast: packing may cost what it saves"
        )
    return found


def table(prediction: Prediction, has_rates: bool) -> str:
    """The prediction as text; without measured rates (`has_rates`) there are no milliseconds."""
    replicated, shared = prediction.replicated, prediction.shared

    def row(name: str, digits: int, what: str) -> tuple[str, str, str, str]:
        before, after = (float(getattr(packing, what)) for packing in (replicated, shared))
        return name, f"{before:,.{digits}f}", f"{after:,.{digits}f}", f"{before / after:.2f}x"

    rows = [
        ("", "replicated", "shared", "ratio"),
        row("tokens (the ratio is rho)", 0, "tokens"),
        row("visible pairs per head", 0, "pairs"),
        row("attention, TFLOP a layer", 2, "attention_tflop"),
        row("layer, TFLOP", 2, "layer_tflop"),
    ]
    if has_rates:
        rows += [row("attention, ms a layer", 2, "attention_ms"), row("layer, ms", 2, "layer_ms")]
    rows += [
        row("memory between forward and backward, GiB a layer", 2, "layer_gib"),
        row("the same, whole model", 1, "model_gib"),
        row("the same, layers checkpointed", 1, "checkpointed_gib"),
    ]
    widths = [max(len(cells[column]) for cells in rows) for column in range(4)]
    lines = [
        "  ".join([cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:]))])
        for cells in rows
    ]
    return "\n".join([*lines, *(f"warning: {text}" for text in prediction.warnings)])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_dualkv.predict", description="What sharing a prompt saves in training."
    )
    parser.add_argument("--responses", type=int, required=True, metavar="N", help="responses to the prompt")
    parser.add_argument("--prompt", type=int, required=True, metavar="P", help="tokens of the prompt")
    parser.add_argument("--response", type=int, required=True, metavar="R", help="tokens of a response")
    parser.add_argument("--model", choices=[*MODELS, "custom"], default="qwen3-8b", help="default: %(default)s")
    for name in ("layers", "hidden", "intermediate", "heads", "kv-heads", "head-dim"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="for a custom model; replaces a named model's")
    parser.add_argument("--no-qk-norm", action="store_true", help="queries and keys have no norm of their own")
    parser.add_argument(
        "--rates",
        choices=RATES,
        default="equal",
        help="what the GPU sustains; equal: time ratios are ratios of operations (default)",
    )
    for field in dataclasses.fields(Rates):
        name = field.name.replace("_", "-")
        parser.add_argument(f"--{name}", type=float, metavar="TFLOPS", help="replaces the one of --rates")
    parser.add_argument(
        "--bytes-per-parameter",
        type=float,
        default=BYTES_PER_PARAMETER,
        metavar="BYTES",
        help="of weight, gradient and optimizer on one GPU (default: %(default)s, a 16-bit weight and gradient)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(arguments)


def _model(options: argparse.Namespace) -> ModelShape:
    names = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.no_qk_norm:
        given["qk_norm"] = False
    if options.model != "custom":
        return dataclasses.replace(MODELS[options.model], **given)
    missing = [f"--{name.replace('_', '-')}" for name in names if name not in given]
    if missing:
        raise ValueError(f"a custom model needs {', '.join(missing)}")
    return ModelShape(**given)


def _rates(options: argparse.Namespace) -> tuple[Rates, bool]:
    """The rates, and whether they are a GPU's: rates on top of `equal` must be given all together."""
    names = [field.name for field in dataclasses.fields(Rates)]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.rates == "equal" and 0 < len(given) < len(names):
        missing = ", ".join(f"--{name.replace('_', '-')}" for name in names if name not in given)
        raise ValueError(f"rates without --rates of a GPU must be complete: {missing} missing")
    return dataclasses.replace(RATES[options.rates], **given), options.rates != "equal" or bool(given)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints the prediction; 2 if an argument makes no sense."""
    options = _parse(arguments)
    try:
        if options.responses < 1:
            raise ValueError(f"responses: expected at least one, got {options.responses}")
        model, (rates, has_rates) = _model(options), _rates(options)
        responses = [options.response] * options.responses
        prediction = predict(options.prompt, responses, model, rates, options.bytes_per_parameter)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        assumed = {"model": dataclasses.asdict(model), "rates": dataclasses.asdict(rates)}
        print(json.dumps({**dataclasses.asdict(prediction), **assumed}, indent=1))
        return 0
    print(
        f"{options.model}, {options.responses} responses of {options.response:,} tokens to a prompt of "
        f"{options.prompt:,}; forward and backward; rates: {options.rates}\n"
    )
    print(table(prediction, has_rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
