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

import contextlib
import functools
import importlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import count, zip_longest
from types import SimpleNamespace
from typing import Any, Literal

import torch
import transformers
from transformers import AttentionInterface

from ... import checks
from ...checks import CUDA_DTYPES, explain
from ...data.prefix_tree import Boundary, checked_boundary
from ...decode.calls import PAGE_ROWS
from ...decode.plan import SharedPrefixPlan
from ...errors import SharedPromptError, SharedPromptUnsupportedError
from ..common.patching import Make, replace_all, stock_of
from . import patches
from .admission.support import check_supported, is_hybrid, kernels_lack, text_config
from .rollout import ROLLOUT, SLIDING, Rollout, attend

# Attention implementations of models on a GPU and on the CPU. For names with "flash" in them
# transformers reserves no memory for masks, and captures CUDA graphs wherever there is a GPU.
NAMES = ("dualkv_flash", "dualkv_paged")
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
        SharedPromptError: transformers is older than 5.17, or so new that what is replaced has other signatures; an
            argument is not as described.
    """
    global _boundary, _exact
    _boundary, _exact = checked_boundary(boundary), checks.choice("exact", exact, ("trainer", "split"))
    try:
        replace_all(_seams())
    except (ImportError, SharedPromptUnsupportedError) as error:
        got = f"{transformers.__version__}: {error}"
        raise SharedPromptError(explain("transformers", "5.17 or newer", got)) from error
    if _ring_class() is not None:
        _ring_class().supports_block_table = True
    for name in NAMES:
        AttentionInterface.register(name, attend)
    patches.install()  # generate_batch then gives a model its attention back, errors or not


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


def _seams() -> list[tuple[Any, str, Make]]:
    """Functions of transformers that are replaced: their owners, names, and what makes the replacement."""
    api, initialization, runner, cache = (
        importlib.import_module(f"{_PACKAGE}.{name}")
        for name in ("continuous_api", "initialization", "model_runner", "cache")
    )
    seams: list[tuple[Any, str, Make]] = [
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
        if hasattr(api.ContinuousBatchingManager, "pause"):
            seams.append((api.ContinuousBatchingManager, "pause", _sharing_before_pauses))
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
        if manager not in _managers and manager.batch_processor is not None:
            expected = "one of after register_decode() (model.destroy_cached_continuous_batching_manager() drops it)"
            raise SharedPromptError(explain("the manager that the model has kept", expected, "one of stock batching"))
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
            rollout = getattr(runner, ROLLOUT, None)
            if rollout is None:
                rollout = Rollout(runner.cache, runner.cb_config.max_requests_per_batch, _boundary, _exact)
                setattr(runner, ROLLOUT, rollout)
            rollout.begin(runner.inputs_and_outputs, batch_data["position_ids"][0])
            batch_data[ROLLOUT] = rollout
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
        # Pages that nobody has any more may be of other weights, where a manager is kept over a
        # step of training. Prompts are computed with the new ones, and must not get the old pages.
        cache.evict_cached_blocks()
        sharing = {name: one for name, one in cache.cache_allocators.items() if one.use_block_sharing}
        return stock(SimpleNamespace(use_prefix_sharing=True, cache_allocators=sharing), *args)

    return count_new_complete_blocks


def _sharing_before_pauses(stock: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def pause(manager: Any) -> Iterator[None]:
        """Weights may change meanwhile: requests in flight keep their pages, which later prompts must not get."""
        with stock(manager):
            cache = manager.batch_processor.cache
            cache.allow_block_sharing = cache.use_prefix_sharing
            yield

    return pause


# --- which models ---------------------------------------------------------------------------------


def has_windows(config: Any) -> bool:
    """Whether layers of a model have a sliding window, as continuous batching sees it."""
    types = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None if types is None else SLIDING in types


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
