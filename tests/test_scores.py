"""Scores of tokens from any LM head, chunk by chunk: values, gradients and how accurate their sums are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flash_attn_dualkv.integrations.lm_head import score_in_chunks


def scores_of(logits, targets, temperature=1.0):
    """What `score_in_chunks` computes, written out."""
    logps = (logits / temperature).log_softmax(-1)
    return logps.gather(-1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(-1)


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
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


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
    for one, two, other in zip(got, again, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert torch.equal(one, two)


def test_a_head_that_changes_is_an_error():
    """Its gradient would be lost."""
    head, hidden, targets = problem()
    heads = [head]
    logps, _ = score_in_chunks(lambda h: heads[0](h), hidden, targets, rows=4)
    heads[0] = copy.deepcopy(head)
    with pytest.raises(RuntimeError, match="parameters of the LM head: expected the same in forward and backward"):
        logps.sum().backward()


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
