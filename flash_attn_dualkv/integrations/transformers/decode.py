# SPDX-License-Identifier: BSD-3-Clause
"""transformers' continuous batching on decoding over shared prefixes.

    register_decode()  # once; generate_batch of every model of the process then decodes with it
    outputs = model.generate_batch([one for one in prompts for _ in range(16)], generation_config=...)

transformers batches, keeps the pages and shares them. A step in which every request has one token
has block tables: it runs on `shared_prefix_decode`, with one plan for each table. Layers with a
sliding window have a table of a ring, whose rows are all that a token sees. All other steps
run on the kernels of training, over keys that transformers gathers. Both cut a request where
training does, behind its prompt or a token before. CUDA graphs are captured when a step needs one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import count, zip_longest
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

from ... import checks, ops
from ...calls import make_options
from ...checks import CUDA_DTYPES, explain
from ...data.prefix_tree import SHIFTS, Boundary, checked_boundary
from ...decode.attention import shared_prefix_decode
from ...decode.calls import PAGE_ROWS
from ...decode.plan import SharedPrefixPlan
from ...errors import SharedPromptError, SharedPromptUnsupportedError
from ..replacing import replace_once, stock_of
from . import base_class
from .attention import refuse_unknown
from .support import check_supported, is_hybrid, kernels_lack, text_config

# Attention implementations of models on a GPU and on the CPU. For names with "flash" in them
# transformers reserves no memory for masks, and captures CUDA graphs wherever there is a GPU.
NAMES = ("dualkv_flash", "dualkv_paged")
_SLIDING = "sliding_attention"
_ROLLOUT = "shared_prefix_rollout"  # of a runner, and the argument by which layers get it
_PACKAGE = "transformers.generation.continuous_batching"
# Where nobody says how many: transformers decides by the memory left, when requests are queued.
_TOKENS_A_STEP = 8192
_ON_GPU = "dualkv_on_gpu"  # of a configuration: whether its model decodes on this package, and on a GPU
# What the last `register_decode` asked for.
_boundary: Boundary = "replicate"
_exact = "trainer"
# Managers that generate on this package; `persistent_manager` lets a model keep one from call to
# call.
_managers: weakref.WeakSet[Any] = weakref.WeakSet()
# What continuous batching hands to every layer.
_OF_BATCHES = (
    "block_table", "cu_seq_lens_k", "cu_seq_lens_q", "k_cache", "logits_indices", "logits_processor_args",
    "max_length_k", "max_length_q", "max_seqlen_k", "max_seqlen_q", "read_index", "v_cache", "write_index",
)  # fmt: skip


def register_decode(boundary: Boundary = "replicate", *, exact: Literal["trainer", "split"] = "trainer") -> None:
    """Let continuous batching of all models of this process run on this package, prefill and decoding.

    It holds for `generate_batch`, for managers of continuous batching that are made from then on,
    and for TRL's `use_transformers_continuous_batching`, whatever `attn_implementation` a model
    has; the model gets that back afterwards. It needs no `register()`. Models that cannot run on
    it raise when generation starts: hybrids, MLA, and on a GPU what the kernels lack.

    Args:
        boundary: as training packs its samples (`pack_shared_prompts`): with "replicate" the last
            prompt token belongs to the response, with "gather" to the prompt. It decides where
            requests are cut, and so whether the bits of a row are those of training.
        exact: of the plans that decode (`SharedPrefixPlan`). "split" divides long walks, which the
            last requests of rollouts of very different lengths would do one tile after the other;
            steps that decode then have other bits than training.

    Raises:
        SharedPromptError: transformers is older than 5.17; an argument is not as described.
    """
    global _boundary, _exact
    _boundary, _exact = checked_boundary(boundary), checks.choice("exact", exact, ("trainer", "split"))
    for owner, name, make in _seams():
        replace_once(owner, name, make)
    if _ring_class() is not None:
        _ring_class().supports_block_table = True
    for name in NAMES:
        AttentionInterface.register(name, _attend)
    base_class.install()  # generate_batch then gives a model its attention back, errors or not


def unregister_decode() -> None:
    """Put stock continuous batching back; nothing happens without `register_decode`.

    A manager that a model has kept is dropped: stock attention would not read its block tables.
    """
    for name in NAMES:
        if AttentionInterface._global_mapping.pop(name, None) is None:
            return
    for owner, name, _ in _seams():
        setattr(owner, name, stock_of(getattr(owner, name)))
    if _ring_class() is not None:
        _ring_class().supports_block_table = False
    for manager in [*_managers]:
        model: Any = getattr(manager, "model", None)
        if getattr(model, "_cached_continuous_batching_manager", None) is manager:
            model.destroy_cached_continuous_batching_manager()
    _managers.clear()


def _seams() -> list[tuple[Any, str, Callable[[Any], Callable[..., Any]]]]:
    """Functions of transformers that are replaced: their owners, names, and what makes the replacement."""
    try:
        api, initialization, runner, cache = (
            importlib.import_module(f"{_PACKAGE}.{name}")
            for name in ("continuous_api", "initialization", "model_runner", "cache")
        )
    except ImportError as error:
        raise SharedPromptError(explain("transformers", "5.17 or newer", transformers.__version__)) from error
    seams: list[tuple[Any, str, Callable[[Any], Callable[..., Any]]]] = [
        (api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _switching),
        (initialization, "ensure_decode_fast_path_is_available", _offering_tables),
        (initialization, "decide_use_cuda_graphs", _graphs_of_decoding),
        (runner.ModelRunner, "compute_batch", _with_rollout),
        (runner.ModelRunner, "warmup", _on_demand),
        (api.ContinuousBatchingManager, "add_requests", _copies_apart),
    ]
    if ring := _ring_class():
        names = ("fill_block_table", "get_cache_for_block_table")
        seams += [(ring, name, functools.partial(_as_without_window, name)) for name in names]
        seams.append((cache.PagedAttentionCache, "count_new_complete_blocks", _sharing_beside_windows))
    else:
        seams.append((cache.PagedAttentionCache, "search_prefix_match", _leaving_a_page))
    return seams


def _ring_class() -> Any:
    """What keeps the pages of layers with a sliding window; None in transformers 5.17, which has no tables of them."""
    try:
        allocators = importlib.import_module(f"{_PACKAGE}.cache_allocators")
    except ImportError:
        return None
    return allocators.SlidingAttentionCacheAllocator


# --- what is replaced -----------------------------------------------------------------------------


def _switching(stock: Callable[..., None]) -> Callable[..., None]:
    def switch_to_cb_friendly_attn(manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        before = model.config._attn_implementation
        if before in NAMES:
            return
        check_decodes(model)
        _managers.add(manager)
        for config in (model.config, text_config(model.config)):
            config._attn_implementation_internal = NAMES[model.device.type == "cpu"]
        manager._original_attn_impl = before  # which the manager puts back when it stops

    return switch_to_cb_friendly_attn


def _offering_tables(stock: Callable[..., None]) -> Callable[..., None]:
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
        """The stock one knows packages of kernels alone, and no CPU."""
        if config._attn_implementation not in NAMES:
            stock(config, cb_config, *args, **kwargs)
            return
        setattr(cb_config, _ON_GPU, config._attn_implementation == NAMES[0])
        if (expected := _tables_lack(config)) is not None:
            message = explain("model", expected, config.model_type)
            warnings.warn(f"{message}: it generates the same, but prompts are read once for each request", stacklevel=2)
            cb_config.max_blocks_per_request = 0
        elif cb_config.max_blocks_per_request != 0:
            size = getattr(cb_config, "page_size", None) or cb_config.block_size
            if size % PAGE_ROWS:
                raise SharedPromptError(explain("page_size", f"a multiple of {PAGE_ROWS}", size))

    return ensure_decode_fast_path_is_available


def _graphs_of_decoding(stock: Callable[..., None]) -> Callable[..., None]:
    def decide_use_cuda_graphs(cb_config: Any, is_attn_mask_needed: bool, cuda_graph_requested: bool) -> None:
        """Where nobody asks for graphs, and decoding has them, only that does.

        Steps that prefill differ in size: a graph of one is captured and never replayed.
        """
        is_open = (
            cb_config.use_cuda_graph is None and not cuda_graph_requested and cb_config.max_blocks_per_request != 0
        )
        stock(cb_config, is_attn_mask_needed=is_attn_mask_needed, cuda_graph_requested=cuda_graph_requested)
        if is_open and getattr(cb_config, _ON_GPU, False) and cb_config.use_cuda_graph == (True, True):
            cb_config.use_cuda_graph = (False, True)

    return decide_use_cuda_graphs


def _with_rollout(stock: Callable[..., None]) -> Callable[..., None]:
    def compute_batch(runner: Any, model: Any, batch_data: dict[str, Any]) -> None:
        if model.config._attn_implementation in NAMES:
            rollout = getattr(runner, _ROLLOUT, None)
            if rollout is None:
                rollout = Rollout(runner.cache, runner.cb_config.max_requests_per_batch)
                setattr(runner, _ROLLOUT, rollout)
            rollout.begin(runner.inputs_and_outputs, batch_data["position_ids"][0])
            batch_data[_ROLLOUT] = rollout
        stock(runner, model, batch_data)

    return compute_batch


def _on_demand(stock: Callable[..., None]) -> Callable[..., None]:
    def warmup(runner: Any, model: Any) -> None:
        """Each `generate_batch` makes a manager, whose warm-up computes a step over all pages of the cache, twice.

        A graph is captured with the first step of its size anyway: a rollout needs one or two of 16.
        """
        if model.config._attn_implementation not in NAMES:
            stock(runner, model)

    return warmup


class _Queued(list[int]):
    """A prompt, in a queue that transformers sorts from the largest to the smallest."""

    place = 0

    def __lt__(self, other: list[int]) -> bool:
        return isinstance(other, _Queued) and self.place > other.place


def _copies_apart(stock: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def add_requests(manager: Any, inputs: list[list[int]], *args: Any, **kwargs: Any) -> list[str]:
        """One request of each of some prompts, then their second ones, and so on; else as the stock method sorts them.

        Pages can be shared once the step that computes them has been read, one or two steps later. Of 16 copies side by
        side its scheduler, simulated, has four computed, and gives two of them pages of their own to the end. Pages of
        more prompts than the cache holds would be gone before their copies come.
        """
        if manager.model.config._attn_implementation not in NAMES:
            return stock(manager, inputs, *args, **kwargs)
        queued = [*map(_Queued, inputs)]
        copies: dict[tuple[int, ...], list[_Queued]] = {}
        for request in queued:
            copies.setdefault(tuple(request), []).append(request)
        place, tokens, most = count(), 0, _tokens_apart(manager.continuous_batching_config)
        window: list[list[_Queued]] = []
        for prompt in sorted(copies, reverse=True):
            if window and tokens + len(prompt) > most:
                _queue(window, place)
                window, tokens = [], 0
            window.append(copies[prompt])
            tokens += len(prompt)
        _queue(window, place)
        return stock(manager, queued, *args, **kwargs)

    return add_requests


def _queue(prompts: list[list[_Queued]], place: Iterator[int]) -> None:
    """A copy of each prompt, then the second ones, and so on."""
    for turn in zip_longest(*prompts):
        for request in turn:
            if request is not None:
                request.place = next(place)


def _tokens_apart(settings: Any) -> int:
    """How many tokens prompts have whose copies wait for each other.

    As many as four steps compute, and no more than half of the cache.
    """
    computed = 4 * (settings.max_batch_tokens or _TOKENS_A_STEP)
    pages, size = settings.num_blocks, getattr(settings, "page_size", None) or settings.block_size
    return min(computed, pages * size // 2) if pages else computed


def _leaving_a_page(stock: Callable[..., int]) -> Callable[..., int]:
    def search_prefix_match(cache: Any, request_id: str, prompt_ids: list[int]) -> int:
        """Never the whole prompt, as from transformers 5.18 on.

        5.17 then keeps one token to decode, and counts the last page as complete again when that is computed. Meanwhile
        the next step has given the request a page, which takes the hash of that page and its first token: siblings
        with an equal first token wrote into one page, where prompts end with a page.
        """
        return stock(cache, request_id, prompt_ids[: -1 if len(prompt_ids) % cache.block_size == 0 else None])

    return search_prefix_match


def _as_without_window(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The method of layers without a window: the ring's pages are in the order of its rows."""
    return lambda allocator, *args: getattr(super(_ring_class(), allocator), name)(*args)


def _sharing_beside_windows(stock: Callable[..., dict[str, int]]) -> Callable[..., dict[str, int]]:
    def count_new_complete_blocks(cache: Any, *args: Any) -> dict[str, int]:
        """Layers without a window share equal pages, too, where others cannot and prompts are computed anew."""
        if cache.use_prefix_sharing or not cache.allow_block_sharing:
            return stock(cache, *args)
        sharing = {name: one for name, one in cache.cache_allocators.items() if one.use_block_sharing}
        return stock(SimpleNamespace(use_prefix_sharing=True, cache_allocators=sharing), *args)

    return count_new_complete_blocks


# --- which models ---------------------------------------------------------------------------------


def has_windows(config: Any) -> bool:
    """Whether layers of a model have a sliding window, as continuous batching sees it."""
    types = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None if types is None else _SLIDING in types


def _tables_lack(config: Any) -> str | None:
    """What keeps a model from block tables."""
    if getattr(text_config(config), "num_kv_shared_layers", None):
        return "keys of its own in each layer, to decode over pages"
    lacking = _windows_lack(config) if has_windows(config) else None
    return lacking and f"{lacking}, to decode with sliding-window layers"


def _windows_lack(config: Any) -> str | None:
    """What keeps layers with windows from block tables."""
    if _ring_class() is None:
        return "transformers 5.18 or newer"
    return _kernels_lack(config, "cuda" if config._attn_implementation == NAMES[0] else "cpu")


def _kernels_lack(config: Any, device: torch.device | str) -> str | None:
    """What decoding lacks for the model's heads."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    try:
        SharedPrefixPlan(
            1, 1, num_pages=1, page_size=PAGE_ROWS, num_heads=1, num_kv_heads=1, head_dim=head_dim, device=device
        )
    except NotImplementedError as error:
        return str(error)
    return None


def check_decodes(model: Any) -> None:
    """Refuse a model that does not run on this, before anything is generated.

    Raises:
        SharedPromptError: names what is not supported.
    """
    check_supported(model.config)
    text = text_config(model.config)
    expected, got = "attention as the only mixer of tokens, and values as wide as keys", None
    if is_hybrid(model.config):
        got = "a hybrid"
    elif getattr(text, "kv_lora_rank", None):
        got = "multi-head latent attention"
    if got is not None:
        raise SharedPromptUnsupportedError(explain("model", f"{expected}, for decoding", f"{got} ({text.model_type})"))
    if model.device.type == "cpu":
        return
    if model.dtype not in CUDA_DTYPES:
        expected = " or ".join(map(str, CUDA_DTYPES))
        raise SharedPromptUnsupportedError(explain("dtype of the model", f"{expected} on a GPU", model.dtype))
    lacking = kernels_lack(model.config)
    if lacking is None and not has_windows(text):
        lacking = _kernels_lack(text, model.device)
    if lacking is not None:
        raise SharedPromptUnsupportedError(lacking)


# --- attention ------------------------------------------------------------------------------------


class Options(NamedTuple):
    """Options of a layer's attention, as `shared_prefix_decode` takes them; `window` is its `left`, or -1."""

    scale: float | None
    window: int
    softcap: float
    sinks: Tensor | None


class Group(NamedTuple):
    """Layers with one block table: its place among those of a step, the first of the layers, pages that all have."""

    place: int
    first_layer: int
    num_pages: int
    window: int  # rows of a ring of pages, which is all that a token sees; 0: none
    trash: int  # row of the flattened pages that tokens of padding are written to


class _Decoded(NamedTuple):
    """A group's step of one token for each request: its plan, and the row of the flattened pages of each token."""

    plan: SharedPrefixPlan
    rows: Tensor


class Rollout:
    """What the layers of a model share while a manager generates with it.

    The first layer of each group makes what the others use in a step: inside of a CUDA graph, if
    there is one, so that it is made anew in every replay.

    Args:
        cache: the manager's PagedAttentionCache.
        max_requests: the most requests of a step.
    """

    def __init__(self, cache: Any, max_requests: int) -> None:
        self._cache = cache
        # Where a step's requests are cut. CUDA graphs read the same memory in every step.
        self._cuts = torch.zeros(max_requests, dtype=torch.int32, device=cache.device)
        self._positions = self._cuts.long()  # of the step's tokens
        self._groups: dict[int, Group] = {}  # by layer
        self._decoded: dict[int, _Decoded] = {}  # by group
        self._tables: dict[int, Tensor] = {}  # nodes of a step with several tokens of a request, by group
        self._last: tuple[int, Tensor] | None = None  # layer that decoded, and its new keys

    def begin(self, batch: Any, positions: Tensor) -> None:
        """Note where training cuts the requests of the step that begins, and positions of its tokens."""
        self._positions = positions
        stream = batch.compute_stream
        if hasattr(batch, "io_pairs"):  # asynchronous batching
            batch = batch.io_pairs[batch.current_pair].host_io
        states = [one.state for one in batch.requests_in_batch]
        # A request that was evicted begins anew, with what it had generated behind its prompt.
        lengths = [one._true_initial_tokens or len(one.initial_tokens) for one in states]
        cuts = torch.tensor([one - SHIFTS[_boundary] for one in lengths], dtype=torch.int32)
        if self._cuts.is_cuda:
            cuts = cuts.pin_memory()
        if stream is not None:
            # transformers 5.17 writes a step's inputs on another stream where there are no CUDA
            # graphs: on a busy GPU the step would begin with parts of the last one's.
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._cuts[: len(states)].copy_(cuts, non_blocking=True)

    def group_of(self, layer: int) -> Group:
        """The group of a layer."""
        if layer not in self._groups:
            self._groups[layer] = _group(self._cache, layer)
        return self._groups[layer]

    def decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, table: Tensor, offsets: Tensor, options: Options
    ) -> Tensor:  # fmt: skip
        """Attention of a step of one token for each request, which is appended to the pages.

        Args:
            layer: its index.
            q, k, v: (requests, heads, head_dim).
            table: (requests, columns).
            offsets: (requests + 1,), of all keys of each request; a request without is padding.
            options: of the layer.

        Raises:
            SharedPromptUnsupportedError: the layer's keys and values are not what its pages are made for.
        """
        group = self.group_of(layer)
        k_pages, v_pages = (one[: group.num_pages] for one in _pages(self._cache, layer))
        if k.shape[1:] != k_pages.shape[2:] or v.shape[1:] != v_pages.shape[2:]:
            expected = f"keys and values of {tuple(k_pages.shape[2:])}, as pages have them by the configuration"
            raise _unsupported(layer, expected, f"{tuple(k.shape[1:])} and {tuple(v.shape[1:])}")
        if self._last and self._last[0] == layer and self._last[1].data_ptr() == k.data_ptr():
            # Differential attention: values of the second call would be written over those of the
            # first.
            raise _unsupported(layer, "one attention over its keys", "two")
        self._last = layer, k
        if layer == group.first_layer:
            self._decoded[group.place] = self._plan(group, k_pages, q.shape[1], table, offsets)
        plan, rows = self._decoded[group.place]
        for new, pages in ((k, k_pages), (v, v_pages)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, rows, new)
        window = -1 if group.window else options.window
        return shared_prefix_decode(
            q, k_pages, v_pages, plan, softmax_scale=options.scale, window_size=(window, -1),
            softcap=options.softcap, sinks=options.sinks,
        )  # fmt: skip

    def _plan(self, group: Group, pages: Tensor, heads: int, table: Tensor, offsets: Tensor) -> _Decoded:
        (requests, columns), (num_pages, page_size, kv_heads, head_dim) = table.shape, pages.shape
        if group.place in self._decoded:
            plan = self._decoded[group.place].plan
        else:
            plan = SharedPrefixPlan(
                len(self._cuts), columns, num_pages=num_pages, page_size=page_size, num_heads=heads,
                num_kv_heads=kv_heads, head_dim=head_dim, device=pages.device, exact=_exact,
            )  # fmt: skip
        lengths = offsets.diff()
        plan.update(table, lengths, boundaries=None if group.window else self._cuts[:requests])
        position = torch.where(lengths > 0, self._positions[:requests], 0).long()
        if group.window:
            position %= group.window
        page = table.gather(1, position[:, None] // page_size)[:, 0].long()
        return _Decoded(plan, torch.where(lengths > 0, page * page_size + position % page_size, group.trash))

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, options: Options
    ) -> Tensor:  # fmt: skip
        """Attention of a step in which requests have any number of tokens, over gathered keys.

        Args:
            layer: its index.
            q: (tokens, heads, head_dim), the last tokens of each request.
            k, v: (keys, heads, head_dim), all keys of each request, or the last ones, which its
                windows show: where those are cut changes bits alone.
            q_offsets, k_offsets: (requests + 1,).
            options: of the layer.
        """
        group = self.group_of(layer)
        if options.window < 0 and group.window:  # a layer whose mask alone would say it
            options = options._replace(window=group.window - 1)
        if layer == group.first_layer:
            cuts = self._cuts[: len(q_offsets) - 1]
            self._tables[group.place] = cut_sequences(q_offsets, k_offsets, cuts)
        q, k, v = checks.inputs(("query", "key", "value"), (q, k, v))
        checks.check_pair_shape(q, "key", k, "value", v)
        checks.check_sinks(options.sinks, q)
        made = make_options(
            head_dim=q.shape[2], causal=True, mean_keys=1, softmax_scale=options.scale, window_left=options.window,
            softcap=options.softcap,
        )  # fmt: skip
        return ops.attend(q, k, v, self._tables[group.place], made, sinks=options.sinks)[0]


def _unsupported(layer: int, expected: str, got: str) -> SharedPromptUnsupportedError:
    """A layer that cannot decode over pages; stock continuous batching may."""
    message = explain(f"layer {layer}", f"{expected}, to decode over pages", got)
    return SharedPromptUnsupportedError(f"{message}; generate without register_decode()")


def cut_sequences(q_offsets: Tensor, k_offsets: Tensor, cuts: Tensor) -> Tensor:
    """Node table of sequences that are cut in two, on the device: prompt and response, or parts of them.

    Args:
        q_offsets: (N+1,) int32, rows of q of each sequence, which are its last tokens.
        k_offsets: (N+1,) int32, its keys.
        cuts: (N,) int32, how many of them belong to the prompt; all if there are fewer.
    """
    q_begin, k_begin = q_offsets[:-1], k_offsets[:-1]
    queries, keys = q_offsets.diff(), k_offsets.diff()
    cuts = torch.minimum(cuts, keys)
    first = keys - queries  # position of the first query
    above = torch.minimum((cuts - first).clamp(min=0), queries)  # queries in the prompt
    zero, index = torch.zeros_like(cuts), torch.arange(len(cuts), dtype=torch.int32, device=cuts.device)
    end = 2 * index + 2
    root = (q_begin, above, first, k_begin, cuts, zero, zero - 1, end)
    leaf = (q_begin + above, queries - above, first + above, k_begin + cuts, keys - cuts, cuts, 2 * index, end)
    return torch.stack((*root, *leaf), dim=1).view(-1, len(root))


def _is_older(cache: Any) -> bool:
    """Whether a cache is that of transformers 5.17, which may have several groups of one kind of layer."""
    return hasattr(cache, "layer_index_to_group_indices")


def _group(cache: Any, layer: int) -> Group:
    if _is_older(cache):
        place = cache.layer_index_to_group_indices[layer][0]
        layers = [one for one, (other, _) in cache.layer_index_to_group_indices.items() if other == place]
        window = 0 if cache.sliding_windows[layer] == 1 else cache.sliding_windows[layer]
        trash = cache.write_trash_index
    else:
        allocator = cache.layer_to_allocator[layer]
        place, layers = allocator.index, allocator.layer_indices
        window, trash = getattr(allocator, "sliding_window", 0), allocator.write_trash_index
    # Where one tensor has the pages of all layers, views of later layers begin later in it and have
    # fewer.
    num_pages = min(len(_pages(cache, one)[0]) for one in layers)
    return Group(place, min(layers), num_pages, window, trash)


def _pages(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of a layer as (pages, page_size, heads, head_dim)."""
    if _is_older(cache):  # each layer of a group has tensors of its own
        place = cache.layer_index_to_group_indices[layer][1]
        shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        return cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)
    k, v = cache.layer_to_allocator[layer].get_cache_for_block_table(layer)
    return k, v


@torch.compiler.disable
def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention under transformers' signature, of a step of continuous batching: (1, T, H, d)."""
    rollout, cache = kwargs.pop(_ROLLOUT, None), kwargs.pop("cache", None)
    if rollout is None:
        expected, got = "another outside of continuous batching", module.config._attn_implementation  # type: ignore[union-attr]
        raise SharedPromptError(explain("attn_implementation", expected, got))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    query, key = query.to(value.dtype), key.to(value.dtype)
    if cache is not None:  # up to 5.23; then models have put keys into their cache before
        key, value = _filled(cache, key, value, layer, kwargs)
    window, softcap = kwargs.pop("sliding_window", None), kwargs.pop("softcap", None)
    window = -1 if window is None else window - 1
    options = Options(kwargs.pop("scaling", None), window, softcap or 0.0, kwargs.pop("s_aux", None))
    batch = {name: kwargs.pop(name, None) for name in _OF_BATCHES}
    if attention_mask is not None or kwargs.pop("dropout", 0.0) or kwargs.pop("is_causal", True) is False:
        expected, got = "causal attention", "a mask, dropout, or attention that is not causal"
        raise SharedPromptError(explain(type(module).__name__, expected, got))
    refuse_unknown(module, kwargs)
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    table, offsets = batch["block_table"], batch["cu_seq_lens_k"]
    if table is not None:
        if isinstance(offsets, dict):  # for each kind of layer, from which caches choose
            raise _unsupported(layer, "keys that it puts into the cache", "those of another layer")
        return rollout.decode(layer, q, k, v, table, offsets, options)[None], None
    return rollout.attend(layer, q, k, v, batch["cu_seq_lens_q"], offsets, options)[None], None


@functools.cache
def _takes_kwargs(update: Callable[..., Any]) -> bool:
    """Whether caches choose for a layer, as from 5.19 on, or the layer does."""
    return "kwargs" in inspect.signature(update).parameters


def _filled(cache: Any, key: Tensor, value: Tensor, layer: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Keys and values that a layer sees, with its new ones put into the cache; `kwargs` become those of the layer."""
    if _takes_kwargs(type(cache).update):
        filled: tuple[Tensor, Tensor] = cache.update(key, value, layer, kwargs=kwargs)
        return filled
    group, offsets, table = _group(cache, layer), kwargs["cu_seq_lens_k"], kwargs.get("block_table")
    if isinstance(offsets, dict):
        kwargs["cu_seq_lens_k"] = offsets[_SLIDING if group.window else "full_attention"]
    if table is not None:
        kwargs["block_table"] = table[group.place]
        return key, value
    found = cache.update(key, value, layer, read_index=kwargs["read_index"], write_index=kwargs["write_index"])
    key, value = (one.transpose(0, 1)[None] for one in found)
    return key, value
