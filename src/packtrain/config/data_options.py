"""A config's data section -> the training and evaluation datasets, with the defaults of the system it came from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packtrain.config.data_section import DatasetSection
from packtrain.config.dataset_config import DatasetConfig
from packtrain.config.run_config import RunConfig
from packtrain.config.sections import HOMES, KEYS
from packtrain.config.steps import run_length
from packtrain.config.systems import OTHERWISE, THEIR_DEFAULTS, UNLESS, UNSAID, detect_systems
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError

_PACKS_ONLY = DatasetSection.needing("packing")
_REST = ("train_vision", "train_projector")  # beside adapters
_MIXES = {"nanoVLM", "LLaMA-Factory"}  # samples of a pack see each other there; neat_packing keeps them apart


def section_defaults(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """The config with what its sections mean where they come from, and what is different here."""
    notes: list[str] = []
    systems, sure = detect_systems(config.written_as), detect_systems(config.written_as, sure=True)
    for system in systems:
        missing: dict[str, object] = {}
        for name, value in THEIR_DEFAULTS[system].items():
            if _is_open(config, name) and (system in sure or (HOMES[name] == "data" and name != "cutoff_len")):
                if isinstance(value, Mapping) and "" in value:
                    value = value.get(config.model.method, value[""])
                missing[name] = value
                values = replace(getattr(config, HOMES[name]), **{name: value})
                config = replace(config, **{HOMES[name]: values})  # type: ignore[arg-type]
        if missing:
            text = ", ".join(f"{name}: {str(value).lower()}" for name, value in missing.items())
            way = "; data.packing: true packs" if "packing" in missing else ""
            notes.append(f"{text}: the default of {system}{way}")
    if "lmms-engine" in systems and config.data.packing_strategy == "first_fit" and config.data.packing:
        notes.append("packing_strategy first_fit searches all open packs here; next_fit searches only the last")
    for system in sure:
        notes += [
            text
            for name, text in UNSAID.get(system, {}).items()
            if _applies(config, name) and not _is_said(config, name)
        ]
        notes += [
            text.format(value)
            for name, text in OTHERWISE.get(system, {}).items()
            if (value := _setting(config, name)) is not None
        ]
    return config, (*notes, *_meanings(config))


def _is_said(config: RunConfig, name: str) -> bool:
    """By any of its names, if only to be nothing."""
    return _setting(config, name) is not None or bool(KEYS[name].aliases.keys() & {*config.written_as})


def _setting(config: RunConfig, name: str) -> Any:
    return getattr(getattr(config, HOMES[name]), name)


def _applies(config: RunConfig, name: str) -> bool:
    """Some settings are about adapters, and some about what rests beside them anyway."""
    model = config.model
    has_adapters = model.method not in (None, "full") or bool(model.use_dora or model.quantization_bit)
    return has_adapters if name.startswith("lora_") else not (has_adapters and name in _REST)


def _is_open(config: RunConfig, name: str) -> bool:
    """Is a setting unset, by its own name and in any other way?"""
    return _applies(config, name) and all(_setting(config, one) is None for one in (name, *UNLESS.get(name, ())))


def _meanings(config: RunConfig) -> list[str]:
    """Settings that do something else here than in the systems that have them, too."""
    data, notes = config.data, []
    if config.packs:
        if data.packing_buffer is not None and not data.online:
            notes.append(
                f"packing_buffer {data.packing_buffer} is a look-ahead in samples for streams that cannot be"
                " measured first; this dataset is measured and packed as a whole, so it changes nothing"
            )
        if data.packing_min_fill_ratio and data.packing_window is None:
            drops = "drops nothing: emptier packs are packed again with the next window, and there is no window"
            if data.packing_drop_last:
                drops = (
                    f"{data.packing_min_fill_ratio:g} with packing_drop_last: emptier packs are dropped from an epoch"
                )
            notes.append(f"packing_min_fill_ratio {drops}")
        if not _MIXES.isdisjoint(detect_systems(config.written_as)) and "neat_packing" not in config.written_as:
            notes.append("samples in a pack never attend to each other here")
    if data.max_sample_length is not None:
        notes.append(f"samples of more than max_sample_length {data.max_sample_length} tokens go to the ledger")
    how = f"{'on the left, ' if data.truncate_side == 'left' else ''}never inside an image or a video"
    if data.cutoff_len is not None:
        notes.append(f"samples are cut to cutoff_len {data.cutoff_len:,} tokens, {how}")
    elif data.overlong == "truncate":
        notes.append(f"longer samples are truncated, {how}")
    return notes


def training_config(config: RunConfig, *, rows: int, packs: int | None) -> tuple[DatasetConfig, tuple[str, ...]]:
    """The training dataset; packs per step and epochs are filled in once packs are counted."""
    data = config.data
    if not data.dataset_path:
        raise ConfigError("data.dataset_path", got="none", expected="a file or folder, or a hub name")
    for name, given in data.given("split", "subset").items():
        if os.path.isfile(data.dataset_path):
            got = f"{given} of file {data.dataset_path}"
            raise ConfigError(
                f"data.{name}", got=got, expected="a dataset that has configurations or splits", fix="leave it out"
            )
    unused = data.given(*_PACKS_ONLY)
    length, notes = _pack_length(config)
    dataset = _dataset(
        config,
        rows_per_batch=rows,
        group_by_length=_groups_by_length(config),
        packs_per_step=packs or 1,
        max_steps=run_length(config).max_steps if data.online else None,
        **length,
    )
    if unused and not dataset.has_packs:
        return dataset, (*notes, f"packing is false: {', '.join(unused)} have no effect")
    return dataset, notes


def _pack_length(config: RunConfig) -> tuple[dict[str, int], tuple[str, ...]]:
    """The length of packs where only cutoff_len is set: the tokens that the rows of a padded batch could hold."""
    data, rows = config.data, config.training.per_device_train_batch_size or 1
    if data.cutoff_len is None or data.packing_length is not None:
        return {}, ()
    if not (config.packs or data.pad_packs):
        return {"packing_length": data.cutoff_len}, ()
    length = rows * data.cutoff_len
    note = f"packs have up to {length:,} tokens, per_device_train_batch_size {rows} x cutoff_len {data.cutoff_len:,}"
    return {"packing_length": length}, (f"{note}; data.packing_length differs",)


def evaluation_config(config: RunConfig, *, rows: int, world_size: int) -> DatasetConfig | None:
    """The evaluation dataset, in its own order, with its own cost table and plan."""
    data = config.data
    if not config.evaluates:
        return None
    own: dict[str, object] = {"part": "eval"}
    if data.eval_path:
        own = {"dataset_path": data.eval_path, "split": data.eval_split or data.split, "eval_size": None}
        own |= {"max_samples": data.max_eval_samples, "dataset_format": None}  # it is recognised, and may be another
    packing = data.eval_packing if data.eval_packing is not None else config.packs
    size = config.training.per_device_eval_batch_size or rows
    return _dataset(
        config,
        **own,
        costs=None,
        plan=None,
        online=None,  # they are measured first, and evaluated once each
        packing=packing,
        pad_packs=False,
        shuffle=False,
        balance=None,
        rows_per_batch=1 if packing else size,
        packing_drop_last=None,  # every sample is evaluated
        max_packs=None,
        packs_per_step=world_size * (1 if packing else size),  # a batch for every process
        **_pack_length(config)[0],
    )


def _dataset(config: RunConfig, **own: Any) -> DatasetConfig:
    """The data section as a dataset, with settings of its own."""
    name = config.model.model_name_or_path
    if not name:
        raise ConfigError("model.model_name_or_path", got="none", expected="a model folder, a hub name or tiny:FAMILY")
    settings = {**config.data.given(*DatasetSection.known()), "cache_dir": str(cache_root(config)), **own}
    if settings.get("packing") is False and not settings.get("pad_packs"):
        settings = {name: value for name, value in settings.items() if name not in _PACKS_ONLY}
    try:
        return DatasetConfig(model=name, plugins=config.model.plugins, seed=data_seed(config), **settings)
    except ConfigError as error:
        keys = DatasetSection.known()
        problems = [f"data.{one}" if one.partition(":")[0] in keys else one for one in error.problems]
        raise ConfigError("data", problems=problems) from None


def cache_root(config: RunConfig) -> Path:
    """The folder in which cost tables, plans and rows of this config are kept."""
    folder = config.data.cache_dir
    return Path(os.path.abspath(Path(folder).expanduser() if folder is not None else cache_dir()))


def data_seed(config: RunConfig) -> int:
    """The random seed of the data."""
    training = config.training
    return training.data_seed if training.data_seed is not None else training.seed or 0


def _groups_by_length(config: RunConfig) -> bool:
    """Whether padded batches are grouped by length, by either of its names in transformers."""
    grouped = config.training.group_by_length
    return config.training.train_sampling_strategy == "group_by_length" if grouped is None else grouped
