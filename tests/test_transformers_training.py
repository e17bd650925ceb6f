"""Shared prompts under what training puts around a model: activation checkpointing, LoRA, DDP, FSDP."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from flash_attn_dualkv.integrations import scores
from flash_attn_dualkv.packing import SharedPromptError


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_gradient_checkpointing(name, use_reentrant):
    model = tiny_model(name).train()
    twin = stock_twin(model)
    expected, _ = replicated_logps(twin, MIXED)
    expected.square().sum().backward()
    model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
    if use_reentrant:
        # Reentrant checkpoints have gradients only for inputs that need one themselves.
        model.enable_input_require_grads()
    runs = []
    attention = model.model.layers[0].self_attn
    handle = attention.register_forward_hook(lambda module, args, output: runs.append(torch.is_grad_enabled()))
    got, _ = dualkv.shared_prompt_forward(model, MIXED.pack())
    before = len(runs)
    got.square().sum().backward()
    handle.remove()
    assert (before, len(runs)) == (1, 2)
    tolerance = TOLERANCES[FAMILIES[name].dtype]
    check_equal(got.detach(), expected.detach(), tolerance.value)
    check_gradients(gradients(model), gradients(twin), tolerance.gradient)


def test_checkpointing_of_a_forward_with_the_hook():
    """The recomputation runs when the expectation is over: layers must have their layout all the same."""
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    batch = MIXED.pack()
    dualkv.install_layout_hook(model)
    targets = batch.labels[batch.token_index][:, None]
    with dualkv.expect_shared_prompt(batch.layout, 2):
        logits = model(
            batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False,
            logits_to_keep=batch.token_index,
        ).logits[0]  # fmt: skip
    logits.log_softmax(-1).gather(-1, targets).sum().backward()
    got = gradients(model)
    dualkv.shared_prompt_forward(model, batch)[0].sum().backward()
    check_gradients(got, gradients(model), 1e-6)


def lora(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="needs peft")
    targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **options)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        # LoRA's own parameters are made in float32.
        return peft.get_peft_model(model, config).to(model.dtype)


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_lora(use_reentrant, task_type):
    """Adapters in attention, in the MLP and in the head itself; gradients for them only."""
    model = lora(tiny_model("qwen3"), task_type=task_type).train()
    twin = copy.deepcopy(model)
    twin.get_base_model().set_attn_implementation("sdpa")
    expected, _ = replicated_logps(twin, MIXED)
    expected.sum().backward()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
        model.enable_input_require_grads()
    got, _ = dualkv.shared_prompt_forward(model, MIXED.pack())
    got.sum().backward()
    check_equal(got.detach(), expected.detach(), TOLERANCES[torch.float64].value)
    found = gradients(model)
    assert found
    assert all("lora_" in name for name in found)
    check_gradients(found, gradients(twin), TOLERANCES[torch.float64].gradient)


def test_the_reference_policy_of_lora_is_the_base_model():
    model = lora(tiny_model("qwen3"))
    with torch.no_grad(), model.disable_adapter():
        got, _ = dualkv.shared_prompt_forward(model, MIXED.pack())
        expected, _ = replicated_logps(stock_twin(tiny_model("qwen3")), MIXED)
    check_equal(got, expected, TOLERANCES[torch.float64].value)


def test_dropout_of_lora_is_refused_in_training():
    model = lora(tiny_model("qwen3"), lora_dropout=0.1).train()
    with pytest.raises(SharedPromptError, match=r"dropout of .*lora_dropout.*: expected 0 in training mode"):
        dualkv.shared_prompt_forward(model, MIXED.pack())
    dualkv.shared_prompt_forward(model.eval(), MIXED.pack())


def test_virtual_tokens_are_refused():
    peft = pytest.importorskip("peft", reason="needs peft")
    model = tiny_model("llama", dtype=torch.float32)
    model = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(SharedPromptError, match="no KV cache and no virtual tokens|attention_mask"):
        dualkv.shared_prompt_forward(model, MIXED.pack())


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast(dtype):
    """float32 parameters, 16-bit arithmetic: as far from exact as the stock model under autocast."""
    model = tiny_model("qwen3", dtype=torch.float32)
    with torch.no_grad():
        exact, _ = replicated_logps(stock_twin(model), MIXED)
        with torch.autocast("cpu", dtype):
            got, _ = dualkv.shared_prompt_forward(model, MIXED.pack())
            stock, _ = replicated_logps(stock_twin(model), MIXED)
    assert got.dtype == torch.float32
    assert 0 < (got - exact).abs().max() <= 1.5 * (stock - exact).abs().max()


def test_norms_in_float32():
    """As PEFT's preparation for training on quantised weights leaves them: q and k come out wider than v."""
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.q_norm.float()
        layer.self_attn.k_norm.float()
    with torch.no_grad():
        got, _ = dualkv.shared_prompt_forward(model, MIXED.pack())
        exact, _ = replicated_logps(stock_twin(model.float()), MIXED)
    assert (got - exact).abs().max() < 0.1


# --- several processes ------------------------------------------------------------------------------------------------

# Ranks with different prompts and different numbers of chunks of the head.
SHARES = [[0, 1, 2, 3], [4, 5]]
WRAPPERS = ["ddp", "fsdp1", "fsdp1, flat parameters", "fsdp2", "fsdp2, mixed precision"]


def share(rank: int) -> Samples:
    return MIXED.take(SHARES[rank])


def run_rank(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(SHARES))
    scores.LOGIT_ELEMENTS = 97 * 8
    for wrapper in WRAPPERS:
        model = tiny_model("qwen3", dtype=torch.float32).train()
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        wrapped = wrap(model, wrapper)
        batch = share(rank).pack()
        with torch.no_grad():
            old, _ = dualkv.shared_prompt_forward(wrapped, batch)
        logps, _ = dualkv.shared_prompt_forward(wrapped, batch)
        logps.sum().backward()
        results[rank, wrapper] = (old, logps.detach(), whole_gradients(wrapped, model))
    dist.destroy_process_group()


def wrap(model: Any, wrapper: str) -> Any:
    if wrapper == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if "fsdp1" in wrapper:
        layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
        device = torch.device("cpu")
        return Fsdp1(model, auto_wrap_policy=layers, device_id=device, use_orig_params="flat" not in wrapper)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (len(SHARES),))
    policy = MixedPrecisionPolicy(torch.bfloat16) if "mixed" in wrapper else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def whole_gradients(wrapped: Any, model: Any) -> dict[str, torch.Tensor]:
    """The gradients of all parameters, unsharded."""
    if not isinstance(wrapped, Fsdp1):
        found = gradients(model)
        return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}

    def parameters() -> dict[str, torch.Tensor]:
        with Fsdp1.summon_full_params(wrapped):
            clean = ((name.replace("_fsdp_wrapped_module.", ""), one) for name, one in wrapped.named_parameters())
            return {name: one.detach().clone() for name, one in clean}

    # What a step of length 1 takes away: FSDP1 does not unshard the gradients of flat parameters.
    before = parameters()
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    return {name: before[name] - after for name, after in parameters().items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Any]:
    """What all ranks computed under all wrappers, in one start of the processes."""
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        store = tmp_path_factory.mktemp("ranks") / "store"
        torch.multiprocessing.spawn(run_rank, (str(store), results), nprocs=len(SHARES))
        return dict(results)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models(ranks, wrapper):
    """Log-probabilities of each rank's own samples, and the mean of the ranks' gradients."""
    model = tiny_model("qwen3", dtype=torch.float32).train()
    expected: dict[str, torch.Tensor] = {}
    is_mixed = "mixed" in wrapper
    for rank in range(len(SHARES)):
        old, got, _ = ranks[rank, wrapper]
        assert torch.equal(old, got)
        assert got.dtype == torch.float32
        logps, _ = dualkv.shared_prompt_forward(model, share(rank).pack())
        check_equal(got, logps.detach(), 0.05 if is_mixed else TOLERANCES[torch.float32].value)
        (logps.sum() / len(SHARES)).backward()
    expected = gradients(model)
    for rank in range(len(SHARES)):
        check_gradients(ranks[rank, wrapper][2], expected, 0.1 if is_mixed else TOLERANCES[torch.float32].gradient)


def test_layouts_that_a_wrapper_rebuilds():
    """FSDP1 replaces dataclasses among the arguments: the layout stays the same one to the guard."""
    model = tiny_model("llama")
    batch = MIXED.pack()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: (
                args,
                {**kwargs, "shared_prompt_layout": dataclasses.replace(kwargs["shared_prompt_layout"])},
            ),
            with_kwargs=True,
        )
    with torch.no_grad():
        got, _ = dualkv.shared_prompt_forward(model, batch)
        expected, _ = dualkv.shared_prompt_forward(tiny_model("llama"), batch)
    assert torch.equal(got, expected)
