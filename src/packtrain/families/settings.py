"""Reads a model folder's processor files into ProcessorSettings, without transformers.

Where several files hold the same thing, the one that transformers takes wins, in both layouts:

  image settings   processor_config.json's image_processor, preprocessor_config.json
  video settings   processor_config.json's video_processor, video_preprocessor_config.json, preprocessor_config.json
  chat template    with a processor: processor_config.json, chat_template.json, chat_template.jinja
                   without one:      chat_template.jinja, tokenizer_config.json
                   (a processor without a template has none in transformers; here it gets the tokenizer's)
  special tokens   special_tokens_map.json (unless the tokenizer's config lists its added tokens), tokenizer_config.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packtrain.core.errors import ConfigError
from packtrain.families.family import ProcessorSettings
from packtrain.families.registry import all_families
from packtrain.families.shape import Config

TEXT_ONLY = "text"
_MAX_BYTES = 64 * 2**20
# Parts of processor_config.json that are not the processor's own settings.
_APART = ("image_processor", "video_processor", "feature_extractor", "audio_tokenizer", "chat_template")


def read_settings(
    folder: str | Path, *, tokenizer: str | None = None, chat_template: str | None = None
) -> ProcessorSettings:
    """The settings of one model folder. Values that no file gives are left out: class defaults are the families'.

    `tokenizer` is the folder of a finished tokenizer, with the special tokens that it really has; `chat_template` is
    the user's own, in place of the model's.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"model folder {root}",
            got="a file" if root.exists() else "nothing there",
            expected="a folder with tokenizer.json and its settings",
            fix="check the path; tiny:FAMILY and hub names are resolved to a folder first",
        )
    processor_file = _read(root, "processor_config.json")
    image_file = _read(root, "preprocessor_config.json")
    tokenizer_config = _read(root, "tokenizer_config.json")
    config = _read(root, "config.json")
    if not (processor_file or image_file or tokenizer_config or config or (root / "tokenizer.json").is_file()):
        raise ConfigError(
            f"model folder {root}",
            got="no model files",
            expected="tokenizer.json with tokenizer_config.json, and processor_config.json if the model takes images",
            fix="use the folder that AutoProcessor.from_pretrained would load",
        )
    video_file = _read(root, "video_preprocessor_config.json")
    image = _nested(root, processor_file, "image_processor", image_file)
    has_processor = bool(processor_file or image_file or video_file or "processor_class" in tokenizer_config)
    special_tokens = _special_tokens(tokenizer_config, _read(root, "special_tokens_map.json"))
    if tokenizer is not None:
        special_tokens |= json.loads((Path(tokenizer) / "special_tokens.json").read_text())
    own_template = chat_template is not None
    if not own_template:
        chat_template = _chat_template(root, processor_file, tokenizer_config, has_processor=has_processor)
    return ProcessorSettings(
        folder=str(root),
        tokenizer_folder=tokenizer,
        model_type=_model_type(root, config, processor_file, image, tokenizer_config),
        processor={key: value for key, value in processor_file.items() if key not in _APART},
        image=image,
        video=_nested(root, processor_file, "video_processor", video_file or image_file),
        config=config,
        tokenizer_config=tokenizer_config,
        special_tokens=special_tokens,
        chat_template=chat_template,
        tool_template=None if has_processor or own_template else _tool_template(root, tokenizer_config),
        own_template=own_template,
    )


def _model_type(
    root: Path,
    config: Config,
    processor_file: Config,
    image: Config,
    tokenizer_config: Config,
) -> str:
    if isinstance(config.get("model_type"), str) and config["model_type"]:
        return str(config["model_type"])
    named = [part["processor_class"] for part in (processor_file, image, tokenizer_config) if "processor_class" in part]
    image_class = str(image.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
    if not (named or image):
        return TEXT_ONLY
    # Several families share an image processor class: the processor's own name goes before, and only the classes that
    # one family has are known.
    known = all_families().values()
    by_processor = {name: family.model_type for family in known for name in family.processors}
    by_image = {name: family.model_type for family in known for name in family.image_processors}
    for table, name in (*((by_processor, name) for name in named), (by_image, image_class)):
        if name in table:
            return table[name]
    raise ConfigError(
        f"model folder {root}",
        got="no config.json, and " + " and ".join(str(name) for name in (*named, image_class) if name),
        expected="a config.json with model_type, or one of the processors " + ", ".join(sorted(by_processor)),
        fix="copy the model's config.json next to its processor files",
    )


def _special_tokens(tokenizer_config: Config, legacy_map: Config) -> dict[str, str]:
    """The special tokens that have a name; tokens that are only listed have none and are not here."""
    if "added_tokens_decoder" in tokenizer_config:
        legacy_map = {}  # transformers reads the older file only where this newer list is absent
    groups: list[Config] = []
    for source in (tokenizer_config, legacy_map):
        for name in ("model_specific_special_tokens", None, "extra_special_tokens"):
            group = source if name is None else source.get(name)
            if isinstance(group, Mapping):
                groups.append(group)
    tokens = {name: _token_text(value) for group in groups for name, value in group.items() if name.endswith("_token")}
    return {name: text for name, text in tokens.items() if text is not None}


def _token_text(value: Any) -> str | None:
    """A token given as text or as a serialized AddedToken; anything else (add_bos_token: true) is not a token."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(root: Path, processor_file: Config, tokenizer_config: Config, *, has_processor: bool) -> str | None:
    raw = _read_text(root / "chat_template.jinja")
    candidates: list[Any] = [raw, tokenizer_config.get("chat_template")]
    if has_processor:
        legacy = _read(root, "chat_template.json").get("chat_template")
        candidates = [processor_file.get("chat_template"), legacy, *candidates]
    return next((text for text in map(_template_of, candidates) if text is not None), None)


def _tool_template(root: Path, tokenizer_config: Config) -> str | None:
    """The template that a tokenizer takes where there are tools; processors take their default one."""
    if (root / "chat_template.jinja").is_file():
        return _read_text(root / "additional_chat_templates" / "tool_use.jinja")
    templates = tokenizer_config.get("chat_template")
    return None if isinstance(templates, str) else _template_of(templates, "tool_use")


def _template_of(value: Any, name: str = "default") -> str | None:
    """One template, from a text, a mapping by name, or the list of named templates in older tokenizer configs."""
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
    if isinstance(value, Mapping):
        value = value.get(name)
    return value if isinstance(value, str) else None


def _nested(root: Path, outer: Config, name: str, fallback: Config) -> Config:
    """A part of processor_config.json, or the older file of its own."""
    part = outer.get(name)
    if part is None:
        return fallback
    if not isinstance(part, Mapping):
        raise _unreadable(root / "processor_config.json", f"{name} is a {type(part).__name__}", "a JSON object there")
    return part


def _read(root: Path, name: str) -> Config:
    """One JSON file as a mapping; a file that is not there is an empty one."""
    path = root / name
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"not valid JSON: {error}", "a JSON object") from error
    if not isinstance(value, dict):
        raise _unreadable(path, f"a JSON {type(value).__name__}", "a JSON object")
    return value


def _read_text(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise _unreadable(path, f"{size} bytes", f"at most {_MAX_BYTES} bytes; settings are small")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error), "a readable file in UTF-8") from error


def _unreadable(path: Path, got: str, expected: str) -> ConfigError:
    return ConfigError(str(path), got=got, expected=expected, fix="copy this file again from the original model")
