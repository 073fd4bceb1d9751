"""Options of a command that are settings of a config: the same names, words and defaults, from the same fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from packtrain.cli.help_page import RUN
from packtrain.config.data_section import MEDIA_LIMITS
from packtrain.config.keys import Key
from packtrain.config.sections import KEYS
from packtrain.core.errors import ConfigError

_FILES = ("object_template",)  # named by a file that holds the value
GROUPS: dict[str, tuple[str, ...]] = {
    "Data": (
        *("dataset_type", "dataset_format", "media_root", "allow_outside_root", "split", "subset", "sources"),
        *("max_samples", "eval_size"),
    ),
    "Schema and text": (
        *("schema", "columns", "strict_columns", "formatting_func", "loss_on", "add_eos"),
        *("chat_template", "template_date", "object_ordering", "emit_norm", "object_template"),
    ),
    "Media": tuple(MEDIA_LIMITS),
    "Filters": (
        *("min_seconds", "max_seconds", "max_images_per_sample", "max_sample_length", "on_error", "max_failure_rate"),
    ),
    RUN: ("check", "content_hash", "workers", "plugins"),
    "Limits of a pack": tuple(name for name in KEYS if name.startswith("max_") and name.endswith("_per_pack")),
    "Samples too long for a pack": ("overlong", "cutoff_len", "truncate_side"),
    "Order and epochs": ("shuffle", "repack_each_epoch", "packing_drop_last", "packs_per_step", "max_packs"),
    "Windows": ("packing_window", "packing_min_fill_ratio"),
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def verb_options(verb: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a verb; it is called with those that were used, as `settings`."""
    keys = {name: one for name, one in KEYS.items() if verb in one.verbs}
    limits = MEDIA_LIMITS if verb == "measure" else {}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**given: Any) -> None:
            used = {name: given.pop(name) for name in (*keys, *limits)}
            options = {name: value for name, value in used.items() if value not in (None, [])}
            for name in _FILES:
                if name in options:
                    options[name] = read_option_file(_option(name), Path(options[name]))
            for name in options:
                if dict in keys.get(name, limits.get(name)).kind.types:  # type: ignore[union-attr]
                    options[name] = parse_names(_option(name), options[name])
            bounds = {name: options.pop(name) for name in limits if name in options}
            settings = {**options, "processor_config": bounds} if bounds else options
            command(**given, settings=settings)

        own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "settings"]
        groups = list(GROUPS)
        by_group = sorted({**keys, **limits}, key=lambda name: groups.index(_GROUP_OF.get(name, groups[0])))
        added = [_parameter(name, {**keys, **limits}[name]) for name in by_group]
        called.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in (*own, *added)}
        return called

    return decorate


def _parameter(name: str, one: Key) -> inspect.Parameter:
    """A key as a typer parameter, without a default: an unused option leaves its setting unset."""
    default = "" if one.default is False else one.default_words  # a flag says it by being one
    help = f"{one.help} Default: {default}." if default else one.help
    names = one.options or (_option(name),)
    option = typer.Option(*names, help=help, show_default=False, rich_help_panel=_GROUP_OF.get(name))
    annotation: Any = Annotated[_type(one), option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _type(one: Key) -> Any:
    kind: Any = next((kind for kind in (list, bool, float, int) if kind in one.kind.types), str)
    return (list[str] if kind is list else kind) | None


def read_option_file(option: str, path: Path) -> str:
    """The content of a file that an option names."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(option, got=f"{path}: {error}", expected="a text file in UTF-8") from None


def parse_names(option: str, text: str) -> dict[str, str]:
    """Names by other names, as NAME=NAME with commas between."""
    pairs = [[name.strip() for name in pair.split("=")] for pair in text.split(",")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise ConfigError(option, got=text, expected="NAME_IN_DATA=NAME_HERE,..., such as query=question,reply=answer")
    return dict(pairs)
