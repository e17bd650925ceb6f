"""The log-probabilities of a micro-batch and their gradients from a whole model of transformers, prompts shared or not.

The model is transformers' own Qwen3 with random weights, every layer checkpointed. Shared is what the README's training
step calls. Replicated is what trainers without padding do: one packed row of all sequences through the same model on
FlashAttention, the LM head over the same rows and in chunks of the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from layer import packed_positions, replicated_attention
from packing import Prepared, replicated_rows, spans, wide
from peers import Implementation, VarlenKernel, choose_family, math_varlen, varlen_kernels
from shapes import Group, Shape, StepShape
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Qwen3Config

from flash_attn_dualkv import pack_shared_prompts
from flash_attn_dualkv.integrations.lm_head import rows_of_a_chunk
from flash_attn_dualkv.integrations.transformers import register, shared_prompt_forward

# Of the norms of query and key heads, for the reason that layer.HEAD_NORM has.
HEAD_NORM = 1.6
REPLICATED = "benchmark_replicated"  # transformers takes a name with "flash" in it for that of a package


@dataclass
class StepSource:
    """What every implementation starts from.

    ids: (T,) token ids, rows packed ``[P][R_1]...[R_N]`` for each group. dout: (sum of R_i,), the gradient of every
    log-probability.
    """

    shape: StepShape
    dtype: torch.dtype
    ids: Tensor
    dout: Tensor
    seed: int

    @property
    def device(self) -> torch.device:
        return self.ids.device


def make_step_source(shape: StepShape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> StepSource:
    """Random tokens, random advantages."""
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(shape.model.vocab, (shape.packed_tokens,), device=device, generator=generator)
    scored = sum(shape.responses)
    dout = torch.randn(scored, device=device, generator=generator) / scored
    return StepSource(shape, dtype, ids, dout if dtype != torch.float64 else dout.double(), seed)


def make_model(source: StepSource, attention: str) -> Any:
    """The model on an attention of that registered name; its weights depend on the source's seed alone."""
    shape = source.shape.model
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=1 << 18,
        use_cache=False,
    )
    devices = [source.device] if source.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(source.device):
        torch.manual_seed(source.seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=source.dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(HEAD_NORM)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def build_step(source: StepSource, model: Any, log_probabilities: Callable[[], Tensor]) -> Prepared:
    """The gradients are those of all parameters; rows of the output are scored tokens, less their mean."""

    def take(out: Tensor, which: Tensor) -> Tensor:
        # The common part, the logarithm of the vocabulary's size, would hide what attention adds.
        return (out - out.mean())[which % len(out)]

    leaves = tuple(model.parameters())
    return Prepared(leaves, source.dout, log_probabilities, take, lambda gradients: tuple(map(wide, gradients)))


def samples(source: StepSource) -> tuple[list[Tensor], list[Tensor]]:
    """Prompts and responses, one of each per sample, 1-D int64."""
    all_spans = spans(source.shape)
    pieces = [source.ids[span.begin : span.end] for span in all_spans]
    responses = [index for index, span in enumerate(all_spans) if index != span.prompt]
    return [pieces[all_spans[index].prompt] for index in responses], [pieces[index] for index in responses]


def build_shared(source: StepSource, family: str | None = None) -> Prepared:
    """This library, called as its README says."""
    choose_family(family)
    register()
    batch = pack_shared_prompts(*samples(source))
    model = make_model(source, "dualkv")
    return build_step(source, model, lambda: shared_prompt_forward(model, batch)[0])


def build_replicated(source: StepSource, kernel: VarlenKernel) -> Prepared:
    """The packed row ``[P R_1][P R_2]...`` through the same model."""
    attention = replicated_attention(source.shape, kernel, source.device)

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        return attention(*(one[0].transpose(0, 1) for one in (q, k, v)))[None], None

    AttentionInterface.register(REPLICATED, attend)
    AttentionMaskInterface.register(REPLICATED, lambda *args, **kwargs: None)
    model = make_model(source, REPLICATED)
    rows = replicated_rows(source.shape)
    ids = source.ids[rows.to(source.device)]
    positions = packed_positions(source.shape)[rows].to(source.device)
    scored = scored_rows(source.shape).to(source.device)
    targets = ids[scored + 1]

    def score(hidden: Tensor, wanted: Tensor) -> Tensor:
        logits = wide(model.lm_head(hidden))
        return logits.gather(-1, wanted[:, None])[:, 0] - logits.logsumexp(-1)

    def log_probabilities() -> Tensor:
        hidden = model.model(input_ids=ids[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]
        size = rows_of_a_chunk(source.shape.model.vocab)
        chunks = zip(hidden.index_select(0, scored).split(size), targets.split(size), strict=True)
        return torch.cat([checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks])

    return build_step(source, model, log_probabilities)


def scored_rows(shape: Shape) -> Tensor:
    """Rows of ``[P R_1][P R_2]...`` whose logits score a response token: each stands in front of its token."""
    pieces, begin = [], 0
    for group in shape.groups:
        for length in group.responses:
            begin += group.prompt
            pieces.append(torch.arange(begin - 1, begin + length - 1))
            begin += length
    return torch.cat(pieces)


def as_packed(shape: Shape) -> Shape:
    """The lengths that this library packs: the last token of a prompt in front of each of its responses."""
    groups = [Group(group.prompt - 1, tuple(1 + length for length in group.responses)) for group in shape.groups]
    return Shape(shape.name, tuple(groups))


def shared(name: str, family: str | None) -> Implementation:
    return Implementation(
        name,
        lambda source: build_shared(source, family),
        pairs=lambda shape: as_packed(shape).visible_pairs(),
        tokens=lambda shape: as_packed(shape).packed_tokens,
        is_ours=True,
    )


def replicated(name: str, kernel: VarlenKernel) -> Implementation:
    return Implementation(
        name,
        lambda source: build_replicated(source, kernel),
        pairs=Shape.replicated_pairs,
        tokens=lambda shape: shape.replicated_tokens,
    )


def cuda_steps(families: dict[str, tuple[str, ...]]) -> list[Implementation]:
    """All that this machine can run, ours first. ``families``: what ``peers.own_families`` returns."""
    own = [shared(f"dualkv_{family}", family) for family, directions in families.items() if "backward" in directions]
    return [*own, *(replicated(f"{label}_replicated", kernel) for label, kernel in varlen_kernels().items())]


def cpu_steps() -> list[Implementation]:
    """The same over plain PyTorch: for tests, never for results."""
    return [shared("dualkv_reference", None), replicated("math_replicated", math_varlen)]
