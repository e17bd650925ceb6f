# SPDX-License-Identifier: BSD-3-Clause
"""Attention of the steps of transformers' continuous batching, for which `register_decode` puts it in place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import checks, ops
from ...calls import make_options
from ...checks import explain
from ...data.prefix_tree import SHIFTS, Boundary
from ...decode.attention import shared_prefix_decode
from ...decode.plan import SharedPrefixPlan
from ...errors import SharedPromptError, SharedPromptUnsupportedError
from .attention import refuse_unknown

SLIDING = "sliding_attention"
ROLLOUT = "shared_prefix_rollout"  # of a runner, and the argument by which layers get it
# What continuous batching hands to every layer.
_OF_BATCHES = (
    "block_table", "cu_seq_lens_k", "cu_seq_lens_q", "k_cache", "logits_indices", "logits_processor_args",
    "max_length_k", "max_length_q", "max_seqlen_k", "max_seqlen_q", "read_index", "v_cache", "write_index",
)  # fmt: skip


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
        boundary, exact: as `register_decode` has them.
    """

    def __init__(self, cache: Any, max_requests: int, boundary: Boundary, exact: str) -> None:
        self._cache, self._shift, self._exact = cache, SHIFTS[boundary], exact
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
        cuts = torch.tensor([one - self._shift for one in lengths], dtype=torch.int32)
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
                num_kv_heads=kv_heads, head_dim=head_dim, device=pages.device, exact=self._exact,
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
def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention under transformers' signature, of a step of continuous batching: (1, T, H, d)."""
    rollout, cache = kwargs.pop(ROLLOUT, None), kwargs.pop("cache", None)
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
        kwargs["cu_seq_lens_k"] = offsets[SLIDING if group.window else "full_attention"]
    if table is not None:
        kwargs["block_table"] = table[group.place]
        return key, value
    found = cache.update(key, value, layer, read_index=kwargs["read_index"], write_index=kwargs["write_index"])
    key, value = (one.transpose(0, 1)[None] for one in found)
    return key, value
