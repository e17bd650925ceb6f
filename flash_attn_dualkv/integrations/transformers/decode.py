# SPDX-License-Identifier: BSD-3-Clause
"""transformers' continuous batching on decoding over shared prefixes.

    register_decode()  # once; generate_batch of every model of the process then decodes with it
    outputs = model.generate_batch(prompts, generation_config=GenerationConfig(num_return_sequences=16, ...))

transformers batches, keeps the pages and shares them. A step in which every request has one token
has a block table: it runs on `shared_prefix_decode`, with one plan for each table. All other steps
run on `flash_attn_dualkv_varlen_func`, over keys that transformers gathers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

from ...attention import flash_attn_dualkv_varlen_func
from ...checks import CUDA_DTYPES, explain
from ...decode.attention import shared_prefix_decode
from ...decode.calls import PAGE_ROWS
from ...decode.plan import SharedPrefixPlan
from ...errors import SharedPromptError, SharedPromptUnsupportedError
from ..replacing import replace_once, stock_of
from . import base_class
from .attention import refuse_unknown
from .support import check_supported, is_hybrid, text_config

# transformers builds no masks for implementations with "flash" in their names.
NAME = "dualkv_flash"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROLLOUT = "shared_prefix_rollout"  # of a runner, and the argument by which layers get it
_PACKAGE = "transformers.generation.continuous_batching"
# What continuous batching hands to every layer, and only some implementations read.
_OF_BATCHES = (
    "k_cache", "logits_indices", "logits_processor_args", "max_length_k", "max_length_q", "max_seqlen_k",
    "max_seqlen_q", "read_index", "v_cache", "write_index",
)  # fmt: skip


def register_decode() -> None:
    """Let continuous batching of all models of this process run on this package, prefill and decoding.

    It holds for `generate_batch`, for managers of continuous batching that are made from then on,
    and for TRL's `use_transformers_continuous_batching`, whatever `attn_implementation` a model
    has; the model gets that back afterwards. It needs no `register()`.

    Raises:
        SharedPromptError: transformers is older than 5.17.

    Models that cannot run on it raise when generation starts: hybrids, and on a GPU what the
    kernels lack.
    """
    for owner, name, make in _seams():
        replace_once(owner, name, make)
    AttentionInterface.register(NAME, _attend)
    base_class.install()  # generate_batch then gives a model its attention back, errors or not


def unregister_decode() -> None:
    """Put stock continuous batching back; nothing happens without `register_decode`."""
    if AttentionInterface._global_mapping.pop(NAME, None) is not None:
        for owner, name, _ in _seams():
            setattr(owner, name, stock_of(getattr(owner, name)))


def _seams() -> list[tuple[Any, str, Callable[[Any], Callable[..., Any]]]]:
    """Functions of transformers that are replaced: their owners, names, and what makes the replacement."""
    try:
        api, initialization, runner = (
            importlib.import_module(f"{_PACKAGE}.{name}")
            for name in ("continuous_api", "initialization", "model_runner")
        )
    except ImportError as error:
        raise SharedPromptError(explain("transformers", "5.17 or newer", transformers.__version__)) from error
    return [
        (api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _switching),
        (initialization, "ensure_decode_fast_path_is_available", _offering_tables),
        (runner.ModelRunner, "compute_batch", _with_rollout),
    ]


# --- what is replaced -----------------------------------------------------------------------------


def _switching(stock: Callable[..., None]) -> Callable[..., None]:
    def switch_to_cb_friendly_attn(manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        before = model.config._attn_implementation
        if before == NAME:
            return
        check_decodes(model)
        for config in (model.config, text_config(model.config)):
            config._attn_implementation_internal = NAME
        manager._original_attn_impl = before  # which the manager puts back when it stops

    return switch_to_cb_friendly_attn


def _offering_tables(stock: Callable[..., None]) -> Callable[..., None]:
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
        """The stock one knows packages of kernels alone, and no CPU."""
        if config._attn_implementation != NAME:
            stock(config, cb_config, *args, **kwargs)
        elif has_windows(config):  # transformers keeps no block tables for such a model
            cb_config.max_blocks_per_request = 0
        elif cb_config.max_blocks_per_request != 0:
            size = getattr(cb_config, "page_size", None) or cb_config.block_size
            if size % PAGE_ROWS:
                raise SharedPromptError(explain("page_size", f"a multiple of {PAGE_ROWS}", size))

    return ensure_decode_fast_path_is_available


def _with_rollout(stock: Callable[..., None]) -> Callable[..., None]:
    def compute_batch(runner: Any, model: Any, batch_data: dict[str, Any]) -> None:
        if model.config._attn_implementation == NAME:
            rollout = getattr(runner, _ROLLOUT, None)
            if rollout is None:
                rollout = Rollout(runner.cache, runner.cb_config.max_requests_per_batch)
                setattr(runner, _ROLLOUT, rollout)
            rollout.begin(runner.inputs_and_outputs)
            batch_data[_ROLLOUT] = rollout
        stock(runner, model, batch_data)

    return compute_batch


# --- which models ---------------------------------------------------------------------------------


def has_windows(config: Any) -> bool:
    """Whether layers of a model have a sliding window, as continuous batching sees it."""
    types = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None if types is None else _SLIDING in types


def check_decodes(model: Any) -> None:
    """Refuse a model that does not run on this, before anything is generated.

    Raises:
        SharedPromptError: names what is not supported.
    """
    check_supported(model.config)
    text = text_config(model.config)
    if is_hybrid(model.config):
        expected = "attention as the only mixer of tokens (register_decode() has no linear attention or Mamba)"
        raise SharedPromptUnsupportedError(explain("model", expected, f"a hybrid ({text.model_type})"))
    if model.device.type == "cpu":
        return
    if model.dtype not in CUDA_DTYPES:
        expected = " or ".join(map(str, CUDA_DTYPES))
        raise SharedPromptUnsupportedError(explain("dtype of the model", f"{expected} on a GPU", model.dtype))
    if not has_windows(text):
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        try:
            SharedPrefixPlan(
                1, 1, num_pages=1, page_size=PAGE_ROWS, num_heads=1, num_kv_heads=1, head_dim=head_dim,
                device=model.device,
            )  # fmt: skip
        except NotImplementedError as error:
            raise SharedPromptUnsupportedError(str(error)) from None


# --- attention ------------------------------------------------------------------------------------


class _Pages(NamedTuple):
    """Where a layer's keys are: its group of layers with one block table, and views of its pages."""

    group: int
    plans: bool  # as the first layer of its group
    k: Tensor
    v: Tensor
    trash: int  # row of the flattened pages for tokens of padding


class _Step(NamedTuple):
    """A group's part of a step: its plan, and the row of the flattened pages of each new token."""

    plan: SharedPrefixPlan
    rows: Tensor


class Rollout:
    """What the layers of a model share while a manager generates with it.

    Args:
        cache: the manager's PagedAttentionCache.
        max_requests: the most requests of a step.
    """

    def __init__(self, cache: Any, max_requests: int) -> None:
        self.cache = cache
        self.prompts = torch.zeros(max_requests, dtype=torch.int32, device=cache.device)  # lengths of a step's prompts
        self._pages: dict[int, _Pages] = {}
        self._steps: dict[int, _Step] = {}

    def begin(self, batch: Any) -> None:
        """Note where training cuts the requests of a step. CUDA graphs read the same memory in every step."""
        stream = batch.compute_stream
        if hasattr(batch, "io_pairs"):  # asynchronous batching
            batch = batch.io_pairs[batch.current_pair].host_io
        if not batch.use_block_table:
            return
        states = [one.state for one in batch.requests_in_batch]
        # A request that was evicted begins anew with what it had generated.
        lengths = torch.tensor(
            [one._true_initial_tokens or len(one.initial_tokens) for one in states], dtype=torch.int32,
            pin_memory=self.prompts.is_cuda,
        )  # fmt: skip
        with torch.cuda.stream(stream):
            self.prompts[: len(states)].copy_(lengths, non_blocking=True)

    def decode(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, table: Tensor, offsets: Tensor, options: dict[str, Any]
    ) -> Tensor:  # fmt: skip
        """Attention of a layer in a step of one token for each request, which is appended to the pages.

        Args:
            index: of the layer.
            q, k, v: (requests, heads, head_dim).
            table: (requests, columns), or in older versions (groups, requests, columns).
            offsets: (requests + 1,), of the keys of each request, with the new ones; none is padding.
            options: of `shared_prefix_decode`.
        """
        pages = self._pages_of(index)
        if pages.plans:
            table = table if table.dim() == 2 else table[pages.group]
            self._steps[pages.group] = self._plan(pages, q.shape[1], table, offsets)
        plan, rows = self._steps[pages.group]
        for new, cache in ((k, pages.k), (v, pages.v)):
            cache.flatten(0, 1).index_copy_(0, rows, new)
        return shared_prefix_decode(q, pages.k, pages.v, plan, **options)

    def _plan(self, pages: _Pages, heads: int, table: Tensor, offsets: Tensor) -> _Step:
        """Plan a step. The first layer of a group does it, inside of a CUDA graph if there is one."""
        count, columns = table.shape
        num_pages, page_size, kv_heads, head_dim = pages.k.shape
        plan = self._steps[pages.group].plan if pages.group in self._steps else None
        if plan is None:
            plan = SharedPrefixPlan(
                len(self.prompts), columns, num_pages=num_pages, page_size=page_size, num_heads=heads,
                num_kv_heads=kv_heads, head_dim=head_dim, device=pages.k.device,
            )  # fmt: skip
        lengths = offsets[1 : count + 1] - offsets[:count]
        plan.update(table, lengths, boundaries=self.prompts[:count])
        position = (lengths - 1).clamp(min=0).long()
        page = table.gather(1, position[:, None] // page_size)[:, 0].long()
        rows = torch.where(lengths > 0, page * page_size + position % page_size, pages.trash)
        return _Step(plan, rows)

    def _pages_of(self, index: int) -> _Pages:
        """The pages of a layer; tensors of continuous batching stay where they are."""
        if index not in self._pages:
            self._pages[index] = _older_pages(self.cache, index) or _pages(self.cache, index)
        return self._pages[index]


def _pages(cache: Any, index: int) -> _Pages:
    """Pages of all layers lie in one tensor, so that views of later layers have fewer of them."""
    allocator = cache.layer_to_allocator[index]
    views = [allocator.get_cache_for_block_table(one) for one in allocator.layer_indices]
    count = min(len(k) for k, _ in views)
    k, v = views[allocator.layer_indices.index(index)]
    is_first = index == allocator.layer_indices[0]
    return _Pages(allocator.index, is_first, k[:count], v[:count], allocator.write_trash_index)


def _older_pages(cache: Any, index: int) -> _Pages | None:
    """As transformers 5.17 keeps them: each layer of a group in tensors of its own."""
    if not hasattr(cache, "layer_index_to_group_indices"):
        return None
    group, place = cache.layer_index_to_group_indices[index]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    k, v = cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)
    return _Pages(group, place == 0, k, v, cache.write_trash_index)


@torch.compiler.disable
def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention under transformers' signature, of a step of continuous batching: (1, T, H, d)."""
    rollout, cache, table = (kwargs.pop(name, None) for name in (_ROLLOUT, "cache", "block_table"))
    if rollout is None:
        raise SharedPromptError(explain("attn_implementation", "another outside of continuous batching", NAME))
    index = int(module.layer_idx)  # type: ignore[arg-type]
    window, softcap = kwargs.pop("sliding_window", None), kwargs.pop("softcap", None)
    options = dict(
        softmax_scale=kwargs.pop("scaling", None),
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
        sinks=kwargs.pop("s_aux", None),
    )
    batch = {name: kwargs.pop(name, None) for name in ("cu_seq_lens_q", "cu_seq_lens_k", *_OF_BATCHES)}
    if kwargs.pop("dropout", 0.0):
        raise SharedPromptError(explain("dropout of attention", "0 in continuous batching", "another"))
    if kwargs.pop("is_causal", True) is False or attention_mask is not None:
        raise SharedPromptError(explain(type(module).__name__, "causal attention without a mask", "another"))
    refuse_unknown(module, kwargs)
    offsets = batch["cu_seq_lens_k"]
    if isinstance(offsets, dict):  # up to 5.17 layers choose, and ask the cache themselves
        offsets = offsets[_SLIDING if cache.sliding_windows[index] != 1 else _FULL]
    if table is not None:
        q, k, v = (one[0].transpose(0, 1).to(value.dtype) for one in (query, key, value))
        return rollout.decode(index, q, k, v, table, offsets, options)[None], None
    if cache is not None:
        key, value = cache.update(key, value, index, read_index=batch["read_index"], write_index=batch["write_index"])
    else:
        key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    q, k = query[0].transpose(0, 1).to(value.dtype), key.to(value.dtype)
    longest = [batch[f"max_length_{one}"] or batch[f"max_seqlen_{one}"] for one in "qk"]
    if isinstance(longest[1], dict):
        longest[1] = max(longest[1].values())
    nothing = k[:0]
    out = flash_attn_dualkv_varlen_func(
        q, nothing, value[:0], k, value, batch["cu_seq_lens_q"], offsets, longest[0], 0, longest[1], **options
    )  # fmt: skip
    return out[None], None
