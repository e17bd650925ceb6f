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
from legal_calls import grouped, plain_arguments, shared_arguments, tree_arguments
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


# Every public function with arguments that it takes, beside those that have a default; what a call
# gives does not matter here.
LENS = dict(prompt_lens=[3, 3, 1], response_lens=[2, 1, 3])
OF_GROUPS = dict(group_ids=[0, 0, 1], group_values={"uid": ["a", "a", "b"]})
OPTIONS = dict(window_size=(3, 0), softcap=2.0, sinks=torch.zeros(4), return_lse=True)
GIVEN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "flash_attn_dualkv_varlen_func": (
        api.flash_attn_dualkv_varlen_func, shared_arguments() | grouped()({}) | dict(OPTIONS, causal=True),
    ),
    "flash_attn_varlen_func": (api.flash_attn_varlen_func, plain_arguments() | dict(return_attn_probs=True)),
    "flash_attn_tree_varlen_func": (api.flash_attn_tree_varlen_func, tree_arguments() | OPTIONS | dict(mean_keys=3)),
    "shared_prompt_attention": (
        api.shared_prompt_attention, dict(q=rows(TOKENS), k=rows(TOKENS), v=rows(TOKENS), layout=BATCH.layout),
    ),
    "pack_shared_prompts": (
        api.pack_shared_prompts,
        dict(
            OF_GROUPS, prompts=PROMPTS, responses=RESPONSES, pad_token_id=99, images=IMAGES,
            row_values={"height": [torch.arange(len(p) + len(r)) for p, r in zip(PROMPTS, RESPONSES)]},
        ),
    ),
    "pack_prefix_tree": (
        api.pack_prefix_tree,
        dict(OF_GROUPS, sequences=PROMPTS, loss_mask=[[0, 1, 1], [0, 0, 1], [0]], min_shared=1, pad_token_id=99),
    ),
    "pack_prefix_tree of a tree": (
        partial(api.pack_prefix_tree, PROMPTS), dict(tree=TREE, chosen=[2, 0], group_ids=[0, 0, 1]),
    ),
    "pack_prefix_tree with borders": (
        partial(api.pack_prefix_tree, PROMPTS), dict(boundary="gather", borders=[[1], [1], []], group_ids=[0, 0, 1]),
    ),
    "group_by_prefix": (api.group_by_prefix, dict(sequences=PROMPTS, min_shared=1, group_ids=[0, 0, 1])),
    "split_by_token_budget of a tree": (api.split_by_token_budget, dict(groups=TREE, max_tokens=9)),
    "plan_parts": (api.plan_parts, dict(tree=TREE, max_tokens=99)),
    "balance of a tree": (api.balance, dict(groups=TREE, num_ranks=3, equal_counts=True)),
    "pack_padded": (
        api.pack_padded,
        dict(
            OF_GROUPS, input_ids=IDS, attention_mask=(IDS > 0).long(), prompt_length=[3, 3, 1], images=IMAGES,
            row_values={"height": IDS[None]},
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
    "split_by_token_budget": (api.split_by_token_budget, dict(LENS, groups=[[0, 1], [2]], max_tokens=9)),
    "balance": (api.balance, dict(LENS, groups=[[0, 1], [2]], num_ranks=3)),
    "unpack_logprobs": (api.unpack_logprobs, dict(values=torch.zeros(6), batch=BATCH)),
    "unpack_logprobs of a tree": (api.unpack_logprobs, dict(values=torch.zeros(4), batch=TREE_BATCH, per_row=False)),
    "unpack_to_jagged": (api.unpack_to_jagged, dict(values=torch.zeros(6), batch=BATCH)),
    "SharedPromptLayout.from_tree": (
        api.SharedPromptLayout.from_tree, dict(node_lens=[3, 0, 4], parents=[-1, 0, 0]),
    ),
    "SharedPromptLayout.to": (BATCH.layout.to, dict(device="cpu")),
    "PackedBatch.to": (BATCH.to, dict(device="cpu")),
    "flash_composed_forest_attention_fused": (
        trees.flash_composed_forest_attention_fused,
        dict(q=rows(7), k=rows(7), v=rows(7), node_start=[3, 0], node_len=[4, 3], node_parent=[1, -1]),
    ),
    "tree_attention": (
        partial(trees.tree_attention, kv_indices=None, kv_offsets=None, q_indices=None, q_offsets=None),
        dict.fromkeys(("query", "key", "value"), torch.randn(1, 2, 3, 8))
        | dict(packed_mask=torch.tensor([[[1], [3], [7]]])),
    ),
    "prefix_tree": (trees.prefix_tree, dict(node_lengths=[1, 2], sample_paths=[[0, 1]])),
    "shared_prompt_forward": (dualkv.shared_prompt_forward, dict(model=MODEL, batch=BATCH)),
    "shared_prompt_backward": (
        torch.enable_grad()(partial(dualkv.shared_prompt_backward, loss_of=lambda part: part.logps.sum())),
        dict(model=MODEL, batch=BATCH, max_tokens=99),
    ),
    "shared_prompt_logits": (
        partial(dualkv.shared_prompt_logits, reduce=lambda logits, at: (logits.argmax(-1),)),
        dict(model=MODEL, batch=BATCH, rows=BATCH.token_index),
    ),
    "shared_prompt_values": (dualkv.shared_prompt_values, dict(model=CLASSIFIER, batch=TREE_BATCH)),
    "row_inputs": (dualkv.row_inputs, dict(model=MODEL, batch=BATCH)),
    "install_layout_hook": (
        lambda **given: dualkv.install_layout_hook(**given).remove(),
        dict(model=MODEL, self_check=True, share_lora_dropout=False),
    ),
    "check_supported": (dualkv.check_supported, dict(config=MODEL.config)),
    "register": (dualkv.register, {}),
    "wrap": (dualkv.wrap, dict(names=["sdpa"])),
}  # fmt: skip
CONSTANT = {"kv_indices", "kv_offsets", "q_indices", "q_offsets", "reduce", "loss_of", "backward", "no_sync"}


def with_defaults(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, whatever its signature has besides them."""
    parameters = inspect.signature(function).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
    return {**{name: one for name, one in defaults.items() if name not in CONSTANT}, **given}


CALLS = {name: (function, with_defaults(function, given)) for name, (function, given) in GIVEN.items()}


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
