"""Every causal LM that transformers can make from a tiny configuration: exact on shared prompts, or refused."""

from __future__ import annotations

import pytest
import torch
from hybrid_models import OPTIONS as HYBRID_OPTIONS
from tiny_models import COMMON, Samples, check_equal, dualkv, replicated_logps, stock_twin, transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flash_attn_dualkv import SharedPromptError

# Sizes and switches by the names that configurations have for them; those that a model does not know are ignored.
OPTIONS = dict(
    **COMMON,
    d_model=32, n_embd=32, n_head=4, n_layer=2, n_positions=2048, ffn_dim=48, decoder_layers=2, encoder_layers=2,
    decoder_attention_heads=4, encoder_attention_heads=4, decoder_ffn_dim=48, encoder_ffn_dim=48, head_dim=8,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_topk=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, sliding_window=5,
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=97, is_decoder=True, dropout=0.0, hidden_dropout=0.0,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, activation_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0,
)  # fmt: skip
SAMPLES = Samples.random([(40, [12, 3]), (9, [5, 9, 0]), (2, [7])]).take([0, 2, 1, 5, 3, 4])


def any_model(model_type: str, **options):
    """A model, or a skip: some configurations want to be told more."""

    def make():
        own = HYBRID_OPTIONS.get(model_type, {})
        config = transformers.AutoConfig.for_model(model_type, **{**OPTIONS, **own, **options})
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dualkv")

    try:
        with torch.device("meta"):
            elements = sum(one.numel() for one in make().parameters())
        if elements < 5_000_000:
            with torch.random.fork_rng():
                torch.manual_seed(1)
                return make().eval()
    except Exception as error:
        pytest.skip(f"cannot be made: {type(error).__name__}")
    pytest.skip(f"is not tiny: {elements} parameters")


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_exact_or_refused(model_type):
    model = any_model(model_type)
    for dtype in (torch.float64, torch.float32):  # experts are multiplied by kernels that have no float64
        model = model.to(dtype)
        own: Exception | None = None
        try:
            got, _ = dualkv.shared_prompt_forward(model, SAMPLES.pack())
        except SharedPromptError:
            return
        except Exception as error:
            own = error
        try:
            with torch.no_grad():
                expected, _ = replicated_logps(stock_twin(model, "eager"), SAMPLES)
        except Exception as error:
            failure = error
            continue
        if own is not None:
            raise own
        # Rounding: many models compute parts in float32 whatever their type. What goes wrong is 1e-2 and more.
        check_equal(got, expected, 2e-5)
        return
    pytest.skip(f"the stock model cannot run: {type(failure).__name__}")
