"""A config's data section -> the datasets of training and evaluation, and the defaults of the section it came from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from packtrain.app.config.load import RunConfig
from packtrain.app.datasets.config import DatasetConfig
from packtrain.core.errors import ConfigError
from packtrain.core.places import cache_dir
from packtrain.plans.config import LIMITS, PackingConfig
from packtrain.records.schemas.options import SchemaOptions

# The section `dataset` comes from a system whose users leave these out and mean this.
_DATASET_SECTION: Mapping[str, object] = {"packing": False, "packing_length": 32_000, "packing_strategy": "first_fit"}
_DATASET_SECTIONS = ("dataset", "dataset_config")
_SCHEMA = ("schema", "object_ordering", "emit_norm", "object_template", "object_prompt", "formatting", "columns")
_MEASURING = (
    *("max_images_per_sample", "max_sample_length", "add_eos", "split", "subset", "allow_outside_root"),
    *("max_failure_rate", "content_hash", "template_date"),
)
_PACKS_ONLY = (
    *(limit for limit in LIMITS if limit != "packing_length"),
    *("packing_window", "packing_min_fill_ratio", "packing_buffer", "packing_drop_last", "effort"),
)
_OWN = ("packing_length", "packing_strategy", "max_images_per_pack", "shuffle", "seed", "epochs", "packs_per_step")
_OPTIONS = tuple(one.name for one in fields(PackingConfig) if one.name not in _OWN)


def section_defaults(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """The config with what its sections mean where they come from, and what is different here."""
    notes: list[str] = []
    if any(name in config.written_as for name in _DATASET_SECTIONS):
        missing = {name: value for name, value in _DATASET_SECTION.items() if name not in config.data}
        config = replace(config, data={**missing, **config.data})
        if missing:
            said = ", ".join(f"{name}: {str(value).lower()}" for name, value in missing.items())
            notes.append(f"section dataset leaves out what it means by default: {said}; section data packs by default")
        if config.data["packing_strategy"] == "first_fit" and config.data["packing"]:
            notes.append("packing_strategy first_fit looks at every open pack here; next_fit looks at the last alone")
    return config, (*notes, *_meanings(config))


def _meanings(config: RunConfig) -> list[str]:
    """Settings that do something else here than in the systems that have them, too."""
    data, found = config.data, []
    if data.get("packing", True):
        if "packing_buffer" in data:
            found.append(
                f"packing_buffer {data['packing_buffer']} is a look-ahead in samples for streams that cannot be"
                " measured first; this dataset is measured and packed as a whole, so it changes nothing"
            )
        if data.get("packing_min_fill_ratio") and "packing_window" not in data:
            found.append(
                "packing_min_fill_ratio drops nothing: emptier packs of a window join the next; there is no window"
            )
        if any(name in config.written_as for name in ("TrainConfig", "VLMConfig")):
            found.append("samples that share a pack do not see each other here")
    if isinstance(data.get("max_sample_length"), int):
        found.append(f"samples of more than max_sample_length {data['max_sample_length']} tokens go to the ledger")
    if data.get("overlong") == "truncate":
        found.append("longer samples are truncated, never inside an image or a video")
    return found


def training_config(config: RunConfig, *, rows: int, packs: int | None) -> tuple[DatasetConfig, tuple[str, ...]]:
    """The dataset that is trained on; packs of a step and epochs are filled in once packs are counted."""
    data = config.data
    if not data.get("dataset_path"):
        raise ConfigError("data.dataset_path", got="none", expected="a file or folder, or a hub name")
    for name in ("split", "subset"):
        if name in data and os.path.isfile(str(data["dataset_path"])):
            got = f"{data[name]} of the file {data['dataset_path']}"
            raise ConfigError(f"data.{name}", got=got, expected="a dataset that has parts", fix="leave it out")
    packing, pad_packs = bool(data.get("packing", True)), bool(data.get("pad_packs", False))
    notes = []
    unused = [name for name in _PACKS_ONLY if name in data]
    if not (packing or pad_packs) and unused:
        notes.append(f"packing is false: {', '.join(unused)} have no effect")
    made = DatasetConfig(
        **_common(config, packing=packing, packs=packing or pad_packs),
        pad_packs=pad_packs,
        dataset_path=str(data["dataset_path"]),
        shuffle=data.get("shuffle", True),
        rows_per_batch=rows,
        group_by_length=_grouped(config),
        max_samples=data.get("max_samples"),
        packs_per_step=packs or 1,
        balance=data.get("balance"),
    )
    return made, tuple(notes)


def evaluation_config(config: RunConfig, *, rows: int, world: int) -> DatasetConfig | None:
    """The dataset that is evaluated on, in its own order, with its own cost table and plan."""
    data, training = config.data, config.training
    if not data.get("eval_path"):
        return None
    packing = bool(data.get("eval_packing", data.get("packing", True)))
    size = int(training.get("per_device_eval_batch_size", rows))
    return DatasetConfig(
        **_common(config, packing=packing, packs=packing, evaluation=True),
        dataset_path=str(data["eval_path"]),
        shuffle=False,
        rows_per_batch=1 if packing else size,
        max_samples=data.get("max_eval_samples"),
        packs_per_step=world * (1 if packing else size),  # a batch for every process
    )


def _common(config: RunConfig, *, packing: bool, packs: bool, evaluation: bool = False) -> dict[str, Any]:
    """What training and evaluation data have in common; `packs`: samples share packs, padded or not."""
    data = config.data
    left_out = () if packs else _PACKS_ONLY
    options = {name: data[name] for name in _OPTIONS if name in data and name not in left_out}
    if evaluation:
        options.pop("packing_drop_last", None)  # every sample is evaluated
    name = config.model.get("model_name_or_path")
    if not name:
        raise ConfigError("model.model_name_or_path", got="none", expected="a model folder, a hub name or tiny:FAMILY")
    found = {
        "model": str(name),
        "processor_config": dict(data.get("processor_config") or {}),
        "packing": packing,
        "packing_options": options,
        "seed": data_seed(config),
        "measuring": _measuring(config),
        "cache_dir": str(cache_root(config)),
    }
    names = ("dataset_type", "dataset_format", "media_root", "loss_on", "packing_length", "cache_bytes", "cache_tokens")
    # A strategy is checked also where nothing is packed: the same config is trained packed.
    found |= {name: data[name] for name in (*names, "packing_strategy") if name in data}
    if packs and "max_images_per_pack" in data:
        found["max_images_per_pack"] = data["max_images_per_pack"]
    if evaluation:
        found.pop("dataset_format", None)  # it is recognised, and may be another
    return found


def cache_root(config: RunConfig) -> Path:
    """The folder in which cost tables, plans and rows of this config are kept."""
    given = config.data.get("cache_dir")
    return Path(os.path.abspath(Path(given).expanduser() if given is not None else cache_dir()))


def data_seed(config: RunConfig) -> int:
    """The seed of everything that is drawn about data."""
    training = config.training
    seed = training.get("data_seed") if training.get("data_seed") is not None else training.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError("training.seed", got=repr(seed), expected="a whole number from 0 on")
    return seed


def _grouped(config: RunConfig) -> bool:
    """Are padded batches grouped by length? The trainer of transformers says it by another name."""
    strategy = config.training.get("train_sampling_strategy")
    return bool(config.training.get("group_by_length", strategy == "group_by_length"))


def _measuring(config: RunConfig) -> dict[str, Any]:
    """Other arguments of measuring that the section names."""
    data = config.data
    found: dict[str, Any] = {name: data[name] for name in _MEASURING if name in data}
    schema = {name: data[name] for name in _SCHEMA if name in data}
    if coordinate_tokens(data.get("coord_tokens")):
        schema["coord_tokens"] = True
    if schema:
        found["schema"] = SchemaOptions(seed=data_seed(config), **schema)
    return found


def coordinate_tokens(given: Any) -> bool:
    """The switch of an experiment that another system has: true, or a section with `enabled`."""
    return bool(given.get("enabled")) if isinstance(given, Mapping) else bool(given)
