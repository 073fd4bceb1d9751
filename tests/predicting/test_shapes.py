"""Shapes read from configs are those of the models that transformers builds from the same configs, to the parameter."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from published import CONFIGS, QWEN3_VL_2B, TOTALS

from packtrain.core.errors import ConfigError
from packtrain.families import tiny
from packtrain.predicting.flops import forward_flops
from packtrain.predicting.shapes import read_shape, shape_from_config
from packtrain.predicting.values import Load, ParameterCounts
from packtrain.predicting.weights import part_of

TEXT_TYPES = ("llama", "mistral", "mixtral", "smollm3", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
VISION_TYPES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "idefics3",
    "smolvlm",
    "llava",
    "llava_next",
    "llava_onevision",
    "internvl",
    "gemma3",
    "paligemma",
)


def built(config: dict[str, Any]) -> Any:
    """The model of a config without memory for its weights."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    keys = copy.deepcopy(config)
    model_type = keys.pop("model_type")
    sees = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(AutoConfig.for_model(model_type, **keys))


def counted(model: Any) -> ParameterCounts:
    counts = Counter({"embedding": 0, "layers": 0, "head": 0})
    for name, weight in model.named_parameters():
        counts[part_of(name)] += weight.numel()
    assert counts["layers"]
    return ParameterCounts(**counts)


@pytest.mark.contract
@pytest.mark.parametrize("model_type", TEXT_TYPES + VISION_TYPES)
def test_an_empty_config_is_the_class_with_its_defaults(model_type: str) -> None:
    config: dict[str, Any] = {"model_type": model_type}
    if model_type in ("idefics3", "smolvlm"):
        config["text_config"] = {}  # older versions give a missing one a padding token that it does not have
    assert shape_from_config(config).parameters == counted(built(config))


@pytest.mark.contract
@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs_are_counted_as_the_models_they_describe(name: str) -> None:
    assert shape_from_config(CONFIGS[name]).parameters == counted(built(CONFIGS[name]))


@pytest.mark.parametrize("name", TOTALS)
def test_published_totals(name: str) -> None:
    assert shape_from_config(CONFIGS[name]).parameters.total == TOTALS[name]


@pytest.mark.contract
@pytest.mark.parametrize("family", [name for name in tiny.tiny_families() if name != "nanovlm"])
def test_tiny_models_are_counted_exactly(family: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = tiny.write(family, tmp_path)
    shape = read_shape(folder)
    assert shape.counted_from == "config"
    assert shape.notes == ()
    assert shape.parameters == counted(built(json.loads((folder / "config.json").read_text())))


@pytest.mark.parametrize(
    ("base", "part", "change"),
    [
        ("llama", None, {"attention_bias": True}),
        ("llama", None, {"mlp_bias": True, "head_dim": 32}),
        ("qwen3", None, {"attention_bias": True, "num_key_value_heads": None}),
        ("internvl", "vision_config", {"attention_bias": True, "use_qk_norm": True, "use_mask_token": True}),
        ("internvl", "vision_config", {"norm_type": "rms_norm", "use_mean_pooling": False}),
        ("internvl", "vision_config", {"use_absolute_position_embeddings": False}),
        ("internvl", None, {"downsample_ratio": 0.25, "tie_word_embeddings": True}),
        ("llava_onevision", "vision_config", {"vision_use_head": True}),
        ("llava_onevision", "text_config", {"tie_word_embeddings": True}),
        ("llava", None, {"multimodal_projector_bias": False, "vision_feature_layer": [-2, -1]}),
        ("llava_next", "text_config", {"tie_word_embeddings": True}),
        ("qwen2_vl", "text_config", {"tie_word_embeddings": True}),
        ("qwen3_vl", "text_config", {"tie_word_embeddings": True}),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": []}),
        ("smolvlm", None, {"tie_word_embeddings": True, "scale_factor": 2}),
        ("internvl", "vision_config", {"image_size": [448, 224]}),
    ],
)
def test_switches_change_counts_as_in_the_model(
    base: str, part: str | None, change: dict[str, Any], tmp_path: Path
) -> None:
    config = json.loads((tiny.write(base, tmp_path) / "config.json").read_text())
    before = shape_from_config(config).parameters
    (config if part is None else config[part]).update(change)
    after = shape_from_config(config).parameters
    assert after == counted(built(config))
    told_elsewhere = base in ("llava_next", "qwen3_vl") and "tie_word_embeddings" in change
    assert (after == before) is told_elsewhere, "the switch did nothing, or should have"


def test_dense_layers_of_a_mixture_are_counted_as_such() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    shape = shape_from_config(config)
    assert shape.parameters == counted(built(config))
    assert "4 layers without experts" in shape.notes[0]  # 0, 2 and 4 by the step, 1 by name


def test_sizes_of_the_reference_model() -> None:
    shape = shape_from_config(QWEN3_VL_2B)
    language, vision = shape.language, shape.vision
    assert vision is not None
    assert (language.hidden, language.layers, language.heads, language.kv_heads) == (2048, 28, 16, 8)
    assert (language.head_dim, language.intermediate, language.vocabulary, language.tied) == (128, 6144, 151936, True)
    assert (vision.hidden, vision.layers, vision.heads, vision.intermediate) == (1024, 24, 16, 4096)
    assert (vision.patch_elements, vision.patches_per_token, vision.full_attention_layers) == (3 * 2 * 16 * 16, 4, 24)
    assert vision.projector_flops_per_token == 4 * 2 * (4096 * 4096 + 4096 * 2048)
    assert vision.projector_elements_per_token == 4 * (4096 + 4096 + 4096 + 2048)


def test_windows_of_the_qwen2_5_encoder() -> None:
    vision = shape_from_config(CONFIGS["Qwen2.5-VL-3B"]).vision
    assert vision is not None
    assert (vision.gated, vision.full_attention_layers, vision.window_patches) == (True, 4, 64)


def test_pooling_merges_patches() -> None:
    vision = shape_from_config(CONFIGS["Gemma-3-4B"]).vision
    assert vision is not None
    assert vision.patches_per_token == 16  # 64 x 64 patches become 256 tokens


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama"}, (None, 0)),
        ({"model_type": "mistral"}, (4096, 32)),
        ({"model_type": "mistral", "sliding_window": None}, (None, 0)),
        ({"model_type": "qwen2"}, (None, 0)),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 30}, (4096, 2)),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, (4096, 24)),
        ({"model_type": "gemma3_text"}, (4096, 22)),
        ({"model_type": "gemma2"}, (4096, 13)),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 2, "sliding_window": 512}, (512, 13)),
        ({"model_type": "smollm3"}, (None, 0)),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 128}, (128, 9)),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["sliding_attention"] * 32}, (4096, 32)),
    ],
)
def test_sliding_windows_are_those_of_the_class(config: dict[str, Any], expected: tuple[int | None, int]) -> None:
    language = shape_from_config(config).language
    assert (language.window, language.window_layers) == expected
    modules = [module for module in built(config).modules() if type(module).__name__.endswith("Attention")]
    if config["model_type"] not in ("mistral", "qwen3_moe"):  # whose windows are a matter of the mask
        assert sum(bool(getattr(module, "sliding_window", None)) for module in modules) == expected[1]


def test_nanovlm_is_a_siglip_and_a_llama() -> None:
    shape = shape_from_config({"model_type": "nanovlm"})
    counts = shape.parameters
    text = {"model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32}
    text |= {"num_attention_heads": 15, "num_key_value_heads": 5, "vocab_size": 49218, "tie_word_embeddings": True}
    assert counts.language == counted(built(text)).total
    smolvlm = copy.deepcopy(CONFIGS["SmolVLM-256M"])  # has the same encoder
    assert counts.vision == shape_from_config(smolvlm).parameters.vision
    assert counts.projector == 768 * 16 * 960
    assert shape.vision is not None
    assert shape.vision.patches_per_token == 16


def test_an_unknown_model_is_read_by_its_usual_keys_and_says_so() -> None:
    known = {**CONFIGS["Llama-3.2-1B"]}
    shape = shape_from_config({**known, "model_type": "newcomer"})
    assert shape.parameters == shape_from_config(known).parameters
    assert "'newcomer' is not known" in shape.notes[0]


def test_an_unknown_multimodal_model_is_read_by_its_usual_keys_and_says_so() -> None:
    known = CONFIGS["LLaVA-1.5-7B"]
    shape = shape_from_config({**known, "model_type": "newcomer"})
    assert shape.parameters == shape_from_config(known).parameters
    assert "projector of two layers" in shape.notes[0]


def test_an_unknown_decoder_inside_a_known_family_is_noted() -> None:
    config = copy.deepcopy(CONFIGS["InternVL3-1B"])
    config["text_config"]["model_type"] = "newcomer"
    shape = shape_from_config(config)
    assert "the decoder 'newcomer' is not known" in shape.notes[0]
    assert shape.parameters.embedding == shape_from_config(CONFIGS["InternVL3-1B"]).parameters.embedding


# The same mixture under the names of several models: 8 experts of 64, of which 2 see a token, and in some a shared one.
MIXTURES = {
    "qwen": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "deepseek": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "ernie": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": [64, 32]},
    "none called so": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
    "shared": {"n_routed_experts": 7, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 64},
}


def _unknown(**more: Any) -> dict[str, Any]:
    text = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
    return {"model_type": "newcomer", **text, "vocab_size": 1000, **more}


VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VISION |= {"image_size": 56, "patch_size": 14}


@pytest.mark.parametrize("names", MIXTURES)
@pytest.mark.parametrize("sees", [False, True])
def test_of_an_unknown_mixture_only_the_experts_that_see_a_token_count_as_work(names: str, sees: bool) -> None:
    mixture = _unknown(**MIXTURES[names])
    dense = _unknown(intermediate_size=2 * 64)
    if sees:
        text = {**mixture, "model_type": "newcomer_text"}
        mixture = {"model_type": "newcomer", "text_config": text, "vision_config": VISION}
        text = {**dense, "model_type": "newcomer_text"}
        dense = {"model_type": "newcomer", "text_config": text, "vision_config": VISION}
    shape, plain = shape_from_config(mixture), shape_from_config(dense)
    assert (shape.vision is not None) == sees
    assert (shape.language.experts, shape.language.experts_used, shape.language.intermediate) == (8, 2, 64)
    router = 3 * 8 * 128
    assert shape.parameters.layers == plain.parameters.layers + 3 * 6 * (3 * 128 * 64) + router
    load = Load(tokens=100, squared_tokens=100**2, longest=100)
    found, expected = (forward_flops(one, load).total for one in (shape, plain))
    assert found == pytest.approx(expected + 2 * 100 * router, rel=1e-9)


def test_layers_without_experts_are_counted_as_such() -> None:
    shape = shape_from_config(_unknown(**MIXTURES["deepseek"], first_k_dense_replace=1))
    whole = shape_from_config(_unknown(**MIXTURES["deepseek"]))
    assert shape.parameters.layers == whole.parameters.layers - 8 * (3 * 128 * 64 + 128) + 3 * 128 * 512
    assert "1 layers without experts" in shape.notes[-1]


def test_a_size_of_none_is_none() -> None:
    shape = shape_from_config(_unknown(head_dim=0))
    assert shape.language.head_dim == 32


def test_an_encoder_that_cannot_be_read_is_a_note() -> None:
    text = {**_unknown(), "model_type": "newcomer_text"}
    config = {"model_type": "newcomer", "text_config": text, "vision_config": {"depth": 4, "patch_size": 14}}
    shape = shape_from_config(config)
    assert shape.vision is None
    assert shape.parameters.vision == 0
    assert shape.parameters.layers == shape_from_config(_unknown()).parameters.layers
    assert "its vision encoder is in no estimate of memory and time: config.json: vision_config" in shape.notes[1]
    with pytest.raises(ConfigError, match="hidden_size"):  # without the decoder there is nothing to plan by
        shape_from_config({**config, "text_config": {"model_type": "newcomer_text"}})


def test_an_unknown_model_without_sizes_is_an_error_that_helps() -> None:
    with pytest.raises(ConfigError, match=r"hidden_size[\s\S]*did you mean 'qwen3_vl'"):
        shape_from_config({"model_type": "qwen3vl"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size[\\s\\S]*wide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers[\\s\\S]*0"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"vocab_size": 1.5}, "vocab_size[\\s\\S]*1.5"),
    ],
)
def test_sizes_that_are_none_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_from_config({"model_type": "llama", **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": []}, "vision_config[\\s\\S]*list"),
        ({"text_config": 3}, "text_config[\\s\\S]*int"),
        ({"downsample_ratio": 0}, "downsample_ratio"),
        ({"vision_config": {"image_size": [1, 2, 3]}}, "image_size"),
    ],
)
def test_parts_that_are_none_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_from_config({"model_type": "internvl", **change})


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_shape(tmp_path)
