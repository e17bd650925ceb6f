# SPDX-License-Identifier: BSD-3-Clause
"""What is tried before a model's first forward with a layout: noise, modules that look at their row, and no traces."""

from __future__ import annotations

import copy
import functools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from row_lookers import LOOKERS, NOISES, OfEachToken, add_looker, train
from tiny_models import (
    MIXED,
    VERSION,
    check_gradients,
    dualkv,
    gradients,
    row_of,
    tiny_model,
    transformers,
)
from torch import nn

from flash_attn_dualkv import SharedPromptError
from flash_attn_dualkv.integrations.transformers.admission import check, probe

EXPERTS = [name for name in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3") if name in transformers.CONFIG_MAPPING]


def forward(model: nn.Module, **options: bool) -> torch.Tensor:
    return dualkv.shared_prompt_forward(model, MIXED.pack(), **options)[0]


@pytest.fixture
def trials(monkeypatch):
    """The models that are tried."""
    tried = []
    stock = probe.Trial.run

    def run(self):
        tried.append(self.stock)
        stock(self)

    monkeypatch.setattr(probe.Trial, "run", run)
    return tried


# --- noise ------------------------------------------------------------------------------------------------------------


def hook_of_a_layer(model):
    model.model.layers[1].register_forward_hook(
        lambda module, args, output: output + 0.01 * torch.randn_like(output) if module.training else output
    )


def a_layer_that_is_left_out(model):
    """Rarely: in one forward of four."""
    stock = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda hidden: stock(hidden) * (torch.rand(()) > 0.25).to(hidden)


LOOKER = r"model.layers.0.mlp.looker \(Nois"
NOISY = {
    "a hook": (hook_of_a_layer, "model.layers.1 "),
    "a layer that is left out": (a_layer_that_is_left_out, "model.layers.1.mlp "),
    # Multiplied with zero until an adapter's first step.
    "untrained": (lambda model: add_looker(model, NOISES["torch"]), LOOKER),
    **{name: (lambda model, one=one: train(add_looker(model, one)), LOOKER) for name, one in NOISES.items()},
}


@pytest.mark.parametrize("name", NOISY)
def test_noise_is_refused(name):
    """Of any generator."""
    model, (add_noise, place) = tiny_model("llama").train(), NOISY[name]
    add_noise(model)
    with pytest.raises(SharedPromptError, match=f"without random numbers in training mode, .*{place}.* draws some"):
        forward(model)
    if place == LOOKER:
        forward(model.eval())  # where it draws nothing


def test_noise_that_configurations_name():
    """The field is the reason given, in parts of the configuration too, and without a probe."""
    if VERSION < (5, 0):
        pytest.skip("its attention cannot be chosen in older versions")
    parts = dict(
        attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2, moe_jitter_eps=0.01),
    )
    config = transformers.DbrxConfig(vocab_size=97, d_model=32, n_heads=4, n_layers=2, max_seq_len=64, **parts)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dualkv").train()
    with pytest.raises(SharedPromptError, match="config.ffn_config.moe_jitter_eps: expected 0 in training mode"):
        forward(model, self_check=False)


# --- modules that look at their row -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOOKERS)
def test_modules_that_look_at_their_row_are_refused(name, dtype, is_trained):
    """Before the first step too, when the weight behind them is zero and outputs are right but gradients are not."""
    model = tiny_model("llama", dtype=dtype).train()
    if name in ("row's length", "first token") and dtype == torch.bfloat16:
        pytest.skip("norms, or one token among many, leave an effect as small as rounding")
    looker = add_looker(model, LOOKERS[name])
    if is_trained:
        train(looker)
    with pytest.raises(SharedPromptError, match=r"hidden states of the model.+ first module that differs is model.lay"):
        forward(model)


def test_a_head_that_looks_at_its_row_is_refused():
    model = tiny_model("llama")
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] + args[0].mean(1, keepdim=True),))
    with pytest.raises(SharedPromptError, match=r"first module that differs is lm_head \(Linear\)"):
        forward(model)


def test_a_module_that_cannot_take_a_packed_row():
    model = tiny_model("llama")
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + args[0].view(-1, 32, args[0].shape[-1])
    )
    with pytest.raises(SharedPromptError, match="takes packed sequences, got RuntimeError"):
        forward(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_never_refused(name, dtype):
    """Rounding flips routes: with near ties in every layer, packed and alone differ by far more than by rounding."""
    flips = 0
    for seed in range(12):
        model = tiny_model(name, dtype=dtype).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
            tried = probe.Trial(model, torch.device("cpu"), None)
            pair = probe.Pair.choose(model.config, 0)
            found = tried._differences(tried._packed(pair), tried._alone(pair))[""]
            flips += found * probe.LEAST > 4 * torch.finfo(dtype).eps
        check.check_first_use(model, torch.device("cpu"))
    assert flips or dtype == torch.float16 or name != "mixtral"


def test_one_odd_pair_is_no_fault(monkeypatch):
    """As where the packed forward alone has sent a token to another expert: other pairs are asked."""
    model, packed, odd = tiny_model("llama"), probe.Trial._packed, []

    def with_another_route(self, pair):
        (hidden, *others), state = packed(self, pair)
        if len(odd) < probe.PAIRS - 1:
            odd.append(pair)
            hidden = hidden.index_add(0, torch.tensor([3]), hidden[4:5])
        return probe.Outcome((hidden, *others), state)

    monkeypatch.setattr(probe.Trial, "_packed", with_another_route)
    probe.Trial(model, torch.device("cpu")).run()
    assert len({str(pair) for pair in odd}) == probe.PAIRS - 1 > 0


# --- when, and what is left of it -------------------------------------------------------------------------------------


def test_once_per_model_mode_and_hooks(trials):
    model = tiny_model("llama")
    for _ in range(2):
        forward(model)
    assert len(trials) == 1
    model.train()
    for _ in range(2):
        forward(model)
    assert len(trials) == 2
    forward(model.eval())
    assert len(trials) == 2
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    forward(model)
    assert len(trials) == 3
    hook.remove()
    forward(model)
    assert len(trials) == 3
    forward(copy.deepcopy(model))
    assert len(trials) == 4


def test_tensors_that_modules_keep(trials):
    """As a dynamic RoPE keeps the longest sequence: they are as they were before, exchanged or written."""
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp

    class Counting(type(mlp)):
        def forward(self, x):
            self.longest = torch.maximum(self.longest, torch.tensor(x.shape[1]))
            self.calls.add_(1)
            return super().forward(x)

    mlp.__class__ = Counting
    mlp.longest, mlp.calls = torch.tensor(1000), torch.tensor(0)
    longest, calls = mlp.longest, mlp.calls
    forward(model)
    assert len(trials) == 1 and mlp.calls is calls and calls == 1 and longest == 1000
    mlp.longest = torch.tensor(1)
    model.train()
    check.check_first_use(model, torch.device("cpu"))
    assert len(trials) == 2 and mlp.longest == 1


def test_another_module_in_the_place_of_one(trials):
    model = tiny_model("llama").train()
    mlp = model.model.layers[0].mlp
    forward(model)

    class Mean(type(mlp)):
        def forward(self, x):
            return super().forward(x) + x.mean(1, keepdim=True)

    model.model.layers[0].mlp = Mean(model.config).to(mlp.up_proj.weight.dtype)
    with pytest.raises(SharedPromptError, match="expected the same in a packed row as in rows of their own"):
        forward(model)
    assert len(trials) == 2


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, **inputs):
        return self.module(**inputs)


def adds_mean(module, args, output, factor=0.0):
    return output + factor * output.mean(1, keepdim=True)


class AddsMean:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, module, args, output):
        return adds_mean(module, args, output, self.factor)

    def method(self, module, args, output):
        return self(module, args, output)


HOOKS = {
    "closure": lambda factor: lambda module, args, output: adds_mean(module, args, output, factor),
    "partial": lambda factor: functools.partial(adds_mean, factor=factor),
    "object": AddsMean,
    "method": lambda factor: AddsMean(factor).method,
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_of_the_same_code_is_tried_once(kind, trials):
    """A profiler registers one in each step. Its values do not count, as docs/limits.md says; other code is tried."""
    model = tiny_model("llama")
    norm = model.model.norm
    for factor in (0.0, 0.0, 0.5):
        handle = norm.register_forward_hook(HOOKS[kind](factor))
        forward(model)
        handle.remove()
    assert len(trials) == 1
    norm.register_forward_hook(lambda module, args, output: adds_mean(module, args, output, 0.5))
    with pytest.raises(SharedPromptError, match="first module that differs is model.norm"):
        forward(model)


def test_another_wrapper_in_each_step(trials, monkeypatch):
    """What is remembered of them does not grow, and a hook without weak references does no harm."""
    monkeypatch.setattr(check, "MOST_STATES", 3)
    model = tiny_model("llama")

    class Slots:
        __slots__ = ()

        def __call__(self, module, args, output):
            pass

    model.model.norm.register_forward_hook(Slots())
    for _ in range(8):
        forward(Wrapper(model))
        assert len(check._errors[model]) <= 3
    assert len(trials) == 8


@pytest.mark.parametrize("wrapped", [True, False])
def test_once_per_set_of_active_adapters(wrapped, trials):
    """Which layers tell, and the wrapper of adapters that have none."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("llama"), config)
    model.add_adapter("other", config)
    for expected in (1, 2, 3):
        if expected == 2:
            model.set_adapter("other")
        with model.disable_adapter() if expected == 3 else torch.no_grad():
            for _ in range(2):
                forward(model if wrapped else model.get_base_model())
        assert len(trials) == expected


def test_it_can_be_switched_off(trials):
    model = tiny_model("llama")
    train(add_looker(model, LOOKERS["row's mean"]))
    forward(model, self_check=False)
    assert not trials
    with pytest.raises(SharedPromptError):
        forward(model)  # what was found without a trial says nothing of one
    with pytest.raises(TypeError, match="self_check"):
        forward(model, self_check=1)


class Counting(OfEachToken):
    """Counts, notes and adapts a bias in every forward, as routers do that balance their experts."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("bias", torch.zeros(width))
        self.register_buffer("replaced", torch.zeros(1))
        self.calls = 0
        self.notes: list[int] = []

    def look(self, hidden):
        with torch.no_grad():
            self.bias += 0.1
        self.replaced = self.replaced + 1
        self.calls += 1
        self.notes.append(hidden.shape[1])
        return hidden + 0 * torch.rand(()).to(hidden)


class Owner:
    calls = 0

    def count(self, module, args, output):
        self.calls += 1


def test_the_layout_hook_asks_before_any_forward(trials):
    """A forward without a layout is tried too, so that ranks try it together; it is not refused."""
    model = tiny_model("llama")
    train(add_looker(model, LOOKERS["row's mean"]))
    dualkv.install_layout_hook(model)
    batch = MIXED.pack()
    model(torch.tensor([[3, 4, 5]]))
    assert len(trials) == 1
    for called in (model, model.model):
        with pytest.raises(SharedPromptError, match="first module that differs"):
            called(**row_of(batch))
    assert len(trials) == 2  # of the backbone, which is called by itself
    other = tiny_model("llama")
    train(add_looker(other, LOOKERS["row's mean"]))
    dualkv.install_layout_hook(other, self_check=False)
    other(**row_of(batch))
    assert len(trials) == 2


def test_a_wrapper_that_calls_what_it_has_kept():
    """PEFT's wrapper of a disabled adaption prompt does."""

    class Kept(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.module, self.kept = model, model.forward

        def forward(self, **inputs):
            inputs.pop("shared_prompt_layout", None)
            return self.kept(**inputs)

    for self_check in (True, False):
        with pytest.raises(SharedPromptError, match="a wrapper that calls the transformers model itself"):
            forward(Kept(tiny_model("llama")), self_check=self_check)


def test_it_leaves_no_trace():
    """The same generators, buffers, parameters and counters of hooks behind it as before."""
    model = tiny_model("llama").train()
    looker = add_looker(model, Counting)
    owner, calls, notes = Owner(), 0, {"rows": 0}
    owner.calls = 5

    def count(module, args, output):
        nonlocal calls
        calls += 1
        notes["rows"] += output.shape[1]

    handles = [model.model.norm.register_forward_hook(one) for one in (owner.count, count)]

    def traces():
        return (
            torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), looker.calls,
            list(looker.notes), looker.bias.tolist(), looker.replaced.tolist(), owner.calls, calls, dict(notes),
            {name: (one.tolist(), one._version) for name, one in model.named_parameters()},
        )  # fmt: skip

    before, buffers = traces(), dict(looker._buffers)
    check.check_first_use(model, torch.device("cpu"))
    assert traces() == before
    assert all(looker._buffers[name] is one for name, one in buffers.items())
    model(torch.tensor([[3, 4]]))
    assert looker.calls == 1 and calls == 1 and owner.calls == 6  # what counts without it
    for handle in handles:
        handle.remove()


SEEN: list[tuple[torch.dtype, bool]] = []  # not in a closure, which a trial puts back


@pytest.mark.parametrize(
    ("around", "outside", "hooked"),
    [(False, True, False), (False, True, True), (True, False, False), (True, True, False)],
)
def test_gradients_under_autocast(around, outside, hooked):
    """Autocast keeps casts of parameters while it lasts: those of a trial have no gradients.

    A library may have put it around the model's forward, as accelerate does: a trial computes in 16 bits, too.
    """
    found = []
    SEEN.clear()
    for self_check in (False, True):
        model, batch = tiny_model("llama", dtype=torch.float32).train(), MIXED.pack()
        model.model.layers[0].mlp.register_forward_hook(
            lambda _module, _args, output: SEEN.append((output.dtype, torch.is_autocast_cache_enabled()))
        )
        if around:
            model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            if hooked:
                dualkv.install_layout_hook(model, self_check=self_check)
                model(**row_of(batch)).logits.float().square().mean().backward()
            else:
                forward(model, self_check=self_check).sum().backward()
        found.append(gradients(model))
    types, caches = zip(*SEEN)
    assert {*types} == {torch.bfloat16}
    # The forward without a trial, forwards of a trial, and the one behind it; a forward's own autocast caches.
    assert caches[0] and caches[-1] and any(caches[1:-1]) == around and len(caches) > 3
    check_gradients(*found, 0.0)
    assert len(found[0]) == len(list(model.parameters()))


@pytest.mark.parametrize("wraps", [False, True])
def test_ranks_agree(wraps):
    """What one rank finds refuses the forward of all that run it together: their numbers of forwards stay equal."""
    found = run_ranks(_forward_of_rank, 2, wraps)
    assert "first module that differs is " in found[1]
    assert found[0].startswith("hidden states of the model") if wraps else found[0] == "exact"


def test_a_hook_of_one_process_among_several_starts_no_trial(monkeypatch):
    """The others would wait for it: loggers put hooks on the first rank alone."""
    model = tiny_model("llama")
    states = []
    for ranks in (1, 2):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda ranks=ranks: ranks)
        before = check._state_of(model)
        handle = model.model.norm.register_forward_hook(lambda *_: None)
        states.append(check._state_of(model) == before)
        handle.remove()
    assert states == [False, True]


def _forward_of_rank(rank, wraps, results):
    model = tiny_model("llama", dtype=torch.float32)
    if rank == 1:
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + output.mean(1, True))
    try:
        forward(nn.parallel.DistributedDataParallel(model) if wraps else model)
        results[rank] = "exact"
    except SharedPromptError as error:
        results[rank] = str(error)


def test_tokens_of_the_pair_have_no_meaning():
    """Tokens that stand for images, or end a sequence, would be treated otherwise."""
    config = tiny_model("llama").config
    config.eos_token_id, config.image_token_id = list(range(0, 97, 3)), 4
    ids = [one for number in range(probe.PAIRS) for part in probe.Pair.choose(config, number) for one in part]
    flat = {token for one in ids for token in (one if isinstance(one, list) else [one])}
    assert not flat & {*config.eos_token_id, 4}
