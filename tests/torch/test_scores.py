# SPDX-License-Identifier: BSD-3-Clause
"""Scores of tokens from any LM head, chunk by chunk: values, gradients and how accurate their sums are."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

from flash_attn_dualkv import scores as lm_head
from flash_attn_dualkv.errors import SharedPromptLayoutError
from flash_attn_dualkv.scores import score_in_chunks


def scores_of(logits, targets, temperature=1.0):
    """What `score_in_chunks` computes, written out."""
    logps = (logits / temperature).log_softmax(-1)
    return logps.gather(-1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(-1)


check = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def problem(rows=11, width=6, columns=9, dtype=torch.float64):
    torch.manual_seed(0)
    head = nn.Linear(width, columns, dtype=dtype)
    return head, torch.randn(rows, width, dtype=dtype, requires_grad=True), torch.randint(columns, (rows,))


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 11, 100])
def test_scores_and_gradients(rows, with_entropy):
    head, hidden, targets = problem()
    options = dict(rows=rows, temperature=0.7, with_entropy=with_entropy)
    weights = torch.randn(2, len(targets), dtype=torch.float64)

    def outcome(scores):
        used = zip(scores, weights) if with_entropy else zip(scores[:1], weights)
        loss = sum((one * weight).sum() for one, weight in used)
        return [*scores[: 1 + with_entropy], *torch.autograd.grad(loss, (hidden, head.weight, head.bias))]

    got = outcome(score_in_chunks(head, hidden, targets, **options))
    expected = outcome(scores_of(head(hidden), targets, temperature=0.7))
    check(got, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype, temperature):
    """Logits, logits / temperature and log-probabilities are rounded; gradients are those of rounded logits."""
    head, hidden, targets = problem(columns=300, dtype=dtype)
    options = dict(rows=4, temperature=temperature, rounding=torch.bfloat16, with_entropy=True)
    with torch.autocast("cpu", enabled=dtype == torch.float32):
        logps, entropy = score_in_chunks(head, hidden, targets, **options)
        rounded = (head(hidden).bfloat16().detach().float() / temperature).bfloat16().double().requires_grad_()
    expected, expected_entropy = scores_of(rounded, targets)
    wanted = rounded.bfloat16().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert logps.dtype == torch.float32 and torch.equal(logps, wanted.float())
    torch.testing.assert_close(entropy, expected_entropy.float(), rtol=1e-4, atol=1e-4)
    (d_logits,) = torch.autograd.grad((expected + 0.3 * expected_entropy).sum(), rounded)
    (got,) = torch.autograd.grad((logps + 0.3 * entropy).sum(), hidden)
    torch.testing.assert_close(got.double(), d_logits / temperature @ head.weight.double(), rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match="rounding.*vocabulary is divided"):
        score_in_chunks(head, hidden, targets, **options, group=object())


@pytest.mark.parametrize("chunks", [2, 32, 128])
def test_sums_over_chunks_are_as_accurate_as_one_product(chunks):
    """In bf16. Added up in bf16, 128 chunks have three times the error."""
    rows, width, columns = 4096, 64, 512
    head, hidden, targets = problem(rows, width, columns, torch.bfloat16)
    weights = torch.randn(rows, dtype=torch.float64) / rows

    def gradient(chunk):
        logps, _ = score_in_chunks(head, hidden, targets, rows=chunk)
        return torch.autograd.grad((logps * weights).sum(), head.weight)[0].double()

    with torch.no_grad():
        exact = copy.deepcopy(head).double()
    logps, _ = scores_of(exact(hidden.detach().double()), targets)
    (expected,) = torch.autograd.grad((logps * weights).sum(), exact.weight)
    whole, got = ((gradient(one) - expected).norm().item() for one in (rows, rows // chunks))
    assert got <= 1.3 * whole


def test_no_rows():
    """Every parameter has a gradient all the same: processes that train together wait for it."""
    head, hidden, targets = problem(rows=0)
    logps, entropy = score_in_chunks(head, hidden, targets, rows=4, with_entropy=True)
    assert logps.shape == entropy.shape == (0,)
    for gradient in torch.autograd.grad(logps.sum(), (hidden, head.weight, head.bias)):
        assert not gradient.any()


def test_masked_logits():
    """A logit of -inf has probability 0 and no gradient."""
    _, hidden, targets = problem(columns=6)
    mask = torch.zeros(6, dtype=torch.float64)
    mask[5] = -torch.inf
    targets = targets.clamp(max=4)
    logps, entropy = score_in_chunks(lambda h: h + mask, hidden, targets, rows=4, with_entropy=True)
    (got,) = torch.autograd.grad(logps.sum() + entropy.sum(), hidden)
    (expected,) = torch.autograd.grad(sum(one.sum() for one in scores_of(hidden[:, :5], targets)), hidden)
    torch.testing.assert_close(got, expected)


class Threads:
    """A stand-in for torch.distributed whose ranks are threads."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, size):
        self.barrier, self.values, self.own = threading.Barrier(size), [None] * size, threading.local()

    def get_rank(self, group):
        return self.own.rank

    def get_world_size(self, group):
        return len(self.values)

    def all_reduce(self, tensor, operation, group):
        self.values[self.own.rank] = tensor.clone()
        self.barrier.wait(60)
        together = torch.stack(self.values)
        tensor.copy_(together.amax(0) if operation == self.ReduceOp.MAX else together.sum(0))
        self.barrier.wait(60)

    def run(self, function):
        def of_rank(rank):
            self.own.rank = rank
            try:
                return function(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.values)) as pool:
            return [*pool.map(of_rank, range(len(self.values)))]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_vocabulary_in_parts(with_entropy, monkeypatch):
    """As the whole one, with logits that are masked in a part and in all of another."""
    head, hidden, targets = problem(columns=12)
    mask = torch.zeros(12, dtype=torch.float64)
    mask[1] = mask[4:8] = -torch.inf
    targets = torch.where(torch.isfinite(mask[targets]), targets, 11)
    weights = torch.randn(2, len(targets), dtype=torch.float64)
    options = dict(rows=4, temperature=0.7, with_entropy=with_entropy)

    def outcome(columns, **more):
        weight, bias = (one[columns].detach().requires_grad_() for one in (head.weight, head.bias))
        own = hidden.detach().requires_grad_()

        def part(h):
            return nn.functional.linear(h, weight, bias) + mask[columns]

        scores = score_in_chunks(part, own, targets, **options, **more)
        loss = sum((one * of_rows).sum() for one, of_rows in zip(scores[: 1 + with_entropy], weights))
        return scores, torch.autograd.grad(loss, (own, weight, bias))

    expected, (d_hidden, d_weight, d_bias) = outcome(slice(None))
    threads = Threads(3)
    monkeypatch.setattr(lm_head, "dist", threads)
    with pytest.raises(SharedPromptLayoutError, match="batch: expected scored token ids below 9, .*, got 11"):
        threads.run(lambda rank: outcome(slice(3 * rank, 3 * rank + 3), group="a group", max_target=11))
    threads.barrier.reset()
    parts = threads.run(lambda rank: outcome(slice(4 * rank, 4 * rank + 4), group="a group", max_target=99))
    for scores, _ in parts:
        check(scores, expected)
    of_hidden, of_weight, of_bias = zip(*(gradients for _, gradients in parts))
    check([sum(of_hidden), torch.cat(of_weight), torch.cat(of_bias)], [d_hidden, d_weight, d_bias])


def test_some_gradients_only():
    head, hidden, targets = problem()

    def gradients_of(*leaves):
        logps, _ = score_in_chunks(head, hidden, targets, rows=4)
        return torch.autograd.grad(logps.sum(), leaves)

    everything = gradients_of(hidden, head.weight, head.bias)
    for index, leaf in enumerate((hidden, head.weight, head.bias)):
        torch.testing.assert_close(gradients_of(leaf)[0], everything[index])
    head.weight.requires_grad_(False)
    hidden.requires_grad_(False)
    torch.testing.assert_close(gradients_of(head.bias)[0], everything[2])
    head.bias.requires_grad_(False)
    logps, _ = score_in_chunks(head, hidden, targets, rows=4)
    assert not logps.requires_grad


def test_parameters_wherever_the_head_takes_them_from():
    """Closures, views and parametrisations, not only the parameters of a module; saved tensors may be moved."""
    _, hidden, targets = problem()
    flat = torch.randn(6 * 9 + 9, dtype=torch.float64, requires_grad=True)
    views = flat[:54].view(9, 6), flat[54:]  # non-leaves that outlive a chunk, as a sharded model has them

    def head(h):
        return nn.functional.linear(h, views[0], views[1].tanh())

    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda one: one.clone()):
        logps, _ = score_in_chunks(head, hidden, targets, rows=4)
    got = torch.autograd.grad(logps.sum(), (flat, hidden), retain_graph=True)
    again = torch.autograd.grad(logps.sum(), (flat, hidden))
    expected = torch.autograd.grad(scores_of(head(hidden), targets)[0].sum(), (flat, hidden))
    torch.testing.assert_close(got, expected)
    assert all(map(torch.equal, got, again))


def test_a_head_that_changes_is_an_error():
    """Its gradient would be lost."""
    head, hidden, targets = problem()
    heads = [head]
    logps, _ = score_in_chunks(lambda h: heads[0](h), hidden, targets, rows=4)
    heads[0] = copy.deepcopy(head)
    with pytest.raises(RuntimeError, match="parameters of the LM head: expected the same in forward and backward"):
        logps.sum().backward()


@pytest.mark.parametrize("names", [["bias"], ["weight", "bias"]])
def test_a_parameter_that_is_frozen_in_between_is_an_error(names):
    head, hidden, targets = problem()
    logps, _ = score_in_chunks(head, hidden.detach(), targets, rows=4)
    for name in names:
        getattr(head, name).requires_grad_(False)
    with pytest.raises(RuntimeError, match="parameters of the LM head: .* that was frozen in between .* adapter"):
        logps.sum().backward()


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_that_is_changed_in_place_is_an_error(name, is_frozen):
    """The backward would compute other logits than the forward, and a wrong gradient of them."""
    head, hidden, targets = problem()
    head.requires_grad_(not is_frozen)
    logps, _ = score_in_chunks(head, hidden, targets, rows=4, frozen=head.parameters())
    logps.sum().backward(retain_graph=True)
    with torch.no_grad():
        getattr(head, name).mul_(1.01)
    with pytest.raises(RuntimeError, match="parameters of the LM head: .* same in .*, got one .* changed in place"):
        logps.sum().backward()


def test_frozen_parameters_of_inference_mode():
    """They have no versions, and autograd cannot save them either; a head may read them without that."""
    _, hidden, targets = problem()
    with torch.inference_mode():
        mask = torch.zeros(6, dtype=torch.float64)
    head, hidden = (lambda h: h + mask), hidden.detach().requires_grad_()
    logps, _ = score_in_chunks(head, hidden, targets % 6, rows=4, frozen=[mask])
    logps.sum().backward()
    assert hidden.grad is not None


def test_the_backward_of_autocast_computes_in_its_type():
    head, hidden, targets = problem(dtype=torch.float32)
    dtypes = []

    def watched(h):
        logits = head(h)
        dtypes.append(logits.dtype)
        return logits

    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps, _ = score_in_chunks(watched, hidden, targets, rows=100)
    assert logps.dtype == torch.float32
    logps.sum().backward()
    assert dtypes == [torch.bfloat16] * 3
    assert head.weight.grad.dtype == hidden.grad.dtype == torch.float32


def test_no_gradient_of_a_gradient():
    head, hidden, targets = problem()
    logps, _ = score_in_chunks(head, hidden, targets, rows=4)
    (gradient,) = torch.autograd.grad(logps.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        gradient.sum().backward()


class Hooks:
    """Gradient hooks of every kind that a parameter can have, and what they see."""

    def __init__(self, parameter):
        self.halved, self.recorded, self.accumulated, self.together = [], [], [], []
        # Not linear: of parts and of their sum it makes something else.
        parameter.register_hook(lambda one: self.halved.append(one.clone()) or one * one.abs())
        parameter.register_hook(lambda one: self.recorded.append(one.clone()))
        parameter.register_post_accumulate_grad_hook(lambda one: self.accumulated.append(one.grad.clone()))
        torch.autograd.graph.register_multi_grad_hook([parameter], self.together.extend)


@pytest.mark.parametrize("rows", [3, 100])
@pytest.mark.parametrize("used_elsewhere", [False, True])
def test_gradient_hooks_run_once_with_the_whole_gradient(rows, used_elsewhere):
    head, hidden, targets = problem()

    def outcome(score):
        module = copy.deepcopy(head)
        hooks = [Hooks(one) for one in module.parameters()]
        own = [dict(one._backward_hooks) for one in module.parameters()]
        loss = score(module)[0].sum()
        if used_elsewhere:  # as a tied embedding is
            loss = loss + (module.weight**2).sum() * 0.3 + module.bias.sum()
        loss.backward()
        assert [dict(one._backward_hooks) for one in module.parameters()] == own
        seen = [(one.halved, one.recorded, one.accumulated, one.together) for one in hooks]
        assert all(len(calls) == 1 for one in seen for calls in one)
        return [one.grad for one in module.parameters()] + [calls[0] for one in seen for calls in one]

    got = outcome(lambda module: score_in_chunks(module, hidden, targets, rows=rows))
    expected = outcome(lambda module: scores_of(module(hidden), targets))
    check(got, expected)


def test_hooks_run_if_a_chunk_has_failed():
    head, hidden, targets = problem()
    hooks = Hooks(head.weight)

    def watched(h):
        logits = head(h)
        if logits.requires_grad and len(h) > 1:
            logits.register_hook(lambda _: 1 / 0)
        return logits

    with pytest.raises(ZeroDivisionError):
        score_in_chunks(watched, hidden, targets, rows=4)[0].sum().backward()
    assert not hooks.halved
    head.weight.sum().backward()
    assert len(hooks.halved) == 1
