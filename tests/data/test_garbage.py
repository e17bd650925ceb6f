# SPDX-License-Identifier: BSD-3-Clause
"""Whatever is thrown at a public function, it either works or raises an error of this library's own words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import dualkv, tiny_model
from transformers import AutoModelForSequenceClassification

import flash_attn_dualkv as api
from flash_attn_dualkv.contrib import trees

OWN_WORDS = re.compile(r"^[\w .'\"()\[\]-]+: expected .+, got .*", re.DOTALL)
PROMPTS, RESPONSES = [[5, 6, 7], [5, 6, 7], [8]], [[1, 2], [3], [4, 5, 6]]
BATCH = api.pack_shared_prompts(PROMPTS, RESPONSES)
TOKENS = BATCH.layout.num_tokens
IDS = torch.tensor([[5, 6, 7, 1], [5, 6, 7, 2], [0, 8, 9, 3]])
MODEL = tiny_model("llama")
CLASSIFIER = AutoModelForSequenceClassification.from_config(MODEL.config, attn_implementation="dualkv").eval()
TREE = api.group_by_prefix(PROMPTS, min_shared=1)
IMAGES = {"pixel_values": [torch.ones(2, 4), torch.ones(2, 4), None]}
TREE_BATCH = api.pack_prefix_tree(PROMPTS, min_shared=1)


def rows(count: int, heads: int = 2) -> torch.Tensor:
    return torch.randn(count, heads, 8)


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)


def ragged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(one) for one in ([5, 6, 1], [5, 6])], layout=torch.jagged)


# Every public function with arguments that it takes; what a call gives does not matter here.
LENS = dict(prompt_lens=[3, 3, 1], response_lens=[2, 1, 3])
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "flash_attn_dualkv_varlen_func": (
        api.flash_attn_dualkv_varlen_func,
        dict(
            q=rows(7), k_context=rows(4), v_context=rows(4), k_decoded=rows(3), v_decoded=rows(3),
            cu_seqlens_q=offsets(4, 3), cu_seqlens_k_decoded=offsets(0, 3), max_seqlen_q=4, context_seqlen=4,
            max_seqlen_k_decoded=3, softmax_scale=1.0, causal=True, cu_seqlens_context=offsets(4),
            cu_seqs_per_context=offsets(2), window_size=(3, 0), softcap=2.0, sinks=torch.zeros(2), deterministic=False,
            return_lse=True,
        ),
    ),
    "flash_attn_varlen_func": (
        api.flash_attn_varlen_func,
        dict(
            q=rows(7), k=rows(7), v=rows(7), cu_seqlens_q=offsets(4, 3), cu_seqlens_k=offsets(4, 3), max_seqlen_q=4,
            max_seqlen_k=4, dropout_p=0.0, softmax_scale=1.0, causal=True, window_size=(-1, -1), softcap=0.0,
            alibi_slopes=None, deterministic=False, return_attn_probs=True, block_table=None,
        ),
    ),
    "flash_attn_tree_varlen_func": (
        api.flash_attn_tree_varlen_func,
        dict(
            q=rows(7), k=rows(7), v=rows(7), cu_seqlens=offsets(4, 3), parents=torch.tensor([-1, 0]).int(),
            softmax_scale=1.0, window_size=(3, 0), softcap=2.0, sinks=torch.zeros(2), deterministic=False,
            return_lse=True, mean_keys=3,
        ),
    ),
    "shared_prompt_attention": (
        api.shared_prompt_attention,
        dict(
            q=rows(TOKENS), k=rows(TOKENS), v=rows(TOKENS), layout=BATCH.layout, position_ids=BATCH.position_ids,
            softmax_scale=1.0, sliding_window=3, softcap=2.0, sinks=torch.zeros(2), backend="auto", deterministic=False,
        ),
    ),
    "pack_shared_prompts": (
        api.pack_shared_prompts,
        dict(
            prompts=PROMPTS, responses=RESPONSES, group_ids=[0, 0, 1], boundary="gather",
            pad_token_id=99, pad_to_multiple_of=4, device="cpu",
            row_values={"height": [torch.arange(len(p) + len(r)) for p, r in zip(PROMPTS, RESPONSES)]},
            group_values={"uid": ["a", "a", "b"]}, images=IMAGES,
        ),
    ),
    "pack_prefix_tree": (
        api.pack_prefix_tree,
        dict(
            sequences=PROMPTS, loss_mask=[[0, 1, 1], [0, 0, 1], [0]], boundary="gather", min_shared=1,
            borders=None, group_ids=[0, 0, 1], pad_token_id=99, pad_to_multiple_of=4, device="cpu", tree=None,
            chosen=None, row_values=None, group_values={"uid": ["a", "a", "b"]},
        ),
    ),
    "pack_prefix_tree of a tree": (
        partial(api.pack_prefix_tree, PROMPTS), dict(tree=TREE, chosen=[2, 0], group_ids=[0, 0, 1]),
    ),
    "pack_prefix_tree with borders": (
        partial(api.pack_prefix_tree, PROMPTS), dict(boundary="gather", borders=[[1], [1], []], group_ids=[0, 0, 1]),
    ),
    "group_by_prefix": (
        api.group_by_prefix,
        dict(sequences=PROMPTS, boundary="gather", min_shared=1, group_ids=[0, 0, 1]),
    ),
    "split_by_token_budget of a tree": (api.split_by_token_budget, dict(groups=TREE, max_tokens=9, dp_group=None)),
    "plan_parts": (
        api.plan_parts, dict(tree=TREE, max_tokens=99, kept=0.5, held=False, levels=2, tile=4),
    ),
    "balance of a tree": (api.balance, dict(groups=TREE, num_ranks=3, token_cost=0.0, equal_counts=True)),
    "pack_padded": (
        api.pack_padded,
        dict(
            input_ids=IDS, attention_mask=(IDS > 0).long(), prompt_length=[3, 3, 1], group_ids=[0, 0, 1],
            row_values={"height": IDS[None]}, group_values={"uid": ["a", "a", "b"]}, images=IMAGES,
        ),
    ),
    "pack_jagged": (
        api.pack_jagged,
        dict(
            input_ids=ragged(), prompt_lens=[2, 2], group_ids=[0, 0], row_values={"height": ragged()},
            group_values={"uid": ["a", "a"]}, images={"pixel_values": [torch.ones(2, 4)] * 2},
        ),
    ),
    "group_by_prompt": (api.group_by_prompt, dict(prompts=PROMPTS, group_ids=[0, 0, 1], images=IMAGES)),
    "split_by_token_budget": (
        api.split_by_token_budget, dict(groups=[[0, 1], [2]], **LENS, max_tokens=9, dp_group=None),
    ),
    "balance": (api.balance, dict(groups=[[0, 1], [2]], **LENS, num_ranks=3, token_cost=0.0, equal_counts=False)),
    "unpack_logprobs": (
        api.unpack_logprobs, dict(values=torch.zeros(6), batch=BATCH, width=5, fill=0.0, per_row=False),
    ),
    "unpack_logprobs of a tree": (
        api.unpack_logprobs, dict(values=torch.zeros(4), batch=TREE_BATCH, width=5, fill=0.0, per_row=False),
    ),
    "unpack_to_jagged": (api.unpack_to_jagged, dict(values=torch.zeros(6), batch=BATCH, per_row=False)),
    "SharedPromptLayout.from_tree": (
        api.SharedPromptLayout.from_tree, dict(node_lens=[3, 0, 4], parents=[-1, 0, 0], pad=2, device="cpu"),
    ),
    "SharedPromptLayout.to": (BATCH.layout.to, dict(device="cpu")),
    "PackedBatch.to": (BATCH.to, dict(device="cpu")),
    "flash_composed_forest_attention_fused": (
        trees.flash_composed_forest_attention_fused,
        dict(
            q=rows(7), k=rows(7), v=rows(7), node_start=[3, 0], node_len=[4, 3], node_parent=[1, -1], scale=1.0,
        ),
    ),
    "tree_attention": (
        partial(trees.tree_attention, kv_indices=None, kv_offsets=None, q_indices=None, q_offsets=None),
        dict(
            query=torch.randn(1, 2, 3, 8), key=torch.randn(1, 2, 3, 8), value=torch.randn(1, 2, 3, 8),
            packed_mask=torch.tensor([[[1], [3], [7]]]), sm_scale=1.0,
        ),
    ),
    "prefix_tree": (trees.prefix_tree, dict(node_lengths=[1, 2], sample_paths=[[0, 1]])),
    "shared_prompt_forward": (
        dualkv.shared_prompt_forward,
        dict(
            model=MODEL, batch=BATCH, layout=None, temperature=1.0, with_entropy=False, self_check=True,
            drop_unread=True, share_lora_dropout=False,
        ),
    ),
    "shared_prompt_backward": (
        torch.enable_grad()(
            lambda model, batch, max_tokens, keep, temperature, with_entropy, group, self_check: (
                dualkv.shared_prompt_backward(
                    model, batch, lambda part: part.logps.sum(), max_tokens=max_tokens, keep=keep,
                    temperature=temperature, with_entropy=with_entropy, group=group, self_check=self_check,
                )
            )
        ),
        dict(
            model=MODEL, batch=BATCH, max_tokens=99, keep="auto", temperature=1.0, with_entropy=False, group=None,
            self_check=True,
        ),
    ),
    "shared_prompt_logits": (
        lambda model, batch, rows, self_check, drop_unread, share_lora_dropout: dualkv.shared_prompt_logits(
            model, batch, rows, lambda logits, at: (logits.argmax(-1),), self_check=self_check,
            drop_unread=drop_unread, share_lora_dropout=share_lora_dropout,
        ),
        dict(
            model=MODEL, batch=BATCH, rows=BATCH.token_index, self_check=True, drop_unread=True,
            share_lora_dropout=False,
        ),
    ),
    "shared_prompt_values": (
        dualkv.shared_prompt_values,
        dict(model=CLASSIFIER, batch=TREE_BATCH, rows=None, self_check=True, share_lora_dropout=False),
    ),
    "row_inputs": (dualkv.row_inputs, dict(model=MODEL, batch=BATCH, layout=None)),
    "install_layout_hook": (
        lambda model, self_check, share_lora_dropout: dualkv.install_layout_hook(
            model, self_check=self_check, share_lora_dropout=share_lora_dropout
        ).remove(),
        dict(model=MODEL, self_check=True, share_lora_dropout=False),
    ),
    "check_supported": (dualkv.check_supported, dict(config=MODEL.config)),
    "register": (dualkv.register, dict(name="dualkv", fallback="auto", backend="auto")),
    "wrap": (dualkv.wrap, dict(names=["sdpa"], backend="auto")),
}  # fmt: skip


class Odd:
    """No argument of anything."""


JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**70, -(2**70), 0.5, 2.0, float("nan"), float("inf"), 1j, "", "no", "gpu",
    "cuda", "cuda:99", "meta", b"ab", (), [], [[]], [None], [[1], [2], [3]], [0, 0, 0], [1.5, 2, 3], [-1, 2, 3],
    [[1], [[2]], [3]], [[1], [2.5], [3]], [["a"], [1], [2]], [[1], [2**70], [3]], [[1], None, [3]], [[-5], [1], [2]],
    [[True], [1], [2]], {}, {0: [1], 1: [2], 2: [3]}, {1, 2, 3}, range(3), "abc", Odd(), Odd, len, iter([1, 2, 3]),
    torch.float16, torch.device("cpu"), torch.tensor(3), torch.tensor(2.5), torch.zeros(0), torch.zeros(6),
    torch.ones(3),
    torch.ones(3, dtype=torch.long), torch.tensor([3, 3, 1]), torch.tensor([9, 9, 9]), torch.tensor([-1, 0, 2]),
    torch.ones(3, dtype=torch.bool), torch.ones(3, 4, dtype=torch.long), torch.ones(3, 4, dtype=torch.int32),
    torch.ones(3, 4, dtype=torch.bool), torch.ones(3, 4), torch.full((3, 4), -2), torch.ones(7, 2, 8, dtype=torch.long),
    rows(7).to("meta"), rows(7).half(), rows(7).bfloat16(), rows(TOKENS, 3), rows(TOKENS).double(), rows(7)[..., ::2],
    rows(7).to_sparse(), torch.ones(6, dtype=torch.complex64), torch.ones(6, device="meta"),
    torch.ones(3, dtype=torch.long, device="meta"), torch.eye(4).long().to_sparse(), ragged(), ragged().float(),
    torch.tensor([1, 2, 3], dtype=torch.uint16), offsets(4), offsets(4, 3), offsets(9, 9), -offsets(1, 2),
    offsets(4, 3).long(), offsets(1, 1, 1, 1)[::2], np.array([3, 3, 1]), np.array([0.5, 1, 2]),
    np.array(["a", "b", "c"]),
    np.float32(1.0), np.int64(2), np.bool_(True), np.zeros((3, 4)), np.array(3), BATCH, BATCH.layout, MODEL,
    MODEL.config,
    torch.nn.Linear(2, 2), api.PackedBatch, api.SharedPromptLayout,
]  # fmt: skip


def check(function: Callable[..., Any], given_arguments: dict[str, Any]) -> None:
    """An error must name an argument, what was expected and what was got."""
    try:
        with torch.no_grad():
            function(**given_arguments)
    except (ValueError, TypeError, NotImplementedError) as error:
        if not OWN_WORDS.match(str(error)):
            pytest.fail(f"{type(error).__name__}: {error}")


PARAMETERS = [
    pytest.param(name, parameter, id=f"{name}-{parameter}") for name, (_, valid) in CALLS.items() for parameter in valid
]


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_one_argument_is_garbage(name: str, parameter: str, restored_registry: None) -> None:
    function, valid = CALLS[name]
    function(**valid)
    for junk in JUNK:
        check(function, {**valid, parameter: junk})


# Pieces of garbage, alone or in lists that may themselves lie in lists. One strategy, because every
# new one is slow: it describes itself with all pieces.
GARBAGE = st.recursive(st.sampled_from(JUNK), lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", CALLS)
def test_several_arguments_are_garbage(name: str, data: st.DataObject, restored_registry: None) -> None:
    function, valid = CALLS[name]
    chosen = data.draw(st.sets(st.sampled_from(list(valid)), min_size=1))
    check(function, {**valid, **{parameter: data.draw(GARBAGE) for parameter in sorted(chosen)}})


def test_every_public_function_is_here() -> None:
    functions = {name for name in api.__all__ if inspect.isfunction(getattr(api, name))}
    functions |= {name for name in dualkv.__all__ if inspect.isfunction(getattr(dualkv, name))}
    # tests/transformers/test_refused.py and test_decode.py, tests/kernels/test_plan.py,
    # tests/decode/test_arguments.py
    elsewhere = {"expect_shared_prompt", "explain_plan", "append_kv", "flash_attn_with_kvcache", "shared_prefix_decode"}
    elsewhere |= {"register_decode", "unregister_decode"}
    assert functions - elsewhere - {"build_info"} <= set(CALLS)
    for name, (function, valid) in CALLS.items():
        if name in functions:
            optional = {"boundary", "max_responses_per_group", "pad_token_id", "pad_to_multiple_of", "device"}
            assert set(valid) | optional >= set(inspect.signature(getattr(api, name, function)).parameters) - {"model"}
