"""What a resumed run is asked to change: taken over and said, or refused because its checkpoints cannot follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packtrain.config.run_config import RunConfig, load_config
from packtrain.config.sections import TrainingSection, keys_with
from packtrain.config.setup import MULTIMODAL, model_settings, uses_deepspeed
from packtrain.core.errors import ConfigError
from packtrain.core.secrets import secrets_of
from packtrain.modeling.model_settings import ModelSettings
from packtrain.runs.run_folder import CONFIG

_RATES = tuple(name for name in keys_with("rate") if name.endswith(("_lr", "learning_rate")))
_SCHEDULE = "lr_scheduler_type"
_OWN_COURSE = ("reduce_lr_on_plateau", "greedy")  # schedules whose rates follow from what they have seen
_RATE_OF = {"train_language": "learning_rate", "train_vision": "vit_lr", "train_projector": "aligner_lr"}
_PARTS: Mapping[str, Callable[[ModelSettings], bool]] = {
    "train_language": lambda model: model.train_language,
    "train_vision": lambda model: model.trains_vision,
    "train_projector": lambda model: model.trains_projector,
}
_ADAPTERS: Mapping[str, Callable[[ModelSettings], Any]] = {
    "lora_rank": lambda model: model.lora_rank,
    "lora_alpha": lambda model: model.scale,
    "lora_target_modules": lambda model: "all" if (names := model.lora_target_modules) is None else sorted(set(names)),
}


def config_of_run(folder: Path, asked: RunConfig) -> RunConfig:
    """What a run was begun with, and the secrets that are asked for: they are not written there."""
    had = load_config(folder / CONFIG)
    return replace(had, training=replace(had.training, **secrets_of(asked.training.given())))


def refuse_changes(before: RunConfig, asked: RunConfig) -> None:
    """Refuse settings that make other parameters or states than checkpoints have, or that would not be followed."""
    found = [*_of_model(before, asked), *_of_optimizer(before, asked), *_of_rates(before, asked)]
    if found:
        raise ConfigError(
            "--resume",
            problems=found,
            expected="the values that the run has",
            fix="leave these out, or start a new run in another training.output_dir",
        )


def changes_note(before: RunConfig, asked: RunConfig) -> tuple[str, ...]:
    """One line of all settings of model and training that the run goes on with and did not have."""
    found = []
    for section in ("model", "training"):
        old, new = getattr(before, section).given(), getattr(asked, section).given()
        for name in sorted({*old, *new} - {*keys_with("place")}):  # a run may be elsewhere
            if old.get(name) != new.get(name):
                found.append(f"{section}.{name} {_value(old.get(name))} -> {_value(new.get(name))}")
    return (f"the run continues with other settings than before: {'; '.join(found)}",) if found else ()


def _of_model(before: RunConfig, asked: RunConfig) -> Iterator[str]:
    """What decides which parameters there are, which of them learn, and what those of adapters mean."""
    old, new = model_settings(before), model_settings(asked)
    if old.method != new.method:
        yield _line("model.method", old.method, new.method)
    elif old.has_adapters:
        for name, of in _ADAPTERS.items():
            if of(old) != of(new):
                yield _line(f"model.{name}", of(old), of(new))
    for name, learns in _PARTS.items():
        if learns(old) != learns(new):
            yield _line(f"model.{name}", learns(old), learns(new)) + _because(name, asked)


def _because(part: str, asked: RunConfig) -> str:
    """Parts of which nothing is said learn by their rates."""
    rate = _RATE_OF[part]
    if getattr(asked.model, part) is not None or getattr(asked.training, rate) is None:
        return ""
    return f", by training.{rate} {_value(getattr(asked.training, rate))}"


def _of_optimizer(before: RunConfig, asked: RunConfig) -> Iterator[str]:
    """What decides which states an optimizer keeps."""
    for name in (name for name in keys_with("refused") if name in TrainingSection.known()):
        old, new = (getattr(config.training, name) for config in (before, asked))
        if name == "optim" and old != new:
            old, new = _optimizer(old), _optimizer(new)
        if old != new:
            yield _line(f"training.{name}", old, new)


def _optimizer(given: str | None) -> str:
    """The trainer's own where none is named."""
    from transformers import TrainingArguments

    return str(TrainingArguments.__dataclass_fields__["optim"].default) if given in (None, MULTIMODAL) else str(given)


def _of_rates(before: RunConfig, asked: RunConfig) -> Iterator[str]:
    """Rates and options that would be taken from the checkpoint instead."""
    old, new = (config.training.lr_scheduler_type or "linear" for config in (before, asked))
    if old != new and {old, new} & {*_OWN_COURSE}:
        yield _line(f"training.{_SCHEDULE}", old, new)
        return
    kept: tuple[str, ...] = ()
    why = ""
    if uses_deepspeed(asked):
        kept, why = keys_with("rate"), "DeepSpeed takes it from the checkpoint"
    elif new in _OWN_COURSE:
        kept, why = _RATES, f"{new} continues from the rates that it has come to"
    for name in kept:
        had, asks = (getattr(config.training, name) for config in (before, asked))
        if had != asks:
            yield _line(f"training.{name}", had, asks) + f"; {why}"


def _line(name: str, old: Any, new: Any) -> str:
    return f"{name}: the run has {_value(old)}, asked for is {_value(new)}"


def _value(value: Any) -> str:
    """As a config would have it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    return "nothing" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
