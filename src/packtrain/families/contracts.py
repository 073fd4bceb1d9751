"""How samples are joined into one packed row: a description that every family gives, and what is refused.

The names are the arguments of the models' forward passes. A model is refused where its samples would see each other
inside a packed row. How an unlisted model merges media is read off its processor (`delivery.encode.joins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from packtrain.core.errors import ConfigError
from packtrain.families.family import BatchContract, Family, ProcessorSettings
from packtrain.families.registry import find_family
from packtrain.families.shape import Config

# Rotary positions that follow the longest sample of a row: where transformers looks for the length up to which they
# do not, first the config's own keys.
_ROPE_BY_LENGTH: Mapping[str, tuple[str, ...]] = {
    "dynamic": ("max_position_embeddings",),
    "longrope": ("original_max_position_embeddings", "max_position_embeddings"),
}
HYBRID = "its layers carry state along the row, so samples would leak into the next"

# Models with a buffer of this many places for a row, whatever the positions in it.
_ROW_BUFFERS = {"gpt_neo": "max_position_embeddings"}
_ISOLATED_LAYERS = ("full_attention", "sliding_attention")
_STATEFUL_LAYERS = ("linear", "conv", "mamba", "recurrent", "rnn", "ssm", "hybrid")  # parts of their names
_CHUNKED = "its chunks start at the row, not at each sample"
# Keys of a config that only models with stateful layers have.
_STATEFUL_KEYS = (
    *("attn_type_list", "block_types", "conv_L_cache", "hybrid_override_pattern", "layers_block_type"),
    *("linear_attn_config", "linear_conv_kernel_dim", "mamba_d_conv", "mamba_d_state", "ssm_state_size"),
)
_ROUTER_LOSS = "output_router_logits"
_CAPACITIES = ("expert_capacity", "capacity_factor", "moe_capacity_factor", "moe_expert_capacity")
# Keys of a model's config that only models with media have.
_MEDIA_CONFIGS = (
    "vision_config",
    "audio_config",
    "vision_tower",
    "mm_vision_tower",
    "image_token_id",
    "video_token_id",
)


def contract_for(model: ProcessorSettings | Config, *, packing: bool = True) -> BatchContract:
    """The contract of a model, given by its folder's settings or by its config as plain values.

    Raises ConfigError with the reason for a model whose samples cannot be packed, or cannot be trained at all. An
    unlisted model with media gets one without media, to be completed from its processor.
    """
    if isinstance(model, ProcessorSettings):
        model_type, config, where = model.model_type, model.config, model.folder
        multimodal = bool(model.image or model.video or model.processor)
    else:
        model_type, config = str(model.get("model_type") or "text"), model
        where, multimodal = str(model.get("_name_or_path") or "") or "the model's config", False
    family = find_family(model_type)
    _refuse_what_rows_share(config, where)
    if impossible := _no_training(family, config):
        raise _untrainable(where, model_type, impossible)
    if packing and (reason := (family.refused if family is not None else "") or _layer_reason(config)):
        raise _unpackable(where, model_type, reason)
    together, row = _longest_together(config), config.get(_ROW_BUFFERS.get(model_type, ""))
    if family is not None and family.contract is not None:
        return replace(family.contract, model_type=model_type, longest_together=together)
    unlisted = multimodal or any(config.get(key) is not None for key in _MEDIA_CONFIGS)
    return BatchContract(model_type=model_type, longest_together=together, longest_row=row, unlisted=unlisted)


def _no_training(family: Family | None, config: Config) -> str:
    """Why a model cannot be trained on next tokens; an empty string where it can."""
    if family is not None and not (family.causal and family.in_transformers):
        return family.refused
    if config.get("is_encoder_decoder"):
        return "it has an encoder besides its decoder"
    hears, sees = (config.get(key) is not None for key in ("audio_config", "vision_config"))
    return "it takes audio, which has no token rule yet" if hears and not sees else ""


def _longest_together(config: Config) -> int | None:
    """The length from which rotary frequencies follow the longest sample of a row; None where they never do."""
    inner = config.get("text_config")
    limits = []
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        rope = part.get("rope_parameters") or part.get("rope_scaling")
        if not isinstance(rope, Mapping):
            continue
        nested = [value for value in rope.values() if isinstance(value, Mapping)]  # one for each type of layer
        for one in nested or [rope]:
            keys = _ROPE_BY_LENGTH.get(str(one.get("rope_type") or one.get("type")), ())
            lengths = (held.get(key) for key in keys for held in (part, one))
            limits += [length for length in lengths if isinstance(length, int)][:1]
    return min(limits, default=None)


def _layer_reason(config: Config) -> str | None:
    """Why layers of the language model let samples of one row see each other; None where they do not."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        family = find_family(str(part.get("model_type")))
        if family is not None and family.refused:
            return family.refused
        for kind in map(str, part.get("layer_types") or ()):
            if kind not in _ISOLATED_LAYERS:
                stateful = any(name in kind for name in _STATEFUL_LAYERS)
                unknown = _CHUNKED if kind.startswith("chunked") else "not known to separate the samples of a row"
                return f"{kind} layers: {HYBRID if stateful else unknown}"
        for key in _STATEFUL_KEYS:
            if part.get(key) is not None:
                return f"{key} in its config: {HYBRID}"
    return None


def _refuse_what_rows_share(config: Config, where: str) -> None:
    """Refuse what makes a sample depend on the others of its batch, packed or padded.

    Models add the loss of their router to that of a row themselves, where it would be divided by the step's tokens.
    Experts of a fixed capacity drop tokens once others have filled them.
    """
    inner = config.get("text_config")
    parts = {"": config, "text_config.": inner if isinstance(inner, Mapping) else {}}
    for name, part in parts.items():
        for key in _CAPACITIES:
            if part.get(key) is not None:
                raise ConfigError(
                    where,
                    got=f"model type {config.get('model_type')!r} with {name}{key}: {part[key]}: its experts drop "
                    "tokens when others of the batch have filled them",
                    expected="a model whose experts take all tokens",
                    fix="use another model",
                )
    asked = [f"{name}{_ROUTER_LOSS}" for name, part in parts.items() if part.get(_ROUTER_LOSS)]
    if asked:
        raise ConfigError(
            where,
            got=f"model type {config.get('model_type')!r} with {asked[0]}: true: it adds a load balancing "
            "loss per row, padding included, which the loss over the tokens of a step cannot include",
            expected="a model with only the token loss",
            fix=f"set {asked[0]}: false in its config.json",
        )


def _unpackable(where: str, model_type: str, reason: str) -> ConfigError:
    return ConfigError(
        where,
        got=f"model type {model_type!r}, which cannot be packed: {reason}",
        expected="a model whose layers keep the samples of a row apart",
        fix="train on padded rows: data.packing=false",
    )


def _untrainable(where: str, model_type: str, reason: str) -> ConfigError:
    return ConfigError(
        where,
        got=f"model type {model_type!r}, which cannot be trained here: {reason}",
        expected="a causal language model, with or without images and videos",
        fix="use another model",
    )
