"""The settings of a packed dataset: one value, checked when it is created, with all errors reported together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from packtrain.config.data_section import DatasetSection
from packtrain.config.keys import COUNT, FLAG, SEED, WORD, WORDS, Raw, choice, key
from packtrain.config.sections import PROCESSOR_CLASS, PROCESSOR_NAMES, names_model
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError
from packtrain.core.secrets import hide_secrets
from packtrain.core.user_code import from_anywhere, without_folder
from packtrain.core.values import MediaLimits
from packtrain.families.model_folder import known_as
from packtrain.families.registry import load_plugins
from packtrain.measuring.request import Filters
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.schedule import Balance
from packtrain.records.schemas.converters import SchemaOptions

LONGEST_DEFAULT = 32_000  # tokens of a pack where the model could take more
_SCHEMA = tuple(one.name for one in fields(SchemaOptions))
_FILTERS = tuple(one.name for one in fields(Filters) if one.name not in ("limit", "eval_part"))
_PACKING = tuple(one.name for one in fields(PackingConfig))
# How failures are judged: of no influence on costs, but a run of the same data needs the same.
_JUDGED = ("on_error", "max_failure_rate", "content_hash")
# Filters that a cost table can follow later, and those settings that it cannot, with their defaults.
FILTERS = ("max_images_per_sample", "max_sample_length")
MEASURED_DEFAULTS = {
    name: one.default
    for name, one in DatasetSection.known().items()
    if one.costs and name not in (*FILTERS, "dataset_path", "processor_config", "template_date")
}
_PATHS = ("dataset_path", "media_root", "chat_template", "costs", "plan")


def absolute(path: str) -> str:
    """A path that exists, as it is called from anywhere; other names as they are."""
    there = os.path.expanduser(path)
    return os.path.abspath(there) if os.path.exists(there) else path


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig(DatasetSection):
    """A dataset, a model and how its samples are packed. Map-style and streaming access take the same config.

    All settings of section `data` that are about one dataset, by the same names; None is their default.
    """

    model: str | None = key(WORD, "The model whose processor is used; can be given in processor_config instead.")
    plugins: list[str] | None = key(WORDS, "Your own modules that register model families. They are imported.")
    filter_overlong: bool | None = key(FLAG, "false: a sample longer than a pack is an error.")
    rows_per_batch: int = key(COUNT, "Samples per padded batch; a pack is a whole batch.", default=1)
    group_by_length: bool = key(
        FLAG,
        "Put padded samples of similar length, or packs of similar work, in one step.",
        default=False,
        needs=("measuring",),
    )
    epochs: int = key(COUNT, "Number of epochs to pack.", default=1)
    packs_per_step: int = key(COUNT, "Packs (padded: samples) per optimizer step, over all ranks.", default=1)
    max_steps: int | None = key(COUNT, "With online: optimizer steps to pack.")
    part: str = key(
        choice("train", "eval"), "With eval_size: held-out records, or the others.", default="train", costs=True
    )
    seed: int = key(SEED, "Random seed.", default=0, costs=True)
    # Settings that were given, with whatever value; it stays when some are replaced.
    given_names: frozenset[str] | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        settings = (f"{name}={getattr(self, name)!r}" for name in self.known() if name in (self.given_names or ()))
        return f"{type(self).__name__}({', '.join(settings)})"

    def __post_init__(self) -> None:
        if self.given_names is None:
            object.__setattr__(self, "given_names", frozenset(self.given()))
        problems = [*_take_model(self)]
        for name, one in self.known().items():
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                value = os.fspath(value)
                object.__setattr__(self, name, value)
            wrong = [*self.problems({name: value})]
            problems += wrong
            if wrong or value is None:  # the other checks go on with the default
                object.__setattr__(self, name, one.default)
        problems += [problem for check in _CHECKS for problem in check(self)]
        if problems:
            raise ConfigError("settings of the dataset", problems=problems)
        for name in _PATHS:
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, absolute(hide_secrets(given)))

    @property
    def model_name(self) -> str:
        """The model whose processor is used."""
        assert self.model is not None, "a config without a model is refused"
        return self.model

    @property
    def cache_root(self) -> Path:
        """The folder in which cost tables, plans and rows are kept."""
        return Path(self.cache_dir).expanduser() if self.cache_dir is not None else cache_dir()

    @property
    def shard_bytes(self) -> int:
        """Disk budget for copies of compressed or remote data files."""
        return self.cache_bytes or 0

    @property
    def has_packs(self) -> bool:
        """Whether samples are packed, or grouped by packs into padded batches."""
        return bool(self.packing or self.pad_packs)

    @property
    def order(self) -> Balance:
        """The order of packs: steps of even work; as packed where nothing is to be shuffled, or it is the baseline."""
        if self.balance is not None:
            return self.balance  # type: ignore[return-value]  # it was checked
        if self.has_packs and (self.shuffle or self.group_by_length):
            return "strict" if self.group_by_length else "sorted"
        return "length" if self.group_by_length else "random"

    @property
    def caches_tokens(self) -> bool:
        """Whether text is tokenized once and kept."""
        return not self.packing if self.cache_tokens is None else self.cache_tokens

    def media_limits(self) -> MediaLimits:
        """The limits of media, which bound their cost."""
        return MediaLimits(**(self.processor_config or {}))  # type: ignore[arg-type]

    def schema_options(self) -> SchemaOptions:
        """How records are turned into chats; `fineweb_edu` is running text, whatever other columns they have."""
        seed = self.seed if self.object_ordering == "random" else 0
        settings = self.given(*_SCHEMA) | {"coord_tokens": _switched_on(self.coord_tokens), "seed": seed}
        settings |= {"formatting_func": from_anywhere(self.formatting_func)} if self.formatting_func is not None else {}
        options = SchemaOptions(**settings)
        if self.dataset_type == "fineweb_edu" and self.schema is None and self.formatting_func is None:
            return replace(options, schema="text")
        return options

    def own_template(self) -> str | None:
        """The text of the user's own chat template."""
        if self.chat_template is None:
            return None
        try:
            text = Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            got = f"{self.chat_template}: {getattr(error, 'strerror', None) or error}"
            raise ConfigError(
                "chat_template",
                got=got,
                expected="a file with a Jinja template, in UTF-8",
                fix="leave it out to use the model's own: templates cannot be given by name",
            ) from None
        if not text.strip():
            raise ConfigError("chat_template", got=f"{self.chat_template}, which is empty", expected="a Jinja template")
        return text

    def filters(self) -> Filters:
        """Which records are dropped."""
        settings = self.given(*_FILTERS) | {"sources": tuple(self.sources or ())}
        return Filters(limit=self.max_samples, eval_part=self.part == "eval", **settings)

    @property
    def measured_seed(self) -> int:
        """The seed of what measuring draws; of no matter where it draws nothing."""
        draws = self.max_samples is not None or self.eval_size is not None or self.object_ordering == "random"
        return self.seed if draws else 0

    def measured_by(self) -> dict[str, object]:
        """The settings that costs follow from."""
        settings = {
            "model": known_as(absolute(self.model_name)),
            **self.given("plugins", *(name for name, one in self.known().items() if one.costs)),
            "seed": self.measured_seed,
        }
        function = self.formatting_func
        return settings | ({"formatting_func": without_folder(function)} if function is not None else {})

    def user_config(self) -> dict[str, dict[str, object]]:
        """The settings of the data that differ from their defaults, as sections of a config."""
        data = {
            name: value
            for name, one in self.known().items()
            if (one.costs or name in _JUDGED) and name != "part" and (value := getattr(self, name)) != one.default
        }
        if self.formatting_func is not None:
            data["formatting_func"] = from_anywhere(self.formatting_func)
        training = {"seed": seed} if (seed := data.pop("seed", 0)) and self.measured_seed else {}
        return {
            "model": {"model_name_or_path": absolute(self.model_name)},
            "data": {name: value for name, value in data.items() if value not in ({}, [], None)},
            **({"training": training} if training else {}),
        }

    def packing_config(self, context_length: int) -> PackingConfig:
        """How samples are packed for a model that takes this many tokens."""
        settings = {name: getattr(self, name) for name in _PACKING if getattr(self, name) is not None}
        settings.setdefault("packing_length", min(context_length, LONGEST_DEFAULT))
        if not self.has_packs:
            settings["packing_strategy"] = "none"
            settings.pop("pack_alignment", None)  # rows of single samples are padded as batches need it
        return PackingConfig(**settings)


Check = Callable[[DatasetConfig], Iterator[str]]


def _take_model(config: DatasetConfig) -> Iterator[str]:
    """The model may be named in processor_config, where only limits of media stay."""
    given = config.processor_config
    if not isinstance(given, Mapping):
        return
    names = [given[name] for name in PROCESSOR_NAMES if given.get(name)]
    if not names and config.model is None and names_model(given.get(PROCESSOR_CLASS)):
        names = [given[PROCESSOR_CLASS]]
    models = {str(name) for name in (config.model, *names) if name}
    if len(models) > 1:
        yield f"model: {' and '.join(sorted(models))} differ"
    elif names and config.model is None:
        object.__setattr__(config, "model", str(names[0]))
    limits = {name: value for name, value in given.items() if name not in (*PROCESSOR_NAMES, PROCESSOR_CLASS)}
    object.__setattr__(config, "processor_config", {name: one for name, one in limits.items() if one is not None})


def _switched_on(given: Any) -> bool:
    """The switch of an experiment that another system has: true, or a section with `enabled`."""
    return bool(given.get("enabled")) if isinstance(given, Mapping) else bool(given)


def _plugins(config: DatasetConfig) -> Iterator[str]:
    yield from _refusals(load_plugins, {"modules": config.plugins or ()})


def _padding_problems(config: DatasetConfig) -> Iterator[str]:
    """Settings of padded batches that contradict others."""
    rows = config.rows_per_batch
    if rows > 1 and config.packing:
        yield (
            f"rows_per_batch: {rows} with packing: true. A pack is a whole row already: use a longer packing_length, "
            "or packing: false"
        )
    elif rows > config.packs_per_step:
        yield (
            f"rows_per_batch: {rows} with packs_per_step: {config.packs_per_step}. A step of fewer samples never fills "
            f"a batch: set packs_per_step to {rows} or more"
        )
    if config.pad_packs and config.packing:
        yield "pad_packs: true with packing: true. pad_packs only applies to padded batches: leave one of them out"
    elif config.pad_packs and rows > 1:
        yield f"rows_per_batch: {rows} with pad_packs: true. Each batch holds the samples of one pack: leave it out"
    elif config.pad_packs and config.group_by_length:
        yield "group_by_length: true with pad_packs: true. Packs determine the batches: leave one of them out"
    if config.group_by_length and config.balance not in (None, "strict" if config.packing else "length"):
        yield f"group_by_length: true with balance: {config.balance}. Both set the order: leave one of them out"


def _packing(config: DatasetConfig) -> Iterator[str]:
    """Required settings, and each setting of packing by itself, so that one problem does not hide another."""
    if config.model is None:
        yield "model: none instead of a model folder, a hub name or tiny:FAMILY"
    if config.dataset_path is None:
        yield "dataset_path: none instead of a file or folder, or a hub name"
    if config.filter_overlong is not None:
        meant = "drop" if config.filter_overlong else "error"
        if config.overlong not in (meant, "drop"):
            yield f"overlong: {config.overlong} and filter_overlong are the same setting"
        object.__setattr__(config, "overlong", meant)
    for name in _PACKING:
        if (value := getattr(config, name)) is not None:
            yield from _refusals(PackingConfig, {"packing_length": 2**61, name: value})  # none is too large for it


def _online(config: DatasetConfig) -> Iterator[str]:
    """Settings that online packing cannot honour, since nothing is known about the samples to come."""
    if not config.online:
        return
    if config.max_steps is None:
        yield "max_steps: none with online: true. The number of steps of a stream is not known in advance: set it"
    if not config.packing:
        yield "packing: false with online: true. Streams are packed: measure the data first, or leave packing out"
    usual = DatasetConfig.known()
    needing = [name for name in config.needing("measuring") if getattr(config, name) not in (None, usual[name].default)]
    if config.overlong in ("truncate", "split"):
        needing.append("overlong")
    if config.shuffle and "shuffle" in (config.given_names or ()):
        needing.append("shuffle")
    for name in needing:
        value = getattr(config, name)
        yield f"{name}: {value} with online: true. It needs all samples in advance: leave it or online out"


def _records(config: DatasetConfig) -> Iterator[str]:
    yield from _refusals(config.schema_options, {})
    yield from _refusals(config.filters, {})


def _refusals(make: Callable[..., object], settings: Raw) -> Iterator[str]:
    try:
        make(**settings)
    except ConfigError as error:
        problem = f"{error.where}: {error.got}" + (f" instead of {error.expected}" if error.expected else "")
        yield ". ".join(filter(None, (problem, error.fix)))


_CHECKS: tuple[Check, ...] = (_plugins, _packing, _padding_problems, _online, _records)
