# SPDX-License-Identifier: BSD-3-Clause
"""transformers' continuous batching on decoding over shared prefixes.

    register_decode()  # once; generate_batch of every model of the process then decodes with it
    outputs = model.generate_batch([prompt for prompt in prompts for _ in range(16)], generation_config=...)

transformers batches, keeps the pages and shares them. A step in which every request has one token has a block table: it
runs on `shared_prefix_decode`, with one plan for all layers. All other steps, and all steps of models with windows, run
on the kernels of training, over keys that transformers gathers. Both cut a request where training does.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface

from ... import checks, ops
from ...calls import make_options
from ...data.prefix_tree import SHIFTS, Boundary, checked_boundary
from ...decode.attention import shared_prefix_decode
from ...decode.calls import PAGE_ROWS
from ...decode.plan import SharedPrefixPlan
from ...errors import SharedPromptError, SharedPromptUnsupportedError
from ...nodes import split_nodes
from ..common.patching import Make, in_front_of, replace_all, stock_of
from . import patches
from .admission.decoding import SLIDING, check_decodes, tables_lack
from .admission.unwrap import text_config
from .attention import refuse_unknown

# Attention implementations of models on a GPU and on the CPU. For names with "flash" in them
# transformers reserves no memory for masks, and captures CUDA graphs wherever there is a GPU.
NAMES = ("dualkv_flash", "dualkv_paged")
ROLLOUT = "shared_prefix_rollout"  # of a runner, and the argument by which layers get it
# What continuous batching hands to every layer.
_OF_BATCHES = (
    "block_table", "cu_seq_lens_k", "cu_seq_lens_q", "k_cache", "logits_indices", "logits_processor_args",
    "max_length_k", "max_length_q", "max_seqlen_k", "max_seqlen_q", "read_index", "v_cache", "write_index",
)  # fmt: skip
# What the last `register_decode` asked for.
_boundary: Boundary = "replicate"
_exact: str = "trainer"
# Managers that generate on this package; `persistent_manager` lets a model keep one.
_managers: weakref.WeakSet[Any] = weakref.WeakSet()


def register_decode(boundary: Boundary = "replicate", *, exact: Literal["trainer", "split"] = "trainer") -> None:
    """Let continuous batching of all models of this process run on this package, prefill and decoding.

    It holds for `generate_batch`, for managers that are made from then on, and for TRL's
    `use_transformers_continuous_batching`, whatever `attn_implementation` a model has. Models that cannot run on it
    raise when generation starts: hybrids, MLA, and on a GPU what the kernels lack.

    Args:
        boundary: of training (`pack_shared_prompts`): where requests are cut, which the bits of a row depend on.
        exact: of `SharedPrefixPlan`. "split" divides long walks, which the last requests of rollouts of very different
            lengths would do one tile after the other; steps that decode then have other bits than training.

    Raises:
        SharedPromptError: transformers is older than 5.17, or so new that what is replaced has other signatures; an
            argument is not as described.
    """
    global _boundary, _exact
    _boundary, _exact = checked_boundary(boundary), checks.choice("exact", exact, ("trainer", "split"))
    try:
        replace_all(_seams())
    except (ImportError, SharedPromptUnsupportedError) as error:
        message = checks.explain("transformers", "5.17 or newer", f"{transformers.__version__}: {error}")
        raise SharedPromptError(message) from error
    for name in NAMES:
        AttentionInterface.register(name, attend)
    patches.install()  # generate_batch then gives a model its attention back, errors or not


def unregister_decode() -> None:
    """Put stock continuous batching back; nothing happens without `register_decode`.

    A manager that a model has kept is dropped: stock attention would not read its block tables.
    """
    if not all(AttentionInterface._global_mapping.pop(name, None) for name in NAMES):
        return
    for owner, name, _ in _seams():
        setattr(owner, name, stock_of(getattr(owner, name)))
    for manager in [*_managers]:
        model: Any = getattr(manager, "model", None)
        if getattr(model, "_cached_continuous_batching_manager", None) is manager:
            model.destroy_cached_continuous_batching_manager()
    _managers.clear()


def _seams() -> list[tuple[Any, str, Make]]:
    """Functions of transformers that are replaced: their owners, names, and what makes the replacement."""
    names = "continuous_api", "initialization", "model_runner", "cache"
    folder = "transformers.generation.continuous_batching"
    api, initialization, runner, cache = (importlib.import_module(f"{folder}.{name}") for name in names)
    seams: list[tuple[Any, str, Callable[..., Any]]] = [
        (api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _switch_attention),
        (api.ContinuousBatchingManager, "add_requests", _add_copies_apart),
        (initialization, "ensure_decode_fast_path_is_available", _offer_tables),
        (initialization, "decide_use_cuda_graphs", _decide_graphs),
        (runner.ModelRunner, "warmup", _skip_warmup),
        (runner.ModelRunner, "compute_batch", _compute_batch),
    ]
    if hasattr(cache.PagedAttentionCache, "allocate_blocks"):  # transformers 5.17
        seams.append((cache.PagedAttentionCache, "search_prefix_match", _match_less))
    return [(owner, name, in_front_of(function)) for owner, name, function in seams]


def _page_size(settings: Any) -> int:
    return int(getattr(settings, "page_size", None) or settings.block_size)


def _switch_attention(stock: Any, manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    before = model.config._attn_implementation
    if before in NAMES:
        return
    check_decodes(model)
    if manager not in _managers and manager.batch_processor is not None:
        expected = "one of after register_decode() (model.destroy_cached_continuous_batching_manager() drops it)"
        raise SharedPromptError("the manager that the model has kept", expected, "one of stock batching")
    _managers.add(manager)
    for config in (model.config, text_config(model.config)):
        config._attn_implementation_internal = NAMES[model.device.type == "cpu"]
    manager._original_attn_impl = before  # which the manager puts back when it stops


def _offer_tables(stock: Any, config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
    """The stock function knows packages of kernels alone, and no CPU."""
    if config._attn_implementation not in NAMES:
        stock(config, cb_config, *args, **kwargs)
        return
    cb_config._attn_implementation = config._attn_implementation  # for `_decide_graphs`
    if (expected := tables_lack(config)) is not None:
        message = checks.explain("model", f"{expected}, to decode over pages", config.model_type)
        warnings.warn(f"{message}: it generates the same, but prompts are read once for each request", stacklevel=3)
        cb_config.max_blocks_per_request = 0
    elif cb_config.max_blocks_per_request != 0 and (size := _page_size(cb_config)) % PAGE_ROWS:
        raise SharedPromptError("page_size", f"a multiple of {PAGE_ROWS}", size)


def _decide_graphs(stock: Any, cb_config: Any, is_attn_mask_needed: bool, cuda_graph_requested: bool) -> None:
    """Steps that prefill differ in size: unless asked for, their graphs would be captured and never replayed."""
    is_open = cb_config.use_cuda_graph is None and not cuda_graph_requested and cb_config.max_blocks_per_request != 0
    stock(cb_config, is_attn_mask_needed=is_attn_mask_needed, cuda_graph_requested=cuda_graph_requested)
    is_on_gpu = getattr(cb_config, "_attn_implementation", None) == NAMES[0]
    if is_open and is_on_gpu and cb_config.use_cuda_graph == (True, True):
        cb_config.use_cuda_graph = (False, True)


def _skip_warmup(stock: Any, runner: Any, model: Any) -> None:
    """Each `generate_batch` would compute steps over the whole cache; the first step of a size captures its graph."""
    if model.config._attn_implementation not in NAMES:
        stock(runner, model)


def _compute_batch(stock: Any, runner: Any, model: Any, batch_data: dict[str, Any]) -> None:
    if model.config._attn_implementation in NAMES:
        if not hasattr(runner, ROLLOUT):
            setattr(runner, ROLLOUT, Rollout(runner.cache, runner.cb_config.max_requests_per_batch))
        batch_data[ROLLOUT] = getattr(runner, ROLLOUT)
        batch_data[ROLLOUT].begin(runner.inputs_and_outputs, batch_data["position_ids"][0])
    stock(runner, model, batch_data)


class _Queued(list[int]):
    """A prompt, in a queue that transformers sorts from the largest to the smallest."""

    place: tuple[int, ...] = ()

    def __lt__(self, other: list[int]) -> bool:
        return isinstance(other, _Queued) and self.place > other.place


def _add_copies_apart(stock: Any, manager: Any, inputs: list[list[int]], *args: Any, **kwargs: Any) -> Any:
    """One request of each of some prompts, then their second ones, and so on.

    Pages can be shared once the step that computes them has been read, one or two steps later: of 16 copies side by
    side four would be computed. Copies wait for no more tokens than four steps compute and half of the cache holds.
    """
    if manager.model.config._attn_implementation not in NAMES:
        return stock(manager, inputs, *args, **kwargs)
    settings = manager.continuous_batching_config
    most = 4 * (settings.max_batch_tokens or 8192)
    if settings.num_blocks:
        most = min(most, settings.num_blocks * _page_size(settings) // 2)
    queued, window, tokens = [*map(_Queued, inputs)], 0, 0
    copies: dict[tuple[int, ...], list[_Queued]] = {}
    for request in queued:
        copies.setdefault(tuple(request), []).append(request)
    for rank, prompt in enumerate(sorted(copies, reverse=True)):
        tokens += len(prompt)
        if tokens > max(most, len(prompt)):
            window, tokens = window + 1, len(prompt)
        for turn, request in enumerate(copies[prompt]):
            request.place = window, turn, rank
    return stock(manager, queued, *args, **kwargs)


def _match_less(stock: Any, cache: Any, request_id: str, prompt_ids: list[int]) -> Any:
    """Never the whole prompt: siblings with an equal first token would then write into one page."""
    return stock(cache, request_id, prompt_ids[: -1 if len(prompt_ids) % cache.block_size == 0 else None])


class Rollout:
    """State that a model's layers share in a rollout; the first of each kind makes it anew, within CUDA graphs."""

    def __init__(self, cache: Any, max_requests: int) -> None:
        self._cache, self._shift, self._exact = cache, SHIFTS[_boundary], _exact
        # transformers 5.17 has groups of layers, later versions an allocator for each kind of them.
        self._groups = getattr(cache, "layer_index_to_group_indices", None)
        if self._groups is None:
            allocators = cache.layer_to_allocator.items()
            windows = {layer: getattr(allocator, "sliding_window", 0) for layer, allocator in allocators}
        else:
            windows = {layer: window if window > 1 else 0 for layer, window in cache.sliding_windows.items()}
        self.windows = dict(sorted(windows.items()))  # 0: none
        self._first = {window: layer for layer, window in reversed(self.windows.items())}
        self._chooses = "kwargs" in inspect.signature(cache.update).parameters  # from 5.19 on, for each layer
        # Where a step's requests are cut. CUDA graphs read the same memory in every step.
        self._cuts = torch.zeros(max_requests, dtype=torch.int32, device=cache.device)
        self._positions = self._rows = self._cuts.long()  # of the step's tokens; rows of the flattened pages
        self._plan: SharedPrefixPlan | None = None
        self._nodes: dict[int, Tensor] = {}  # of a step with several tokens of a request, by window
        self._last: tuple[int, Tensor] | None = None  # layer that decoded, and its new keys

    def begin(self, batch: Any, positions: Tensor) -> None:
        """Note where training cuts the requests of the step that begins, and positions of its tokens."""
        self._positions, stream = positions, batch.compute_stream
        if hasattr(batch, "io_pairs"):  # asynchronous batching
            batch = batch.io_pairs[batch.current_pair].host_io
        states = [request.state for request in batch.requests_in_batch]
        # A request that was evicted begins anew, with what it had generated after its prompt.
        lengths = [state._true_initial_tokens or len(state.initial_tokens) for state in states]
        cuts = [length - self._shift for length in lengths]
        if stream is not None:
            # transformers 5.17 writes a step's inputs on another stream where there are no CUDA
            # graphs: on a busy GPU the step would begin with parts of the last one's.
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            host = torch.tensor(cuts, dtype=torch.int32, pin_memory=self._cuts.is_cuda)
            self._cuts[: len(cuts)].copy_(host, non_blocking=True)

    def fill(self, layer: int, key: Tensor, value: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Keys and values that a layer sees, with its new ones put into the cache; `batch` becomes the layer's."""
        if self._chooses:
            return self._cache.update(key, value, layer, kwargs=batch)
        if isinstance(batch["cu_seq_lens_k"], dict):
            batch["cu_seq_lens_k"] = batch["cu_seq_lens_k"][SLIDING if self.windows[layer] else "full_attention"]
        if batch["block_table"] is not None:
            batch["block_table"] = batch["block_table"][0]  # of the only group
            return key, value
        found = self._cache.update(key, value, layer, read_index=batch["read_index"], write_index=batch["write_index"])
        return found[0].transpose(0, 1)[None], found[1].transpose(0, 1)[None]

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: dict[str, Any], options: Any) -> Tensor:
        """Attention of a step of one token for each request, appended to the pages; without keys it is padding."""
        table, offsets, pages = batch["block_table"], batch["cu_seq_lens_k"], self._pages(layer)
        expected = got = ""
        if isinstance(offsets, dict):  # for each kind of layer, from which caches choose
            expected, got = "keys that it puts into the cache", "those of another layer"
        elif any(new.shape[1:] != held.shape[2:] for new, held in zip((k, v), pages)):
            expected = f"keys and values of {tuple(pages[0].shape[2:])}, as pages have them by the configuration"
            got = f"{tuple(k.shape[1:])} and {tuple(v.shape[1:])}"
        elif self._last and self._last[0] == layer and self._last[1].data_ptr() == k.data_ptr():
            # Differential attention: values of the second call would be written over those of the first.
            expected, got = "one attention over its keys", "two"
        if expected:
            message = checks.explain(f"layer {layer}", f"{expected}, to decode over pages", got)
            raise SharedPromptUnsupportedError(f"{message}; generate without register_decode()")
        self._last = layer, k
        if self._plan is None:
            # Views of later layers begin later in one tensor, and have fewer pages.
            num_pages = min(len(self._pages(other)[0]) for other in self.windows)
            _, page_size, kv_heads, head_dim = pages[0].shape
            self._plan = SharedPrefixPlan(
                len(self._cuts), table.shape[1], num_pages=num_pages, page_size=page_size, num_heads=q.shape[1],
                num_kv_heads=kv_heads, head_dim=head_dim, device=q.device, exact=self._exact,
            )  # fmt: skip
        if layer == self._first[self.windows[layer]]:
            lengths, size = offsets.diff(), pages[0].shape[1]
            self._plan.update(table, lengths, boundaries=self._cuts[: len(table)])
            position = torch.where(lengths > 0, self._positions[: len(table)], 0).long()
            page = table.gather(1, position[:, None] // size)[:, 0].long()
            owner = self._cache.layer_to_allocator[layer] if self._groups is None else self._cache
            self._rows = torch.where(lengths > 0, page * size + position % size, owner.write_trash_index)
        k_pages, v_pages = (held[: self._plan.limits.num_pages] for held in pages)
        for new, held in ((k, k_pages), (v, v_pages)):
            held.view(-1, *held.shape[2:]).index_copy_(0, self._rows, new)
        return shared_prefix_decode(q, k_pages, v_pages, self._plan, **options)

    def _pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer as (pages, page_size, heads, head_dim)."""
        cache = self._cache
        if self._groups is None:
            return cache.layer_to_allocator[layer].get_cache_for_block_table(layer)
        place, shape = self._groups[layer][1], (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        return cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: dict[str, Any], options: Any) -> Tensor:
        """Attention of a step in which requests have any number of tokens, over the keys that their rows see."""
        window, q_offsets = self.windows[layer], batch["cu_seq_lens_q"]
        if layer == self._first[window]:
            self._nodes[window] = split_nodes(q_offsets, batch["cu_seq_lens_k"], self._cuts[: len(q_offsets) - 1])
        q, k, v = checks.inputs(("query", "key", "value"), (q, k, v))
        checks.check_pair_shape(q, "key", k, "value", v)
        checks.check_sinks(options["sinks"], q)
        call = make_options(
            head_dim=q.shape[2], causal=True, mean_keys=1, window_left=options["window_size"][0],
            softmax_scale=options["softmax_scale"], softcap=options["softcap"],
        )  # fmt: skip
        return ops.attend(q, k, v, self._nodes[window], call, sinks=options["sinks"])[0]


@torch.compiler.disable
def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention under transformers' signature, of a step of continuous batching: (1, T, H, d)."""
    rollout, cache = kwargs.pop(ROLLOUT, None), kwargs.pop("cache", None)
    if rollout is None:
        expected = "another outside of continuous batching"
        raise SharedPromptError("attn_implementation", expected, module.config._attn_implementation)
    layer = int(module.layer_idx)
    query, key = query.to(value.dtype), key.to(value.dtype)
    batch = {name: kwargs.pop(name, None) for name in _OF_BATCHES}
    if cache is not None:  # up to transformers 5.23; then models have put keys into their cache before
        key, value = rollout.fill(layer, key, value, batch)
    # The cache knows a window that otherwise only the mask would have.
    window = kwargs.pop("sliding_window", None) or rollout.windows[layer]
    options = dict(softmax_scale=kwargs.pop("scaling", None), window_size=(window - 1, -1))
    options |= dict(softcap=kwargs.pop("softcap", None) or 0.0, sinks=kwargs.pop("s_aux", None))
    if attention_mask is not None or kwargs.pop("dropout", 0.0) or kwargs.pop("is_causal", True) is False:
        expected, got = "causal attention", "a mask, dropout, or attention that is not causal"
        raise SharedPromptError(type(module).__name__, expected, got)
    refuse_unknown(module, kwargs)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    run = rollout.attend if batch["block_table"] is None else rollout.decode
    return run(layer, q, k, v, batch, options)[None], None
