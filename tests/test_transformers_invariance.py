"""What must not change the numbers of a response: the other responses, their order, and how they are grouped."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tiny_models import (
    FAMILIES,
    MIXED,
    TOLERANCES,
    Samples,
    check_equal,
    check_gradients,
    dualkv,
    gradients,
    replicated_logps,
    stock_twin,
    tiny_model,
)

from flash_attn_dualkv import pack_shared_prompts

# Sums in another order; the float32 inside norms and rotary embeddings is the same.
ROUNDING = 1e-12
GRADIENT_ROUNDING = 1e-6

# So that as many tokens go to an expert whatever the others are: a product over other rows may be rounded otherwise.
EVERY_EXPERT = {
    "qwen3_moe": dict(num_experts_per_tok=4),
    "gpt_oss": dict(num_experts_per_tok=4),
    "deepseek_v3": dict(num_experts_per_tok=4, topk_group=2),
}


def logps_of(model, samples: Samples, **options) -> list[torch.Tensor]:
    with torch.no_grad():
        return samples.split(dualkv.shared_prompt_forward(model, samples.pack(**options))[0])


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_response_does_not_see_the_others(name):
    """Other tokens in one response: the log-probabilities of all others stay equal to the last bit."""
    model = tiny_model(name, **EVERY_EXPERT.get(name, {}))
    before = logps_of(model, MIXED)
    changed = Samples(MIXED.prompts, [list(one) for one in MIXED.responses])
    changed.responses[2] = [(token + 1) % 90 + 3 for token in changed.responses[2]]
    after = logps_of(model, changed)
    for index, (one, other) in enumerate(zip(before, after)):
        assert torch.equal(one, other) == (index != 2)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_gradients_reach_only_what_a_response_depends_on(name):
    """Loss on one response: no gradient at the embeddings of the others; the prompt's is the replicated one's."""
    model = tiny_model(name)
    chosen = 2
    batch = MIXED.pack(boundary="gather")
    embedded = []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: embedded.append(out))
    logps = MIXED.split(dualkv.shared_prompt_forward(model, batch)[0])
    handle.remove()
    (gradient,) = torch.autograd.grad(logps[chosen].sum(), embedded[0])
    gradient = gradient[0]
    begins = [batch.layout.num_context_tokens + begin for begin in batch.layout.cu_seqlens_decoded.tolist()]
    for place, (begin, end) in enumerate(pairwise(begins)):
        # The last token of the response itself scores nothing.
        is_seen = gradient[begin:end].abs().sum(-1) > 0
        expected = [batch.order[place] == chosen] * (end - begin - 1) + [False]
        assert is_seen.tolist() == (expected if end > begin else [])


def test_the_gradient_of_the_prompt_sums_over_its_responses():
    samples = Samples.random([(6, [4, 2, 5])])
    model = tiny_model("llama")
    twin = stock_twin(model)
    batch = samples.pack(boundary="gather")
    embedded = []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: embedded.append(out))
    logps, _ = dualkv.shared_prompt_forward(model, batch)
    handle.remove()
    (got,) = torch.autograd.grad(logps.sum(), embedded[0])
    expected = torch.zeros_like(got[0, :6])
    for prompt, response in zip(samples.prompts, samples.responses):
        inputs = twin.get_input_embeddings()(torch.tensor([prompt + response])).detach().requires_grad_()
        all_logps = twin(inputs_embeds=inputs, use_cache=False).logits[0, 5:-1].log_softmax(-1)
        all_logps.gather(-1, torch.tensor(response)[:, None]).sum().backward()
        expected += inputs.grad[0, :6]
    scale = expected.abs().max()
    assert (got[0, :6] - expected).abs().max() <= TOLERANCES[torch.float64].gradient * scale


def test_order_of_the_samples():
    model = tiny_model("qwen3")
    order = [3, 0, 5, 2, 1, 4]
    permuted = logps_of(model, MIXED.take(order))
    for index, one in zip(order, permuted):
        check_equal(one, logps_of(model, MIXED)[index], ROUNDING)


def test_company():
    """Alone, with its group, with an unrelated group, in groups that interleave, in a group that was split."""
    model = tiny_model("qwen3")
    together = logps_of(model, MIXED)
    group = [i for i, prompt in enumerate(MIXED.prompts) if prompt == MIXED.prompts[0]]
    for indices in ([0], [2], group, [0, 3], [1, 0, 3, 2]):
        for index, one in zip(indices, logps_of(model, MIXED.take(indices))):
            check_equal(one, together[index], ROUNDING)
    for one, other in zip(together, logps_of(model, MIXED, max_responses_per_group=2)):
        check_equal(one, other, ROUNDING)


def test_group_ids_only_decide_what_is_shared():
    model = tiny_model("llama")
    prompts, responses = [[5, 6, 7]] * 3, [[8, 9], [10], [11, 12, 13]]
    results = []
    for group_ids, groups in ((None, 1), ([4, 4, 4], 1), ([1, 2, 1], 2)):
        batch = pack_shared_prompts(prompts, responses, group_ids=group_ids)
        assert batch.layout.num_groups == groups
        with torch.no_grad():
            results.append(dualkv.shared_prompt_forward(model, batch)[0])
    check_equal(results[1], results[0], 0.0)
    check_equal(results[2], results[0], ROUNDING)


def test_boundaries_agree():
    model = tiny_model("llama")
    for one, other in zip(logps_of(model, MIXED), logps_of(model, MIXED, boundary="gather")):
        check_equal(one, other, ROUNDING)


@pytest.mark.parametrize("shapes", [[(6, [4])], [(6, [4]), (3, [2]), (9, [5])]], ids=["one sample", "unique prompts"])
@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
def test_nothing_to_share(name, shapes):
    """One response per prompt is the stock model's own packed row; it equals separate sequences too."""
    samples = Samples.random(shapes)
    model = tiny_model(name)
    with torch.no_grad():
        expected, _ = replicated_logps(stock_twin(model), samples)
    check_equal(torch.cat(logps_of(model, samples)), expected, TOLERANCES[FAMILIES[name].dtype].value)


def test_a_group_over_two_micro_batches_has_the_same_gradient():
    model = tiny_model("gemma2")
    dualkv.shared_prompt_forward(model, MIXED.pack())[0].sum().backward()
    expected = gradients(model)
    for indices in ([0, 1, 3], [2, 4, 5]):
        dualkv.shared_prompt_forward(model, MIXED.take(indices).pack())[0].sum().backward()
    check_gradients(gradients(model), expected, GRADIENT_ROUNDING)
