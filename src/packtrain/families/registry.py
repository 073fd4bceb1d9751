"""Which family's rule serves a model type, found without importing the others."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from packtrain.core.errors import ConfigError
from packtrain.core.values import MediaLimits
from packtrain.families.base import Family, NoRule, ProcessorSettings

TEXT_ONLY = "packtrain.families.text_only:TextOnly"

# Lazy paths by transformers' model type. Text models that are not listed are recognised by having no processor.
MODEL_TYPES: Mapping[str, str] = {
    "qwen2_vl": "packtrain.families.qwen_vl:Qwen2VL",
    "qwen2_5_vl": "packtrain.families.qwen_vl:Qwen25VL",
    "qwen3_vl": "packtrain.families.qwen_vl:Qwen3VL",
    "idefics3": "packtrain.families.idefics3:Idefics3",
    "smolvlm": "packtrain.families.idefics3:SmolVLM",
    "llava": "packtrain.families.llava:Llava",
    "llava_next": "packtrain.families.llava:LlavaNext",
    "llava_onevision": "packtrain.families.llava:LlavaOneVision",
    "internvl": "packtrain.families.internvl:InternVL",
    "gemma3": "packtrain.families.gemma3:Gemma3",
    "nanovlm": "packtrain.families.nanovlm:NanoVLM",
    "text": TEXT_ONLY,
    "gemma3_text": TEXT_ONLY,
    "qwen2_vl_text": TEXT_ONLY,
    "qwen2_5_vl_text": TEXT_ONLY,
    "qwen3_vl_text": TEXT_ONLY,
}


def _rule_of(settings: ProcessorSettings) -> str | None:
    path = MODEL_TYPES.get(settings.model_type)
    if path is None and not (settings.image or settings.video or settings.processor):
        return TEXT_ONLY
    return path


def is_text_only(settings: ProcessorSettings) -> bool:
    """Does the model take no media at all?"""
    return _rule_of(settings) == TEXT_ONLY


def require_processor_files(settings: ProcessorSettings) -> None:
    """Refuse a model that takes media and whose folder does not say how: transformers would not load it either."""
    sees = not is_text_only(settings) and "vision_config" in settings.config
    if sees and not (settings.processor or settings.image or settings.video):
        raise ConfigError(
            f"model folder {settings.folder}",
            got="no processor files",
            expected="preprocessor_config.json or processor_config.json",
            fix="copy them, and chat_template.jinja, from where the model came from",
        )


def load_family(settings: ProcessorSettings, limits: MediaLimits) -> Family | None:
    """The family for these settings; None where no rule covers them and the processor itself has to be run."""
    path = _rule_of(settings)
    if path is None:
        return None
    module, _, attribute = path.partition(":")
    family = getattr(importlib.import_module(module), attribute)
    try:
        made: Family = family(settings, limits)
    except NoRule:
        return None
    made.limits = limits  # type: ignore[attr-defined]
    return made
