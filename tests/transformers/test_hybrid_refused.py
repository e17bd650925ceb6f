# SPDX-License-Identifier: BSD-3-Clause
"""Hybrid models: a layout that does not reach every layer raises, and so does what cannot be exact."""

from __future__ import annotations

import types
from functools import partial
from importlib import metadata
from typing import Any

import pytest
import torch
from hybrid_models import HYBRIDS, KINDS, hybrid_config, hybrid_model
from tiny_models import MIXED, dualkv, replicated_logps, row_of, stock_twin, tiny_model, transformers

from flash_attn_dualkv import SharedPromptError, SharedPromptLayout, SharedPromptLayoutError
from flash_attn_dualkv.integrations.recurrences import known_bugs, mixers
from flash_attn_dualkv.integrations.transformers import hybrid
from flash_attn_dualkv.integrations.transformers.hybrid import families, layout_context
from flash_attn_dualkv.parallel.context import ContextLayout
from flash_attn_dualkv.parallel.ulysses import UlyssesLayout

BATCH = MIXED.pack()
NAME = KINDS[0]
# In older versions the functions of a model without hooks are not those that take layouts: the
# first layer says so.
PLAIN = "a hybrid model's layout through shared_prompt_forward|a forward that calls .* of its model file"


inputs = partial(row_of, BATCH)


def mixer_of(model: Any) -> Any:
    return next(module for _, module in families.mixers_of(model, families.FAMILIES[model.config.model_type]))


def drop_the_layout(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name != "shared_prompt_layout"}


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_beside_the_packed_one_raise(name: str) -> None:
    """A convolution of the first row alone would be broadcast over all of them."""
    model = hybrid_model(name, torch.float32)
    dualkv.install_layout_hook(model)
    message = f"input_ids: expected 1 row of {BATCH.layout.num_tokens} tokens .as the layout., got 2 of"
    with pytest.raises(SharedPromptError, match=message):
        model(**inputs(input_ids=BATCH.input_ids.expand(2, -1)))


# --- the guard --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_plain_forward_raises(name: str) -> None:
    """Its attention has got the layout, its other layers would not."""
    model = hybrid_model(name, torch.float32)
    with pytest.raises(SharedPromptLayoutError, match=PLAIN):
        model(**inputs())
    dualkv.install_layout_hook(model)
    model(**inputs())


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_that_computes_by_itself_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel for a whole layer would, which knows of no layout."""
    model = hybrid_model(name, torch.float32)
    monkeypatch.setattr(mixer_of(model), "forward", lambda hidden_states, **kwargs: hidden_states)
    with pytest.raises(SharedPromptLayoutError, match="consumed by 2 layers that mix tokens, got 1"):
        dualkv.shared_prompt_forward(model, BATCH)


@pytest.mark.parametrize("name", KINDS)
def test_functions_that_were_replaced_raise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another library, after the layers were let take layouts."""
    model = hybrid_model(name, torch.float32)
    dualkv.install_layout_hook(model)
    monkeypatch.setattr(hybrid, "prepare", lambda model: None)  # which would take them in
    layer, family = mixer_of(model), families.FAMILIES[name]
    for function in family.functions:
        with monkeypatch.context() as patch:
            place, key = (family.file, function) if family.is_global else (layer, families.ATTRIBUTES[function])
            patch.setattr(place, key, getattr(place, key).dualkv_stock)
            message = f"{type(layer).__name__}: expected a forward that calls {function} of its model file"
            with pytest.raises(SharedPromptLayoutError, match=message):
                model(**inputs())


@pytest.mark.skipif(layout_context._RECOMPUTES_HOOKS, reason="this transformers runs the hooks of layers again")
def test_a_decoder_layer_that_keeps_the_layout_raises_under_checkpointing() -> None:
    """Its recomputation would mix the tokens without."""
    model = hybrid_model(NAME, torch.float32).train()
    layer = mixer_of(model)
    layer.register_forward_pre_hook(drop_the_layout, with_kwargs=True)
    dualkv.shared_prompt_forward(model, BATCH)
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    with pytest.raises(SharedPromptLayoutError, match="a decoder layer that hands it on"):
        dualkv.shared_prompt_forward(model, BATCH)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_caches_are_refused() -> None:
    model = hybrid_model(NAME, torch.float32)
    dualkv.install_layout_hook(model)
    with pytest.raises(SharedPromptError, match="use_cache: expected False"):
        model(**inputs(use_cache=True))


@pytest.mark.parametrize("kind", [UlyssesLayout, ContextLayout])
def test_a_row_that_ranks_divide_is_refused(kind: type[SharedPromptLayout]) -> None:
    layout = kind(**{one: getattr(BATCH.layout, one) for one in SharedPromptLayout.__dataclass_fields__})
    with pytest.raises(SharedPromptError, match="a row that lies on one GPU"):
        layout_context._layout_of(torch.nn.Identity(), {"shared_prompt_layout": layout}, None)


FUSED = mixers.mamba2_by_parts(lambda *_, **__: None, lambda *_, **__: None)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (mixers.convolution, dict(seq_idx=torch.zeros(1)), "seq_idx: expected none for convolution"),
        (mixers.gated_delta_rule, dict(initial_state=torch.zeros(1)), "initial_state: expected none for linear"),
        (mixers.gated_delta_rule, dict(cu_seqlens=torch.zeros(1)), "cu_seqlens: expected none for linear"),
        (mixers.mamba2_scan, dict(return_final_states=True), "return_final_states: expected none for mamba"),
        (mixers.mamba2_scan, dict(cu_seqlens=torch.zeros(1)), "cu_seqlens: expected none for mamba"),
        (FUSED, dict(D=torch.ones(2), rmsnorm_weight=torch.ones(1)), "rmsnorm_weight: expected none for mamba"),
    ],
)
def test_what_a_layout_replaces_is_refused(function: Any, arguments: Any, message: str) -> None:
    row = [torch.zeros(1, 4, 2, 2)] * 5
    with pytest.raises(SharedPromptError, match=message):
        function(lambda *_, **__: None, BATCH.layout, *row[: 2 if function is mixers.convolution else 5], **arguments)


def test_another_row_than_the_layouts_is_refused() -> None:
    with pytest.raises(SharedPromptError, match="input_ids: expected 1 row of .* tokens"):
        mixers.convolution(lambda *_: None, BATCH.layout, torch.zeros(1, 4, 3), torch.zeros(4, 2))


# --- models and versions ----------------------------------------------------------------------------------------------


def test_versions_without_functions_to_stand_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model files that run a package's kernel or their own code in place, without a state to begin with."""
    family = families.Family("llama", "LlamaMixer", "LlamaAttention", (families.CONVOLUTION,))
    monkeypatch.setitem(families.FAMILIES, "llama", family)
    message = f"layer_types of llama: expected transformers 5.17 or newer.*got transformers {transformers.__version__}"
    with pytest.raises(SharedPromptError, match=message):
        dualkv.check_supported(tiny_model("llama").config)


def test_layers_of_other_libraries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They replace a layer's forward for all models, as verl does Qwen3.5's, and mix tokens in ways of their own."""
    model = hybrid_model(NAME, torch.float32)
    dualkv.check_supported(model.config)

    def forward(self: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states

    monkeypatch.setattr(type(mixer_of(model)), "forward", forward)
    with pytest.raises(SharedPromptError, match=f"one whose forward is that of {__name__}"):
        dualkv.check_supported(model.config)


def test_attention_layers_only() -> None:
    """A hybrid's configuration without any other layer is that of a plain model, in any version."""
    config = hybrid_config("lfm2", layer_types=["full_attention"] * 2)
    assert families.family_of(config) is None
    dualkv.check_supported(config)


def test_functions_of_the_package_kernels() -> None:
    """They are modules there; what they run is found all the same, unless they have been given something else."""

    def implementation(x: int) -> int:
        return x + 1

    def function_of(implementation: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            return implementation(*args)

        return wrapped

    def module_of(func: Any) -> torch.nn.Module:
        class Func(torch.nn.Module):
            kernel_layer_name = "name"

            def forward(self, *args: Any) -> Any:
                return func(*args)

        return Func()

    module = module_of(function_of(implementation))
    assert mixers.implementation_of(module) is implementation
    assert mixers.implementation_of(function_of(implementation)) is implementation
    assert mixers.implementation_of(implementation) is implementation
    file = types.ModuleType("file")
    file.function = layout_context.MixerFunction("function", module)  # type: ignore[attr-defined]
    assert families._is_own(file, "function")
    module.forward = len  # type: ignore[method-assign]
    assert mixers.implementation_of(module) is module


# --- installations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "triton", "fla", "has_tilelang", "is_refused"),
    [
        ((9, 0), "3.4.0", "0.6.0", False, True),
        ((9, 0), "3.6.0+git1234", "0.5.1", False, True),
        ((9, 0), "3.7.0", "0.6.0", False, True),
        ((9, 0), "3.6.0", "0.6.0", True, False),
        ((9, 0), "3.6.0", "0.5.1", True, True),
        ((9, 0), "3.3.1", "0.6.0", False, False),
        ((9, 0), "3.7.1", "0.6.0", False, False),
        ((9, 0), "4.0", "0.6.0", False, False),
        ((8, 0), "3.6.0", "0.6.0", False, False),
        ((10, 0), "3.6.0", "0.6.0", False, False),
        ((9, 0), None, None, False, False),
    ],
)
def test_installations_with_wrong_gradients(
    capability: Any, triton: Any, fla: Any, has_tilelang: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        found = {"triton": triton, "fla-core": fla}.get(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return str(found)

    monkeypatch.setattr(known_bugs.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(known_bugs.importlib.util, "find_spec", lambda name: object() if has_tilelang else None)
    check = known_bugs.check_gated_backward.__wrapped__
    check(torch.device("cpu"))
    if has_tilelang and not is_refused:
        with monkeypatch.context() as switched_off:
            switched_off.setenv("FLA_TILELANG", "0")
            with pytest.raises(SharedPromptError, match="Triton 3.7.1"):
                check(torch.device("cuda"))
    if is_refused:
        with pytest.raises(SharedPromptError, match="Triton 3.7.1 or newer, or tilelang .*, got Triton 3"):
            check(torch.device("cuda"))
    else:
        check(torch.device("cuda"))


def test_the_check_comes_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package's kernels and gradients; never with the functions of the model file."""

    def chunk_gated_delta_rule(q: Any, k: Any, v: Any, *, g: Any, beta: Any, cu_seqlens: Any = None, **_: Any) -> Any:
        assert cu_seqlens is not None
        return v, torch.zeros(len(cu_seqlens) - 1, 1, 2, 2)

    def refuse(device: torch.device) -> None:
        raise SharedPromptError("refused")

    monkeypatch.setattr(mixers, "check_gated_backward", refuse)
    row = [torch.zeros(1, BATCH.layout.num_tokens, 1, 2)] * 3
    gates = dict(g=row[0][..., 0], beta=row[0][..., 0])
    chunk_gated_delta_rule.__module__ = "fla.ops.gated_delta_rule"
    with pytest.raises(SharedPromptError, match="refused"):
        mixers.gated_delta_rule(chunk_gated_delta_rule, BATCH.layout, *row, **gates)
    with torch.no_grad():
        mixers.gated_delta_rule(chunk_gated_delta_rule, BATCH.layout, *row, **gates)


def test_two_models_of_one_file() -> None:
    """The functions of a model file stand for each other's models too, which may have no hooks."""
    hooked, plain = (hybrid_model(NAME, torch.float32) for _ in range(2))
    dualkv.shared_prompt_forward(hooked, BATCH)
    expected, _ = replicated_logps(stock_twin(plain, "eager"), MIXED)
    assert torch.allclose(dualkv.shared_prompt_forward(plain, BATCH)[0], expected, atol=1e-5)
