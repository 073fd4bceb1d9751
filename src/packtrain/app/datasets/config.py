"""What a dataset of packs is made from: one value, checked when it is made, all that is wrong with it said at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from packtrain.app.measure import DATASET_TYPES, measure_outcome
from packtrain.core.errors import ConfigError, nearest
from packtrain.core.secrets import kept_apart
from packtrain.core.values import MediaLimits
from packtrain.families.encoder import LossOn
from packtrain.families.template_date import check_date
from packtrain.plans.config import PackingConfig
from packtrain.plans.schedule import Balance
from packtrain.records.source import FORMATS

LONGEST_DEFAULT = 32_000  # tokens of a pack where the model could take more
_FORMATS = (*FORMATS, "yaml")
_MODEL_KEYS = ("processor_name", "model")  # of processor_config
_OWN = ("packing_length", "packing_strategy", "max_images_per_pack", "shuffle", "seed", "epochs", "packs_per_step")
_MAPPINGS = ("processor_config", "packing_options", "measuring")
_PACKING = tuple(one.name for one in fields(PackingConfig))
_MEASURING = tuple(inspect.signature(measure_outcome).parameters)
_NOT_TO_MEASURE = (
    *("data", "model", "out", "media_root", "dataset_format", "dataset_type", "processor_config", "loss_on", "seed"),
    "progress",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    """A dataset, a model and how its samples are packed. Map-style and streaming access take the same config."""

    dataset_path: str
    model: str | None = None  # folder, hub name or tiny:FAMILY; may stand in processor_config instead
    dataset_type: str = "vision"
    dataset_format: str | None = None  # None: recognised
    media_root: str | None = None
    processor_config: Mapping[str, int | float | str | None] = field(default_factory=dict)  # limits of media
    loss_on: LossOn | None = None
    shuffle: bool = True
    packing: bool = True  # False: one sample a row, padded to the longest of its batch
    pad_packs: bool = False  # padded: a batch has the samples of a pack, so that steps have the samples of packed ones
    rows_per_batch: int = 1  # samples of a padded batch; a pack is a whole batch
    group_by_length: bool = False  # padded: similar lengths share a step, so batches have less padding and a bias
    max_samples: int | None = None  # a trial run: so many records, drawn at random by the seed
    packing_length: int | None = None  # None: what the model takes, up to LONGEST_DEFAULT
    packing_strategy: str = "best_fit"
    filter_overlong: bool = True  # False: a sample that is longer than a pack is an error
    max_images_per_pack: int | None = None
    packing_options: Mapping[str, Any] = field(default_factory=dict)  # other settings of PackingConfig, by name
    epochs: int = 1
    seed: int = 0
    packs_per_step: int = 1  # of an optimizer step, over all ranks; when padded, its samples
    balance: Balance | None = None  # None: what `order` says
    measuring: Mapping[str, Any] = field(default_factory=dict)  # other arguments of `measure`, by name
    cache_dir: str | None = None
    cache_bytes: int = 10 << 30  # of data files that are compressed or remote
    cache_tokens: bool | None = None  # tokenize once, before training, and keep it; None: where rows are padded

    def __post_init__(self) -> None:
        if isinstance(self.dataset_path, str):
            object.__setattr__(self, "dataset_path", kept_apart(self.dataset_path))
        checks = _CHECKS if all(isinstance(getattr(self, name), Mapping) for name in _MAPPINGS) else (_kinds, _names)
        problems = [problem for check in checks for problem in check(self)]
        if problems:
            raise ConfigError(
                "DatasetConfig",
                got="\n            ".join(problems),
                expected="settings of a dataset",
                fix="correct these",
            )

    @property
    def model_name(self) -> str:
        """The model whose processor is used."""
        given = (self.model, *(self.processor_config.get(name) for name in _MODEL_KEYS))
        return next(str(name) for name in given if name)

    @property
    def has_packs(self) -> bool:
        """Do samples share packs, whether these are trained as they are or padded?"""
        return self.packing or self.pad_packs

    @property
    def order(self) -> Balance:
        """The order of packs: steps of even work; plain shuffling where it is to be the padded baseline."""
        if self.balance is not None:
            return self.balance
        if self.has_packs:
            return "sorted"
        return "length" if self.group_by_length else "random"

    @property
    def caches_tokens(self) -> bool:
        """Is text tokenized once and kept?"""
        return not self.packing if self.cache_tokens is None else self.cache_tokens

    def media_limits(self) -> dict[str, Any]:
        """What bounds the cost of media."""
        return {name: value for name, value in self.processor_config.items() if name not in _MODEL_KEYS}

    def measured_by(self) -> dict[str, Any]:
        """The arguments of `measure` that follow from it."""
        return {
            "data": self.dataset_path,
            "model": self.model_name,
            "dataset_type": self.dataset_type,
            "dataset_format": self.dataset_format,
            "media_root": self.media_root,
            "processor_config": self.media_limits(),
            "loss_on": self.loss_on,
            "seed": self.seed,
            **({"limit": self.max_samples} if self.max_samples is not None else {}),
            **self.measuring,
        }

    def packing_config(self, context_length: int) -> PackingConfig:
        """How samples are packed for a model that takes this many tokens."""
        own = {name: getattr(self, name) for name in _OWN}
        own["packing_length"] = self.packing_length or min(context_length, LONGEST_DEFAULT)
        if not self.has_packs:
            own["packing_strategy"] = "none"
        return PackingConfig(**{"overlong": "drop" if self.filter_overlong else "error", **own, **self.packing_options})


Check = Callable[[DatasetConfig], list[str]]


def _names(config: DatasetConfig) -> list[str]:
    """Settings that are one of several words."""
    found = []
    for name, allowed in (
        ("dataset_type", DATASET_TYPES),
        ("dataset_format", (None, *_FORMATS)),
        ("loss_on", (None, *get_args(LossOn))),
        ("balance", (None, *get_args(Balance))),
    ):
        value = getattr(config, name)
        if value not in allowed:
            words = [word for word in allowed if word is not None]
            found.append(f"{name}: {value!r} instead of {', '.join(words)}. {nearest(str(value), words)}".rstrip(". "))
    return found


def _kinds(config: DatasetConfig) -> list[str]:
    """Settings of the wrong type."""
    found = []
    for name in ("shuffle", "packing", "pad_packs", "filter_overlong", "group_by_length"):
        if not isinstance(getattr(config, name), bool):
            found.append(f"{name}: {getattr(config, name)!r} instead of true or false")
    if config.cache_tokens is not None and not isinstance(config.cache_tokens, bool):
        found.append(f"cache_tokens: {config.cache_tokens!r} instead of true or false")
    for name in ("dataset_path", "model", "media_root", "cache_dir"):
        value = getattr(config, name)
        optional = name != "dataset_path"
        if not (isinstance(value, str | Path) and str(value)) and not (optional and value is None):
            found.append(f"{name}: {value!r} instead of a path or a name")
    for name in _MAPPINGS:
        if not isinstance(getattr(config, name), Mapping):
            found.append(f"{name}: {getattr(config, name)!r} instead of settings by name")
    for name, what in (("cache_bytes", "bytes"), ("rows_per_batch", "samples"), ("max_samples", "records")):
        size = getattr(config, name)
        if name == "max_samples" and size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            found.append(f"{name}: {size!r} instead of a positive number of {what}")
    return found


def _padded(config: DatasetConfig) -> list[str]:
    """Settings of padded batches that contradict others."""
    found = []
    rows = config.rows_per_batch if isinstance(config.rows_per_batch, int) else 1
    if rows > 1 and config.packing:
        found.append(
            f"rows_per_batch: {rows} with packing: true. A pack is a whole row already: use a longer packing_length, "
            "or packing: false"
        )
    elif isinstance(config.packs_per_step, int) and rows > config.packs_per_step:
        found.append(
            f"rows_per_batch: {rows} with packs_per_step: {config.packs_per_step}. A step of fewer samples never fills "
            f"a batch: set packs_per_step to {rows} or more"
        )
    if config.pad_packs and config.packing:
        found.append(
            "pad_packs: true with packing: true. Packs are trained as they are or padded: leave one of them out"
        )
    elif config.pad_packs and rows > 1:
        found.append(f"rows_per_batch: {rows} with pad_packs: true. A batch has the samples of one pack: leave it out")
    elif config.pad_packs and config.group_by_length:
        found.append("group_by_length: true with pad_packs: true. Packs say who shares a batch: leave one of them out")
    if config.group_by_length and config.packing:
        found.append(
            "group_by_length: true with packing: true. Packs have no padding to save: leave it out; balance: strict "
            "puts packs of similar work into a step"
        )
    elif config.group_by_length and config.balance not in (None, "length"):
        found.append(f"group_by_length: true with balance: {config.balance}. Both are the order: leave one of them out")
    return found


def _processor(config: DatasetConfig) -> list[str]:
    """The model, and the limits of media."""
    found = []
    given = {str(name) for name in (config.model, *(config.processor_config.get(key) for key in _MODEL_KEYS)) if name}
    if not given:
        found.append("model: none instead of a model folder, a hub name or tiny:FAMILY")
    elif len(given) > 1:
        found.append(f"model: {' and '.join(sorted(given))} are not the same")
    names = MediaLimits.__slots__
    for name, value in config.media_limits().items():
        if name not in names:
            hint = nearest(str(name), (*names, *_MODEL_KEYS))
            found.append(f"processor_config.{name}: unknown key. {hint}".rstrip(". "))
        else:
            found += _refusals(MediaLimits, {name: value})
    return found


def _packing(config: DatasetConfig) -> list[str]:
    """Every setting of packing by itself, so that one does not hide another."""
    found = []
    for name in _OWN:
        value = getattr(config, name)
        if name != "packing_length" or value is not None:
            found += _refusals(PackingConfig, {"packing_length": 1, name: value})
    for name, value in config.packing_options.items():
        if name in _OWN:
            found.append(f"packing_options.{name}: it has a field of its own")
        elif name not in _PACKING:
            found.append(f"packing_options.{name}: unknown key. {nearest(str(name), _PACKING)}".rstrip(". "))
        else:
            found += _refusals(PackingConfig, {"packing_length": 1, name: value})
    return found


def _measuring(config: DatasetConfig) -> list[str]:
    """Arguments of measuring that are there and not set otherwise."""
    free = [name for name in _MEASURING if name not in _NOT_TO_MEASURE]
    twice = ["measuring.limit: max_samples is the same setting; leave one of them out"]
    day = config.measuring.get("template_date")
    wrong = [] if day is None else _refusals(check_date, {"given": day, "where": "measuring.template_date"})
    wrong += twice * (config.max_samples is not None and "limit" in config.measuring)
    return wrong + [
        f"measuring.{name}: it follows from other settings"
        if name in _NOT_TO_MEASURE
        else f"measuring.{name}: unknown key. {nearest(str(name), free)}".rstrip(". ")
        for name in config.measuring
        if name not in free
    ]


def _refusals(make: Callable[..., object], settings: Mapping[str, Any]) -> list[str]:
    try:
        make(**settings)
    except ConfigError as error:
        words = [f"{error.where}: {error.got}", f"instead of {error.expected}" if error.expected else "", error.fix]
        return [" ".join(word for word in words if word)]
    return []


_CHECKS: tuple[Check, ...] = (_kinds, _names, _processor, _packing, _padded, _measuring)
