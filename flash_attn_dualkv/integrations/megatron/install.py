# SPDX-License-Identifier: BSD-3-Clause
"""Prepares built models for packed rows: core attentions, recurrences, RoPE, and a guard around every forward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from ... import checks, guard
from ...errors import SharedPromptError, SharedPromptLayoutError, SharedPromptUnsupportedError
from ...layout import SharedPromptLayout, check_unpacked, is_in_backward
from ...packed_attention import BACKENDS
from ...parallel.context import ContextLayout
from ..common.versions import MEGATRON_CORE
from .attention import AttentionSettings, OnPackedRows
from .params import SharedPackedSeqParams
from .recurrent import ON_NODES, prepare
from .rotary import OfPositions
from .support import check_config, check_delta_nets, check_mamba, check_training

# Classes whose forward is known, and may be inherited: subclasses with another forward compute
# something else.
_CORES = (DotProductAttention, TEDotProductAttention) if HAVE_TE else (DotProductAttention,)
_ROTARY = (RotaryEmbedding, YarnRotaryEmbedding)
_ATTENTIONS = (SelfAttention, MLASelfAttention)
# Attribute of a chunk that is installed: how many of its layers mix tokens.
_LAYERS = "dualkv_layers"


def install(model_chunks: nn.Module | Iterable[nn.Module], *, backend: str = "auto") -> None:
    """Prepare a model for `SharedPackedSeqParams`, before or after it is wrapped; calls without them do not change.

    Core attentions, gated delta nets, Mamba mixers and RoPE get a class of their own, with the parameters, names and
    checkpoints of the stock one, as a `HybridModel` does, and each chunk hooks that check what a packed call passes and
    that every layer has got its layout.
    Installing twice changes nothing but the backend.

    Args:
        model_chunks: a `GPTModel` or `HybridModel`, the list of this rank's chunks (virtual pipeline stages), or
            whatever wraps them: Float16Module, DistributedDataParallel, a multimodal model with one of them inside.
        backend: of `shared_prompt_attention`: "reference" computes fp32 models on a GPU, slowly.

    Raises:
        SharedPromptUnsupportedError: a setting or a layer that is not exact on packed rows, by name.
        SharedPromptError: an argument is not as described.
    """
    checks.choice("backend", backend, BACKENDS)
    given = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    chunks = [_language_model(chunk) for chunk in given]
    # All checks first: a model is prepared as a whole or not at all.
    prepared = [(chunk, *_mixers(chunk), _rotaries(chunk)) for chunk in chunks]
    settings = [[AttentionSettings.of(attention, backend) for attention in found] for _, found, _, _ in prepared]
    prepare([layer for _, _, recurrences, _ in prepared for layer in recurrences])
    for (chunk, attentions, recurrences, rotaries), of_layers in zip(prepared, settings):
        for attention, own in zip(attentions, of_layers):
            _extend(attention.core_attention, OnPackedRows)
            attention.core_attention.dualkv = own
        for layer in recurrences:
            _extend(layer, next(mixin for kind, mixin in ON_NODES.items() if isinstance(layer, kind)))
        for rotary in rotaries:
            _extend(rotary, OfPositions)
        if isinstance(chunk, HybridModel):
            _extend(chunk, WithOutputProcessor)
        if not hasattr(chunk, _LAYERS):
            chunk.register_forward_pre_hook(_before, with_kwargs=True)
            chunk.register_forward_hook(_after, always_call=True)
        setattr(chunk, _LAYERS, len(attentions) + len(recurrences))


def installed_chunk(model: nn.Module) -> Any:
    """The `GPTModel` or `HybridModel` inside of a chunk; SharedPromptError if it is not installed."""
    chunk = _language_model(model)
    if not hasattr(chunk, _LAYERS):
        raise SharedPromptError("model", "install(model_chunks) before the first packed call", "none")
    return chunk


def position_ids_of(chunk: Any, params: SharedPackedSeqParams) -> Tensor:
    """This rank's positions as a chunk takes them: (1, L), or (3, 1, L) of multimodal RoPE; views."""
    own = params.position_ids
    if chunk.position_embedding_type != "mrope":
        return own[None]
    return own[:, None] if own.dim() > 1 else own.expand(3, 1, -1)


def replayed_routers(chunk: Any) -> Iterator[tuple[int, Any]]:
    """Routers of a chunk that record or replay their routes: the number of the layer, from 1, and the object that does.

    That is Megatron's `RouterReplay`, or one of a framework that takes its place.
    """
    for module in chunk.decoder.modules():
        replay = getattr(module, "router_replay", None)
        if isinstance(module, TopKRouter) and replay is not None:
            yield module.layer_number, replay


def _language_model(model: Any) -> Any:
    checks.instance("model_chunks", model, nn.Module, ", or a list of them")
    found = [module for module in model.modules() if isinstance(module, (GPTModel, HybridModel))]
    if len(found) != 1:
        names = ", ".join(sorted({type(module).__name__ for module in found})) or type(model).__name__
        raise SharedPromptUnsupportedError(
            "model", "one GPTModel or HybridModel in each chunk", f"{len(found)}: {names}"
        )
    return found[0]


def _mixers(chunk: Any) -> tuple[list[Any], list[Any]]:
    """The attention layers and recurrences of a chunk, of which everything is known that mixes tokens."""
    check_config(chunk.config)
    if chunk.config.context_parallel_size > 1 and chunk.position_embedding_type == "mrope":
        expected = "another with context parallelism (Megatron divides the frequencies of multimodal RoPE twice)"
        raise SharedPromptUnsupportedError("position_embedding_type", expected, "mrope")
    found: list[Any] = []
    recurrences: list[Any] = []
    for name, layer in chunk.decoder.layers.named_children():
        if isinstance(layer, MambaLayer):
            if not _is_known(layer.mixer, (MambaMixer,)):
                raise _unknown(f"decoder.layers.{name}.mixer", "MambaMixer", layer.mixer)
            check_mamba(chunk.config)
            recurrences.append(layer.mixer)
            continue
        if not isinstance(layer, TransformerLayer):
            raise _unknown(f"decoder.layers.{name}", "a TransformerLayer or MambaLayer", layer)
        if not isinstance(layer.cross_attention, IdentityOp):
            raise _unknown(f"decoder.layers.{name}.cross_attention", "none", layer.cross_attention)
        attention = layer.self_attention
        if isinstance(attention, IdentityOp):
            continue
        if _is_known(attention, (GatedDeltaNet,)):
            check_delta_nets(chunk.config)
            recurrences.append(attention)
            continue
        if not _is_known(attention, _ATTENTIONS):
            raise _unknown(f"decoder.layers.{name}.self_attention", "SelfAttention or MLASelfAttention", attention)
        if not _is_known(attention.core_attention, _CORES):
            expected = " or ".join(kind.__name__ for kind in _CORES)
            raise _unknown(f"decoder.layers.{name}.self_attention.core_attention", expected, attention.core_attention)
        found.append(attention)
    return found, recurrences


def _rotaries(chunk: nn.Module) -> list[Any]:
    """Modules that make the frequencies of RoPE; multimodal RoPE reads position_ids, which are checked."""
    found = []
    for name, module in chunk.named_modules():
        if isinstance(module, MultimodalRotaryEmbedding) or "rotary" not in type(module).__name__.lower():
            continue
        if not _is_known(module, _ROTARY):
            raise _unknown(name, " or ".join(kind.__name__ for kind in _ROTARY), module)
        found.append(module)
    return found


class WithOutputProcessor:
    """Over Megatron's `HybridModel`: its forward takes an `output_processor`, as that of `GPTModel` does."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        decoder_input: Any = None,
        labels: Any = None,
        inference_context: Any = None,
        *others: Any,
        inference_params: Any = None,
        packed_seq_params: Any = None,
        output_processor: Any = None,
        output_processor_context: Any = None,
        **options: Any,
    ) -> Any:
        model: Any = self
        stock: Any = super()
        given = input_ids, position_ids, attention_mask, decoder_input, labels, inference_context, *others
        options |= dict(inference_params=inference_params, packed_seq_params=packed_seq_params)
        if output_processor is None or not model.post_process:
            return stock.forward(*given, **options)
        # A stage that is not the last one returns its hidden states; norms are the decoder's.
        model.post_process = False
        try:
            hidden = stock.forward(*given, **options)
        finally:
            model.post_process = True
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        return output_processor(
            hidden_states=hidden, output_layer=model.output_layer, output_weight=weight,
            scale_logits=model._scale_logits, context=output_processor_context,
        )  # fmt: skip


def _is_known(module: Any, kinds: tuple[Any, ...]) -> bool:
    """True if a module computes as one of these classes do: it may be installed, or inherit the forward."""
    is_ours = isinstance(module, (OnPackedRows, *ON_NODES.values(), OfPositions))
    return is_ours or any(type(module).forward is kind.forward for kind in kinds)


def _extend(module: Any, mixin: Any) -> None:
    """Give a module a class over its own: its parameters and their names in checkpoints stay the same."""
    if not isinstance(module, mixin):
        module.__class__ = _extended(mixin, module.__class__)


@functools.cache
def _extended(mixin: Any, stock: Any) -> Any:
    return type(f"Shared{stock.__name__}", (mixin, stock), {})


MEGATRON_CORE.check_classes(
    *(_extended(OnPackedRows, kind) for kind in _CORES),
    *(_extended(OfPositions, kind) for kind in _ROTARY),
    *(_extended(mixin, kind) for kind, mixin in ON_NODES.items()),
    _extended(WithOutputProcessor, HybridModel),
)


def _unknown(name: str, expected: str, got: Any) -> SharedPromptUnsupportedError:
    return SharedPromptUnsupportedError(name, f"{expected} with shared prompts", type(got).__name__)


# --- around a forward -----------------------------------------------------------------------------


def _before(chunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inputs = inspect.signature(chunk.forward).bind_partial(*args, **kwargs).arguments
    params = inputs.get("packed_seq_params")
    if not isinstance(params, SharedPackedSeqParams):
        check_unpacked(*(inputs.get(name) for name in ("position_ids", "attention_mask", "input_ids")))
        return
    _check_inputs(chunk, params, inputs)
    check_training(chunk, chunk.config)
    if getattr(chunk, _LAYERS):
        guard.begin(params.layout, getattr(chunk, _LAYERS), owner=chunk)


def _after(chunk: Any, args: Any, output: Any) -> None:
    expectation = guard.current()
    if expectation is None or expectation.owner is not chunk:
        return
    guard.end(expectation)
    if output is not None:  # the forward has not raised
        expectation.check()


def _check_inputs(chunk: Any, params: SharedPackedSeqParams, inputs: dict[str, Any]) -> None:
    """SharedPromptError for a packed call whose other arguments are not those of the packed row."""
    for name in ("attention_mask", "inference_context", "inference_params"):
        if inputs.get(name) is not None:
            expected = "None with SharedPackedSeqParams, whose layout says who sees whom"
            raise SharedPromptError(name, expected, checks.describe(inputs[name]))
    layout = params.layout
    _check_division(chunk, layout)
    ids, rows = inputs.get("input_ids"), layout.num_local_tokens
    if ids is not None and tuple(ids.shape) != (1, rows):
        raise SharedPromptLayoutError("input_ids", f"shape (1, {rows}), as the layout", tuple(ids.shape))
    layout.check_ids(ids)
    ranks = chunk.config.tensor_model_parallel_size
    if chunk.config.sequence_parallel and rows % ranks:
        how = f"divided_layout(.., {ranks})" if isinstance(layout, ContextLayout) else f"pad_to_multiple_of={ranks}"
        expected = f"a multiple of the {ranks} tensor-parallel ranks as rows ({how})"
        raise SharedPromptLayoutError("layout", expected, rows)
    for number, router in replayed_routers(chunk):
        _check_routes(number, router, rows // (ranks if chunk.config.sequence_parallel else 1))
    if chunk.position_embedding_type in ("mrope", "learned_absolute"):
        _check_positions(chunk, params, inputs.get("position_ids"))


def _check_routes(layer_number: int, router: Any, rows: int) -> None:
    """SharedPromptLayoutError for routes to be replayed that are not those of so many rows of this rank."""
    action, target = router.router_replay_action, router.target_topk_idx
    if action is None or action.name != "REPLAY_FORWARD":
        return
    got = "none" if target is None else f"of {len(target)}"
    if target is None or len(target) != rows:
        expected = f"routes of {rows} rows (replay_routes before each forward)"
        raise SharedPromptLayoutError(f"router of layer {layer_number}", expected, got)


def _check_division(chunk: Any, layout: SharedPromptLayout) -> None:
    """SharedPromptLayoutError unless the row is divided among the chunk's context-parallel ranks, if there are any."""
    group = chunk.pg_collection.cp
    if isinstance(layout, ContextLayout):
        is_right, got = layout.group is group, "of another group"
    else:
        is_right, got = group.size() == 1, "a whole row"
    if not is_right:
        expected = f"one that is divided among the {group.size()} ranks of Megatron's context-parallel group"
        raise SharedPromptLayoutError("layout", f"{expected} (divided_layout)", got)


def _check_positions(chunk: Any, params: SharedPackedSeqParams, given: Any) -> None:
    """Positions that a model reads must be those of the batch, which is known by where they lie in memory."""
    own = position_ids_of(chunk, params)
    if is_in_backward():
        return
    is_own = isinstance(given, Tensor) and given.shape == own.shape and given.dtype == own.dtype
    if not is_own or given.stride() != own.stride() or checks.address(given) != checks.address(own):
        expected = f"those of the batch as {tuple(own.shape)}, no copy (shared_prompt_forward passes them)"
        raise SharedPromptLayoutError("position_ids", expected, checks.describe(given))
