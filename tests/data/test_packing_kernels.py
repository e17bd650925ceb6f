"""Packing by the compiled module: bit by bit what PyTorch's operators make of the same samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import DEVICE, GPU_MARKS, counted_launches, needs_kernels, poison_free_memory
from samples import Lists, assert_same_batch, samples, tensors
from torch import Tensor

from flash_attn_dualkv import SharedPromptBatch, group_by_prompt, ops, pack_shared_prompts

pytestmark = [*GPU_MARKS, needs_kernels]


def by_operators(pack: Callable[[], SharedPromptBatch]) -> SharedPromptBatch:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "PACKED_BY_KERNELS", set())
        return pack()


options_of_packing = st.fixed_dictionaries(
    {
        "boundary": st.sampled_from(["replicate", "gather"]),
        "drop_last": st.booleans(),
        "max_responses_per_group": st.sampled_from([None, 1, 2]),
        "pad_to_multiple_of": st.sampled_from([None, 8]),
    }
)


@settings(deadline=None, max_examples=200)
@given(samples(), options_of_packing, st.sampled_from([torch.uint8, torch.int32, torch.int64]))
def test_the_kernel_packs_as_operators_do(
    lists: tuple[Lists, Lists], options: dict[str, Any], dtype: torch.dtype
) -> None:
    prompts, responses = ([one.to(DEVICE, dtype) for one in tensors(given)] for given in lists)
    poison_free_memory()
    with counted_launches() as launches:
        batch = pack_shared_prompts(prompts, responses, **options)
    assert launches["dualkv_pack_rows"] == 1
    assert_same_batch(batch, by_operators(lambda: pack_shared_prompts(prompts, responses, **options)))
    assert not any(one._is_view() for one in vars(batch).values() if isinstance(one, Tensor))
    fetched = pack_shared_prompts(*lists, device=DEVICE, **options)
    assert_same_batch(fetched, batch)


@pytest.mark.parametrize("lengths", [(70_000, 3), (3, 200_001), (2, 0)], ids=str)
def test_the_kernel_packs_long_runs(lengths: tuple[int, int]) -> None:
    """Longer than all threads of a run together write at once."""
    tokens = torch.arange(sum(lengths) + 1, device=DEVICE) * 7 % 1000
    prompt, response, other = tokens[: lengths[0]], tokens[lengths[0] :], tokens[:1]
    pack = lambda: pack_shared_prompts([prompt] * 3, [response, other, response], pad_to_multiple_of=4096)  # noqa: E731
    assert_same_batch(pack(), by_operators(pack))


@pytest.mark.parametrize("count", [32, 33, 64, 65, 300])
def test_the_kernel_packs_many_samples(count: int) -> None:
    """More than a launch has room for; prompts that are that before, that come back, and that differ in one token."""
    draw = random.Random(count)
    stems = [torch.randint(0, 50, (length,), device=DEVICE) for length in (1, 40, 40, 2500)]
    prompts: list[Tensor] = []
    for _ in range(count):
        prompts.append(prompts[-1].clone() if prompts and draw.random() < 0.5 else draw.choice(stems).clone())
        if draw.random() < 0.3:
            prompts[-1][draw.randrange(len(prompts[-1]))] += 1
    responses = [torch.randint(0, 50, (draw.choice([0, 1, 7, 1500]),), device=DEVICE) for _ in prompts]
    pack = lambda: pack_shared_prompts(prompts, responses, max_responses_per_group=5)  # noqa: E731
    batch = pack()
    assert 1 < batch.layout.num_groups < count
    assert_same_batch(batch, by_operators(pack))


def test_prompts_that_differ_where_few_tokens_are_looked_at() -> None:
    """The first comparison of prompts reads every eighth token."""
    stem = torch.arange(100, device=DEVICE)
    prompts = []
    for place in (3, 50, 99, 3, 51, 50):
        prompts.append(stem.clone())
        prompts[-1][place] = 7777
    prompts += [stem, stem[:99], stem]
    expected = [[0, 3], [1, 5], [2], [4], [6, 8], [7]]
    assert group_by_prompt(prompts) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "PACKED_BY_KERNELS", set())
        assert group_by_prompt(prompts) == expected


@pytest.mark.parametrize(("order", "visits"), [((0, 0, 1, 1, 2, 2), 1), ((0, 1, 0, 2, 1, 1, 2, 0), 2)], ids=str)
def test_prompts_that_come_back_are_compared_on_the_gpu(order: tuple[int, ...], visits: int) -> None:
    """With the first of the same hash, in a second launch; prompts that stand together need one."""
    stems = [torch.randint(0, 50, (length,), device=DEVICE) for length in (40, 40, 2500)]
    prompts, responses = [stems[index].clone() for index in order], [stems[0][:3]] * len(order)
    with counted_launches() as launches:
        batch = pack_shared_prompts(prompts, responses)
    assert launches["dualkv_join_tokens"] == visits
    assert batch.layout.num_groups == 3
    assert_same_batch(batch, by_operators(lambda: pack_shared_prompts(prompts, responses)))


def test_different_prompts_of_one_hash() -> None:
    """They are fetched, and compared on the host."""
    words, inverse = 1 << 64, lambda factor: pow(factor, -1, 1 << 64)
    of_place, first, second = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

    def hashed(token: int, place: int) -> int:
        value = (token ^ place * of_place % words) * first % words
        return (value ^ value >> 32) * second % words

    def token_of(value: int, place: int) -> int:
        value = value * inverse(second) % words
        return (value ^ value >> 32) * inverse(first) % words ^ place * of_place % words

    wanted = hashed(1, 0) + hashed(2, 1)
    others = ((one, token_of((wanted - hashed(one, 0)) % words, 1)) for one in range(3, 100))
    other = next(pair for pair in others if pair[1] < 1 << 62)
    assert sum(hashed(token, place) for place, token in enumerate(other)) % words == wanted % words
    prompts = [torch.tensor(pair, device=DEVICE) for pair in ((1, 2), other, (1, 2), other, other)]
    with counted_launches() as launches:
        batch = pack_shared_prompts(prompts, [prompts[0]] * 5)
    assert launches["dualkv_join_tokens"] == 2
    assert batch.order == (0, 2, 1, 3, 4)
    assert batch.layout.num_groups == 2
    assert_same_batch(batch, by_operators(lambda: pack_shared_prompts(prompts, [prompts[0]] * 5)))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("boundary", "none"),
        ("boundary", 0),
        ("drop_last", 1),
        ("max_responses_per_group", 0),
        ("max_responses_per_group", True),
        ("pad_to_multiple_of", 0),
        ("pad_to_multiple_of", 2.0),
        ("pad_to_multiple_of", (1 << 30) + 1),
        ("device", "nowhere"),
        ("responses", []),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_as_for_operators(option: str, value: Any) -> None:
    lists = {name: [torch.arange(4, device=DEVICE)] * 2 for name in ("prompts", "responses")}
    call = lambda: pack_shared_prompts(**{**lists, option: value})  # noqa: E731
    with pytest.raises(ValueError, match=option) as ours:
        call()
    with pytest.raises(ValueError, match=option) as theirs:
        by_operators(call)
    assert (str(ours.value), type(ours.value)) == (str(theirs.value), type(theirs.value))


def test_more_responses_than_64_bits_can_count_are_no_limit() -> None:
    prompts = [torch.arange(4, device=DEVICE)] * 2
    unlimited = pack_shared_prompts(prompts, prompts)
    assert_same_batch(pack_shared_prompts(prompts, prompts, max_responses_per_group=1 << 64), unlimited)


def test_what_the_kernel_is_not_given() -> None:
    module = ops.compiled_module()
    tokens = torch.arange(4, device=DEVICE)
    with pytest.raises(ValueError, match="groups: expected each of 2 samples once, got 1"):
        module.pack(tokens, [[0]], [1, 1], [1, 1], 1, False, 1)
    with pytest.raises(ValueError, match="tokens: expected those of all samples, 4, got 3"):
        module.pack(tokens[:3], [[0, 1]], [1, 1], [1, 1], 1, False, 1)
    with pytest.raises(ValueError, match="begins: expected runs of the tokens, got 3"):
        module.equal_runs(tokens.cpu(), [0, 3], [2, 2])
