"""Every text model of transformers is exact in packs on the attention that it gets, or refused with a reason."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import random
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

from packtrain.core.errors import ConfigError, DataError
from packtrain.delivery.collate.collators import PackCollator, StaticShapes
from packtrain.delivery.encode.encoded_sample import EncodedSample, PackedRow, PackKey
from packtrain.delivery.encode.synthetic_samples import synthetic_sample
from packtrain.families.contracts import contract_for
from packtrain.modeling.attention import choose_backend, set_attention

TYPES = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "dff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout"), 0.0),
    **{"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
    **{"vocab_size": 96, "rotary_dim": 4, "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
LATENT = {"num_key_value_heads": 4}  # every head has keys of its own
MORE: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
    "phimoe": {"sliding_window": 8},
}
# Why varlen is refused for them, and what `auto` is instead, on a CPU and on a GPU.
SPECIAL = {
    "gemma2": ("caps its attention scores", "eager"),
    "gpt_oss": ("sinks", "eager"),
    "qwen2_moe": ("windows are only in its mask", "sdpa"),
    "phimoe": ("windows are only in its mask", "sdpa"),
    "doge": ("its own scores", "sdpa"),
    "gpt_neo": ("cannot be replaced", "eager"),
    "codegen": ("cannot be replaced", "eager"),
}
PLAIN = ("jetmoe", "gemma4_text", "deepseek_v3", "mistral")  # views of the result; heads that differ; in layers, too
# Too much of their own for sizes by name, or no model without another one.
SIZED_OTHERWISE = (
    *("bamba", "cohere_compass_text", "dbrx", "dots1", "gemma3n_text", "gemma4_assistant", "granitemoehybrid"),
    *("mamba2", "mpt", "zamba", "zamba2", "zaya"),
)
MOST_WEIGHTS = 2_000_000
LENGTHS = (20, 1, 31)
CUDA, HALF = torch.device("cuda"), torch.bfloat16


def small_config(model_type: str) -> Any:
    if model_type not in TYPES:
        pytest.skip(f"{model_type} is not in this version of transformers")
    known = AutoConfig.for_model(model_type)
    has = {**known.to_dict(), **dict.fromkeys(known.attribute_map)}
    given = {name: value for name, value in SMALL.items() if name in has}
    given |= {name: [has[name][0], has[name][-1]] for name in ("layer_types", "mlp_layer_types") if has.get(name)}
    given = {name: value for name, value in given.items() if name not in ("sliding_window", "q_lora_rank") or has[name]}
    return type(known)(**(given | (LATENT if "kv_lora_rank" in has else {}) | MORE.get(model_type, {})))


def small_model(model_type: str) -> Any:
    """With weights so large that a leak is seen."""
    config = small_config(model_type)
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if weights > MOST_WEIGHTS:
        pytest.skip(f"{model_type} has {weights} weights: its sizes have other names")
    model = AutoModelForCausalLM.from_config(config).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=draw) * 0.2)
    return model


def plain(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))


def drawn(tokens: int) -> EncodedSample:
    ids = torch.randint(5, 90, (tokens,), generator=torch.Generator().manual_seed(tokens))
    return synthetic_sample(str(tokens), ids, supervised=tokens - 1)


def assert_exact(stock: Any, backend: str) -> str:
    """A row with padding on this backend against every sample alone on the model as transformers made it."""
    model, contract = copy.deepcopy(stock), contract_for(plain(stock.config))
    used = set_attention(model, backend, contract)
    samples = [drawn(tokens) for tokens in LENGTHS]
    collate = PackCollator(
        contract, pad_id=0, static_shapes=StaticShapes(tokens=80), boundaries=used.startswith("varlen")
    )
    batch = dict(collate([PackedRow(key=PackKey(0, 0), samples=tuple(samples))]))
    del batch["labels"]
    with torch.no_grad():
        packed = model(**batch).logits[0]
        for sample, found in zip(samples, packed.split([*LENGTHS, 80 - sum(LENGTHS)]), strict=False):
            alone = stock(input_ids=sample.input_ids[None], use_cache=False).logits[0]
            assert (found - alone).abs().max() < 1e-4 * alone.abs().max(), f"{len(sample)} tokens on {used}"
    return used


@pytest.mark.contract
@pytest.mark.parametrize("model_type", SPECIAL)
def test_what_varlen_cannot_express_is_refused_and_auto_is_exact(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, otherwise = SPECIAL[model_type]
    model = small_model(model_type)
    if model_type == "doge" and "allow_is_causal_skip" not in inspect.getsource(inspect.getmodule(type(model))):
        pytest.skip("alone, doge of this version of transformers sees what follows")
    contract = contract_for(plain(model.config))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_backend(model, contract, device=CUDA, dtype=HALF) == otherwise
    refused = ("varlen", "sdpa") if otherwise == "eager" else ("varlen",)
    for backend in refused:
        with pytest.raises(ConfigError, match=rf"(?s){reason}.*use auto, which is {otherwise} here"):
            set_attention(model, backend, contract)
    assert assert_exact(model, "auto") == otherwise
    assert assert_exact(model, "eager") == "eager"


@pytest.mark.contract
@pytest.mark.parametrize("backend", ["auto", "varlen"])
@pytest.mark.parametrize("model_type", PLAIN)
def test_models_with_plain_scores_are_exact(model_type: str, backend: str) -> None:
    assert_exact(small_model(model_type), backend)


@pytest.mark.full
@pytest.mark.contract
@pytest.mark.parametrize(
    "model_type",
    random.Random(transformers.__version__).sample(sorted(set(TYPES) - {*SPECIAL, *PLAIN, *SIZED_OTHERWISE}), 24),
)
def test_any_text_model_is_exact_or_refused(model_type: str) -> None:
    """Other ones with every version of transformers."""
    try:
        contract_for(plain(small_config(model_type)))
    except ConfigError:
        return
    stock = small_model(model_type)
    assert_exact(stock, "auto")
    with contextlib.suppress(ConfigError):
        assert_exact(stock, "varlen")


@pytest.mark.contract
def test_encoders_are_refused_though_transformers_offers_them_as_decoders() -> None:
    for model_type in sorted(set(TYPES) & set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)):
        config = AutoConfig.for_model(model_type)
        with pytest.raises(ConfigError, match="an encoder"):
            contract_for(plain(config))


def test_a_row_longer_than_the_models_buffer_is_refused() -> None:
    contract = contract_for(plain(small_config("gpt_neo")))
    row = PackedRow(key=PackKey(0, 0), samples=(drawn(200),))
    PackCollator(contract, pad_id=0, pad_to_multiple=256)([row])
    with pytest.raises(DataError, match=r"(?s)a row of 320 positions.*at most 256"):
        PackCollator(contract, pad_id=0, pad_to_multiple=320)([row])
