"""Stock transformers models on packed trees compute what they compute on every sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import (
    EVERY_EXPERT,
    FAMILIES,
    MASKS,
    SEQUENCES,
    SUPPORTED,
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

from flash_attn_dualkv import SharedPromptLayoutError, pack_prefix_tree, unpack_logprobs

OPTIONS = (dict(boundary="gather"), dict(boundary="replicate", pad_to_multiple_of=16))


@pytest.mark.parametrize("name", SUPPORTED)
def test_equals_each_sequence_alone(name: str) -> None:
    """Log-probabilities, entropies and the gradients of all parameters; windows, softcaps and sinks are the models'."""
    dtype = FAMILIES[name].dtype
    tolerance = TOLERANCES[dtype]
    model = tiny_model(name, **(EVERY_EXPERT[name] if name == "deepseek_v3" else {}))
    twin = stock_twin(model)
    whole = Samples([one[:1] for one in SEQUENCES], [one[1:] for one in SEQUENCES])
    trained = torch.tensor([value for mask in MASKS for value in mask[1:]]).bool()
    logps, entropy = (one[trained] for one in replicated_logps(twin, whole, temperature=0.7))
    weights = torch.randn(len(logps), generator=torch.Generator().manual_seed(5), dtype=dtype)
    (weights @ logps + 0.3 * entropy.sum()).backward()
    expected = gradients(twin)
    for options in OPTIONS:
        batch = pack_prefix_tree(SEQUENCES, loss_mask=MASKS, min_shared=1, **options)
        assert batch.depth >= 4 and batch.dedup_ratio > 1.5
        got, got_entropy = dualkv.shared_prompt_forward(model, batch, temperature=0.7, with_entropy=True)
        check_equal(got, logps, tolerance.value)
        check_equal(got_entropy, entropy, tolerance.value)
        (weights @ got + 0.3 * got_entropy.sum()).backward()
        check_gradients(gradients(model), expected, tolerance.gradient)
    assert unpack_logprobs(got, batch, per_row=False).shape == (len(SEQUENCES), max(map(sum, MASKS)))


LOSSES = 256  # of one of them the error of either side is chance, of many it is a measure
DRAWS = 8  # those that are differentiated
ROUNDED = {
    "llama": dict(head_dim=64),
    "qwen3": dict(head_dim=128),
    "gemma2": dict(head_dim=128, query_pre_attn_scalar=128),
    "gpt_oss": dict(head_dim=64, **EVERY_EXPERT["gpt_oss"]),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_in_bf16_no_less_accurate_than_each_sequence_alone(name: str) -> None:
    """Errors of log-probabilities, losses and all gradients against float32 are those of the stock model in bf16."""
    shape = dict(hidden_size=128, intermediate_size=256)
    model = tiny_model(name, dtype=torch.bfloat16, **shape, **ROUNDED[name])
    whole = Samples([one[:1] for one in SEQUENCES], [one[1:] for one in SEQUENCES])
    trained = torch.tensor([value for mask in MASKS for value in mask[1:]]).bool()
    batch = pack_prefix_tree(SEQUENCES, loss_mask=MASKS, min_shared=1)

    def run(one: Any) -> dict[str, torch.Tensor]:
        if one is model:
            logps, _ = dualkv.shared_prompt_forward(one, batch)
        else:
            logps = replicated_logps(one, whole)[0][trained]
        weights = torch.randn(LOSSES, len(logps), generator=torch.Generator().manual_seed(0))
        losses = (weights * logps.float()).mean(1)
        found: dict[str, list[torch.Tensor]] = {}
        for loss in losses[:DRAWS]:
            loss.backward(retain_graph=True)
            for key, gradient in gradients(one).items():
                found.setdefault(key, []).append(gradient.float())
        of_parameters = {key: torch.stack(of_losses) for key, of_losses in found.items()}
        return {"logps": logps.detach().float(), "losses": losses.detach(), **of_parameters}

    exact, stock, got = run(stock_twin(model).float()), run(stock_twin(model)), run(model)
    assert got.keys() == exact.keys()
    ratios = {key: ((got[key] - one).norm() / (stock[key] - one).norm()).item() for key, one in exact.items()}
    assert not {key: ratio for key, ratio in ratios.items() if not ratio <= 1.5}


def test_the_layout_in_a_forward_of_the_model() -> None:
    """The hook, the guard and the check of positions, as for prompts."""
    model = tiny_model("llama")
    batch, other = (pack_prefix_tree(SEQUENCES[:count], min_shared=1) for count in (9, 8))
    inputs = dict(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False)
    handle = dualkv.install_layout_hook(model)
    logits = model(**inputs, shared_prompt_layout=batch.layout).logits[0]
    scores = logits.log_softmax(-1)[batch.token_index, batch.targets]
    check_equal(scores, dualkv.shared_prompt_forward(model, batch)[0], 1e-12)
    wrong = torch.arange(batch.num_rows)[None]
    with pytest.raises(SharedPromptLayoutError, match="^position_ids"):
        model(**{**inputs, "position_ids": wrong}, shared_prompt_layout=batch.layout)
    handle.remove()
    with (
        pytest.raises(SharedPromptLayoutError, match="^shared_prompt_layout: expected the layout of the enclosing"),
        dualkv.expect_shared_prompt(other.layout, 2),
    ):
        model(**inputs, shared_prompt_layout=batch.layout)
