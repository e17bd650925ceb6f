# SPDX-License-Identifier: BSD-3-Clause
"""transformers' continuous batching on decoding over shared prefixes: stock attention's tokens, and one plan a step."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doc_examples import examples
from hybrid_models import OPTIONS
from sweep import CAUSAL_LMS, any_model, unknown_options
from tiny_models import COMMON, FAMILIES, SUPPORTED, VERSION, VOCABULARY, dualkv, tiny_model, transformers

from flash_attn_dualkv import SharedPrefixPlan, SharedPromptError, SharedPromptUnsupportedError, shared_prefix_decode
from flash_attn_dualkv.integrations.transformers import rollout
from flash_attn_dualkv.integrations.transformers.admission.decoding import tables_lack

pytestmark = pytest.mark.skipif(VERSION < (5, 17), reason="needs transformers 5.17 or newer")

FULL = dict(layer_types=["full_attention"] * 2)
# With sinks, with a softcap, and with windows, in some layers or all, which have no block tables.
MODELS = [("llama", {}), ("gemma2", FULL), ("gpt_oss", {})]
WINDOWS = {"gemma2", "gpt_oss", "mistral"}
MORE_MODELS = [("qwen3", {}), ("gpt_oss", FULL), ("gemma2", {}), ("mistral", {})]  # behind -m slow
PAGE = 16


def draw(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = draw(40, 7, 33, 1)  # two whole pages and a part of one, less than one, whole pages and a token, a token


@pytest.fixture
def registered() -> Iterator[None]:
    dualkv.register_decode()
    yield
    dualkv.unregister_decode()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What plans were updated with, and the layers that decoded."""
    seen: dict[str, list[Any]] = {"tables": [], "lengths": [], "boundaries": [], "layers": []}
    update, attention = SharedPrefixPlan.update, rollout.shared_prefix_decode

    def recorded(plan: Any, table: Any, lengths: Any, *, boundaries: Any) -> Any:
        is_captured = table.is_cuda and torch.cuda.is_current_stream_capturing()  # and has no values yet
        for name, tensor in (("tables", table), ("lengths", lengths), ("boundaries", boundaries)):
            seen[name].append(tensor if tensor is None else [] if is_captured else tensor.tolist())
        return update(plan, table, lengths, boundaries=boundaries)

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen["layers"].append(len(seen["tables"]))
        return attention(*args, **kwargs)

    monkeypatch.setattr(SharedPrefixPlan, "update", recorded)
    monkeypatch.setattr(rollout, "shared_prefix_decode", counted)
    return seen


def generate(
    model: Any, prompts: list[list[int]], *, returns: int = 1, eos: int = -1, page: int = PAGE, keeps: bool = False,
    **batching: Any,
) -> list[list[int]]:  # fmt: skip
    """The tokens of all requests; prompts are prefilled in chunks, beside requests that decode already."""
    options = dict(max_new_tokens=24, do_sample=returns > 1, pad_token_id=0, eos_token_id=eos)
    config = transformers.GenerationConfig(**options, num_return_sequences=returns)
    config_class = transformers.ContinuousBatchingConfig
    size = "page_size" if "page_size" in config_class.__dataclass_fields__ else "block_size"
    batching = {"num_blocks": 64, "max_batch_tokens": 64, size: page, **batching}
    torch.manual_seed(5)
    given = dict(generation_config=config, continuous_batching_config=config_class(**batching))
    found = model.generate_batch(prompts, **given, **({"persistent_manager": True} if keeps else {}))
    if errors := [one.error for one in found.values() if one.error is not None]:
        raise RuntimeError(errors[0])
    return [found[name].generated_tokens for name in sorted(found)]


def greedy(count: int = 24) -> Any:
    return transformers.GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=-1)


def generated_alone(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of each prompt by generate()."""
    ids = [torch.tensor([one], device=model.device) for one in prompts]
    return [model.generate(one, greedy())[0, one.shape[1] :].tolist() for one in ids]


def with_large_scores(model: Any) -> Any:
    """So that keys, windows, softcaps and sinks matter."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "q_proj" in key:
                parameter.mul_(40)
    return model


def stock_model(name: str, **options: Any) -> Any:
    """On the attention of stock continuous batching."""
    return tiny_model(name, dtype=torch.float32, attention=FAMILIES[name].stock, **options)


@pytest.mark.parametrize(
    ("name", "options"), [*MODELS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_MODELS)]
)
def test_tokens(name, options, steps, request):
    """Those of generate(), and of stock continuous batching but for softcaps, which it drops."""
    model = with_large_scores(stock_model(name, **options))
    expected = generated_alone(model, PROMPTS)
    assert not steps["tables"] and (generate(model, PROMPTS) == expected) == (name != "gemma2")
    request.getfixturevalue("registered")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert generate(model, PROMPTS) == expected
    is_warned = any("expected layers without windows, to decode over pages" in str(one.message) for one in caught)
    assert is_warned == (tables_lack(model.config) is not None) == (options != FULL and name in WINDOWS)
    assert model.config._attn_implementation == FAMILIES[name].stock
    if is_warned:
        assert not steps["layers"]
    else:  # each step is planned once for two layers
        assert len(steps["tables"]) >= 23
        assert steps["layers"] == [step for step in range(1, len(steps["tables"]) + 1) for _ in range(2)]


# Attention that is called twice a layer, keys of an earlier layer, keys of more heads than the
# configuration has, and a window that the mask alone has: what becomes of them. All other models
# behind -m slow.
UNUSUAL = {
    "diffllama": "expected one attention over its keys, to decode over pages, got two",
    "gemma3_text": None,
    "gemma3n_text": None,
    "jetmoe": r"expected keys and values of \(2, 8\), as pages have them by the configuration",
    "phimoe": None,
}
ANY = [pytest.param(name, marks=() if name in UNUSUAL else pytest.mark.slow) for name in CAUSAL_LMS]


@pytest.mark.parametrize("name", ANY)
@pytest.mark.filterwarnings("ignore:model. expected")
def test_tokens_of_any_model(name, request):
    """Those of generate(), or an error that says what the model has."""
    try:
        model = any_model(name, **unknown_options(name)).double()
    except SharedPromptError as error:
        pytest.skip(f"has no attention: {error}")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.9 if "q_proj" in key else 0.15, generator=generator)
    prompts = PROMPTS[:2]
    try:
        expected = generated_alone(model, prompts)
        assert generate(model, prompts) == expected
    except Exception as error:
        assert name not in UNUSUAL or VERSION < (5, 24)
        pytest.skip(f"stock continuous batching has other tokens: {type(error).__name__}")
    request.getfixturevalue("registered")
    said = None
    try:
        assert generate(model, prompts) == expected
    except (SharedPromptError, RuntimeError) as error:
        said = str(error)
    message = UNUSUAL.get(name, said and "expected .*, got ")
    assert said == message or re.search(message, said)


def rollout_of(allocators: dict[int, Any], requests: int) -> rollout.Rollout:
    """Of a cache of transformers 5.18 or newer."""
    cache = SimpleNamespace(device="cpu", layer_to_allocator=allocators, update=lambda *args, kwargs: None)
    return rollout.Rollout(cache, requests)


def test_returns_share_pages(steps, request):
    """Forks of one prompt, sampled: the plan gets their pages as one, and where training cuts them."""
    model, returns = stock_model("qwen3"), 3
    expected = generate(model, PROMPTS, returns=returns, max_batch_tokens=128)
    assert len({tuple(one) for one in expected}) == len(expected) >= len(PROMPTS)
    request.getfixturevalue("registered")
    assert generate(model, PROMPTS, returns=returns, max_batch_tokens=128) == expected
    table, lengths, boundaries = (steps[name][-1] for name in ("tables", "lengths", "boundaries"))
    assert sorted(boundaries) == sorted(len(one) - 1 for one in PROMPTS for _ in range(returns))
    assert [length - cut for length, cut in zip(lengths, boundaries)] == [24] * 4 * returns
    for length in (40, 33):
        rows = [row for row, cut in zip(table, boundaries) if cut == length - 1]
        whole = length // PAGE
        assert len({tuple(row[:whole]) for row in rows}) == 1 and len({row[whole] for row in rows}) == returns


def test_repeated_prompts_share_pages(registered, steps):
    """TRL repeats a prompt for each of its completions; transformers then finds equal pages itself."""
    model = stock_model("llama")
    alone = generate(model, PROMPTS[:1])
    assert generate(model, PROMPTS[:1] * 4) == alone * 4
    assert len({tuple(row[:2]) for row in steps["tables"][-1]}) == 1


def test_copies_are_queued_apart(registered, steps, monkeypatch):
    """One request of each prompt first, whose pages the others then find; outputs are in the order of the prompts."""
    manager = transformers.generation.continuous_batching.continuous_api.ContinuousBatchingManager
    queued, stock = [], manager.add_request
    monkeypatch.setattr(manager, "add_request", lambda *args, **given: queued.append(given) or stock(*args, **given))
    model, (one, two, three) = stock_model("qwen3"), draw(40, 7, 33)
    repeated = [one, two, one, three, two, one]
    alone = {tuple(prompt): tokens for prompt, tokens in zip((one, two, three), generate(model, [one, two, three]))}
    queued.clear()
    assert generate(model, repeated) == [alone[tuple(prompt)] for prompt in repeated]
    distinct = sorted((one, two, three), reverse=True)
    again = [prompt for prompt in distinct if prompt is not three]
    assert [given["input_ids"] for given in queued] == [*distinct, *again, one]
    assert [given["request_id"] for given in queued[-1:]] == ["req_5"]


def test_a_match_of_pages_leaves_a_token():
    """A prompt that ends with a page is matched up to that page, or its response would be written into it."""

    def stock(cache: Any, name: str, tokens: list[int]) -> int:
        return len(tokens) // cache.block_size * cache.block_size

    found = [rollout._match_less(stock, SimpleNamespace(block_size=16), "req_0", [0] * size) for size in range(15, 34)]
    assert found == [0, 0, *[16] * 16, 32]


def test_graphs_are_captured_on_demand():
    """Nothing is warmed up."""
    warmed: list[Any] = []
    for name in (*rollout.NAMES, "paged|sdpa"):
        model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=name))
        rollout._skip_warmup(lambda runner, model: warmed.append(model), None, model)
    assert [model.config._attn_implementation for model in warmed] == ["paged|sdpa"]


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        (rollout.NAMES[0], {}, (False, True)),
        (rollout.NAMES[0], {"use_cuda_graph": True}, (True, True)),
        (rollout.NAMES[0], {"q_padding_interval_size": 128}, (True, True)),  # asks for graphs
        (rollout.NAMES[0], {"max_blocks_per_request": 0}, (True, True)),  # nothing decodes on block tables
        (rollout.NAMES[0], {"decode_compile_config": "reduce-overhead"}, (True, False)),
        (rollout.NAMES[1], {}, (False, False)),  # a CPU's model, on a host with a GPU
    ],
)
def test_graphs(name, given, expected, registered, monkeypatch):
    """Only steps of decoding are captured, where neither transformers nor the user decides otherwise."""
    initialization = transformers.generation.continuous_batching.initialization
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "cuda", raising=False)
    monkeypatch.setattr(initialization, "resolve_max_memory_percent", lambda **_: None)
    if mode := given.get("decode_compile_config"):
        given = {"decode_compile_config": transformers.CompileConfig(mode=mode)}
    config = transformers.Qwen3Config()
    config._attn_implementation_internal = name
    resolve = initialization.resolve_continuous_batching_config
    settings = transformers.ContinuousBatchingConfig(**given)
    more = {"device": torch.device("cpu")} if "device" in inspect.signature(resolve).parameters else {}
    assert resolve(config, settings, None, False, **more).use_cuda_graph == expected


def test_copies_wait_for_no_more_prompts_than_the_cache_holds():
    """The others' pages would be gone before their copies come."""
    queued = []

    def stock(manager: Any, inputs: list[list[int]]) -> None:
        queued.extend(sorted(inputs, reverse=True))

    config = SimpleNamespace(max_batch_tokens=64, num_blocks=None, block_size=16)
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=rollout.NAMES[0]))
    prompts = [[number] * 32 for number in range(6, 0, -1)]
    manager = SimpleNamespace(model=model, continuous_batching_config=config)
    for pages, together in ((None, 6), (12, 3), (2, 1)):
        config.num_blocks = pages
        queued.clear()
        rollout._add_copies_apart(stock, manager, [prompt for prompt in prompts for _ in range(2)])
        windows = [prompts[first : first + together] for first in range(0, 6, together)]
        assert queued == [prompt for window in windows for _ in range(2) for prompt in window]


def test_end_of_a_request(steps, request):
    """Requests that end early leave the batch, and their pages go to others."""
    model = stock_model("llama")
    tokens = generate(model, PROMPTS)
    eos = tokens[0][3]
    expected = generate(model, PROMPTS, eos=eos)
    assert len({*map(len, expected)}) > 1
    request.getfixturevalue("registered")
    assert generate(model, PROMPTS, eos=eos) == expected
    assert len({len(one) for one in steps["lengths"]}) > 1


def test_evicted_requests(steps, request):
    """Where pages run out, a request begins anew with what it has generated, and is cut where it was."""
    model, prompts = stock_model("llama"), draw(40, 39, 38, 37)
    expected = generate(model, prompts)
    request.getfixturevalue("registered")
    # 13 pages: the prompts alone need 12, and each request 4 in the end.
    assert generate(model, prompts, num_blocks=13, allow_block_sharing=False) == expected
    assert any(len(one) < 4 for one in steps["lengths"])
    assert {cut for one in steps["boundaries"] for cut in one} == {39, 38, 37, 36}


@pytest.mark.parametrize("attention", ["dualkv", pytest.param("sdpa", marks=pytest.mark.slow), "eager"])
def test_attention_of_the_model(attention, registered, steps):
    """Whatever it is, the model decodes here and has it afterwards, under a manager of its own too."""
    model = tiny_model("llama", dtype=torch.float32, attention=attention)
    tokens = generate(model, PROMPTS[:1])
    planned = len(steps["tables"])
    assert planned == 23 and model.config._attn_implementation == attention
    batching = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    with model.continuous_batching_context_manager(greedy(), continuous_batching_config=batching) as manager:
        name = manager.add_request(PROMPTS[0])
        assert manager.get_result(name, timeout=600).generated_tokens == tokens[0]
    assert len(steps["tables"]) == 2 * planned and model.config._attn_implementation == attention
    assert generated_alone(model, PROMPTS[:1]) == tokens
    assert len(steps["tables"]) == 2 * planned


def test_documented_lines(registered, steps):
    names = {"model": stock_model("llama"), "prompts": PROMPTS, "config": greedy(3)}
    exec(*examples("rollouts", "rollouts"), names)
    assert [len(one.generated_tokens) for one in names["outputs"].values()] == [3] * 4 and len(steps["tables"]) == 2


def test_unregister(steps):
    seams = rollout._seams()
    before = [getattr(owner, name) for owner, name, _ in seams]
    dualkv.unregister_decode()
    dualkv.register_decode()
    dualkv.register_decode()
    assert all(getattr(owner, name) is not stock for (owner, name, _), stock in zip(seams, before))
    dualkv.unregister_decode()
    assert [getattr(owner, name) for owner, name, _ in seams] == before
    assert not transformers.AttentionInterface._global_mapping.keys() & rollout.NAMES
    assert generate(stock_model("llama"), PROMPTS[:1]) and not steps["layers"]


@pytest.mark.slow
def test_kept_managers_are_of_their_attention(registered):
    """Stock attention does not read the block tables of this one's, which has no masks: neither takes the other's."""
    model = with_large_scores(stock_model("llama"))
    expected = generate(model, PROMPTS)
    assert [generate(model, PROMPTS, keeps=True) for _ in range(2)] == [expected] * 2
    assert hasattr(model, "_cached_continuous_batching_manager")
    dualkv.unregister_decode()
    assert not hasattr(model, "_cached_continuous_batching_manager")
    assert generate(model, PROMPTS, keeps=True) == expected
    dualkv.register_decode()
    with pytest.raises(SharedPromptError, match=r"expected one of after register_decode\(\) .*, got one of stock"):
        generate(model, PROMPTS, keeps=True)
    model.destroy_cached_continuous_batching_manager()
    assert generate(model, PROMPTS) == expected


@pytest.mark.parametrize("name", [one for one in ("qwen3_next", "lfm2", "bamba") if one in transformers.CONFIG_MAPPING])
def test_hybrids_are_refused(name, registered):
    config = transformers.AutoConfig.for_model(name, **{**COMMON, **OPTIONS[name]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(SharedPromptUnsupportedError, match=rf"^model: expected attention .* got a hybrid \({name}\)"):
        generate(model, PROMPTS)
    assert model.config._attn_implementation == before


def test_refused(registered):
    assert "deepseek_v3" in SUPPORTED
    with pytest.raises(SharedPromptUnsupportedError, match="got multi-head latent attention"):
        generate(stock_model("deepseek_v3"), PROMPTS)
    model = stock_model("llama")
    with pytest.raises(SharedPromptError, match="page_size: expected a multiple of 16, got 24"):
        generate(model, PROMPTS, page=24)
    assert model.config._attn_implementation == "sdpa"
    module, q = model.model.layers[0].self_attn, torch.zeros(1, 4, 1, 8)
    with pytest.raises(SharedPromptError, match="attn_implementation: expected another outside of continuous batching"):
        rollout.attend(module, q, q, q, None)
    made = SimpleNamespace(windows={0: 0})
    for given, message in ((dict(position_bias=q), "got position_bias"), (dict(is_causal=False), "expected causal")):
        with pytest.raises(SharedPromptError, match=message):
            rollout.attend(module, q, q, q, None, shared_prefix_rollout=made, **given)


def test_older_transformers(monkeypatch):
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(rollout.importlib, "import_module", missing)
    with pytest.raises(SharedPromptError, match="transformers: expected 5.17 or newer, got "):
        dualkv.register_decode()


def test_padded_step():
    """CUDA graphs pad a step with requests without keys: they read nothing, and write to the trash alone."""
    generator = torch.Generator().manual_seed(2)
    pages = [torch.randn((6, PAGE, 2, 8), generator=generator) for _ in "kv"]
    before = [one.clone() for one in pages]
    allocator = SimpleNamespace(write_trash_index=5 * PAGE, get_cache_for_block_table=lambda layer: tuple(pages))
    made = rollout_of({3: allocator}, 4)
    made._positions = torch.tensor([18, 7777, 7])  # of padding, anything
    q, k, v = (torch.randn((3, heads, 8), generator=generator) for heads in (4, 2, 2))
    table, keys = torch.tensor([[2, 4], [-1, -1], [-1, -1]], dtype=torch.int32), 19
    offsets = torch.tensor([0, keys, keys, keys], dtype=torch.int32)
    out = made.decode(3, q, k, v, {"block_table": table, "cu_seq_lens_k": offsets}, {})
    assert not out[1:].any()
    for new, old, page in zip((k, v), before, pages):
        assert torch.equal(page[4, 2], new[0])
        old[4, 2], old[5, 0] = new[0], page[5, 0]
        assert torch.equal(page, old)
    plan = SharedPrefixPlan(1, 2, num_pages=6, page_size=PAGE, num_heads=4, num_kv_heads=2, head_dim=8, device="cpu")
    plan.update(table[:1], torch.tensor([keys], dtype=torch.int32))
    assert torch.equal(out[:1], shared_prefix_decode(q[:1], *pages, plan))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("name", "options"), [("qwen3", {}), ("gpt_oss", FULL), ("gemma2", {})])
def test_on_a_gpu(name, options, graphs, steps, registered):
    """With CUDA graphs and two batches under way as without. Rounding may turn over a choice, and what follows it."""
    shape = dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    model = tiny_model(name, dtype=torch.bfloat16, attention="eager", **{**shape, **options}).cuda()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    prompts = draw(300, 40, 77, 129)
    expected = generated_alone(model, prompts)
    batching = dict(num_blocks=256, max_batch_tokens=256, use_cuda_graph=graphs, use_async_batching=graphs)
    got = generate(model, prompts, **batching)
    assert steps["layers"] or tables_lack(model.config)
    assert model.config._attn_implementation == "eager"
    same = [one == other for ours, stock in zip(got, expected) for one, other in zip(ours[:8], stock)]
    assert sum(same) >= 0.8 * len(same)


@pytest.mark.slow
def test_divided_walks(steps, request, monkeypatch):
    """Plans are of the kind that was asked for, and requests get the same tokens."""
    model = stock_model("llama")
    expected = generate(model, PROMPTS)
    request.getfixturevalue("registered")
    kinds: list[str] = []
    update = SharedPrefixPlan.update
    monkeypatch.setattr(
        SharedPrefixPlan, "update", lambda plan, *args, **own: (kinds.append(plan.exact), update(plan, *args, **own))[1]
    )
    for exact in ("split", "trainer"):
        kinds.clear()
        dualkv.register_decode(exact=exact)
        assert generate(model, PROMPTS) == expected
        assert {*kinds} == {exact}


def test_arguments_that_are_none():
    with pytest.raises(ValueError, match="^boundary: expected 'replicate' or 'gather', got 'copy'"):
        dualkv.register_decode(boundary="copy")
    with pytest.raises(ValueError, match="^exact: expected 'trainer' or 'split', got 'fast'"):
        dualkv.register_decode(exact="fast")
