"""The request of a measurement: everything that determines its result, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import get_args

from packtrain.core.errors import ConfigError, nearest
from packtrain.core.fingerprint import digest, files_state
from packtrain.core.user_code import without_folder
from packtrain.core.values import MediaLimits
from packtrain.families.chat_template import check_date, date_for
from packtrain.families.family import ProcessorSettings
from packtrain.families.layout import LossOn
from packtrain.families.registry import family_code, load_plugins
from packtrain.families.settings import read_settings
from packtrain.measuring.measure_summary import JsonObject, Places, SourcePlace
from packtrain.records.formats.hf_dataset import hub_revision, in_files
from packtrain.records.formats.source_files import local_root
from packtrain.records.media import MAX_IMAGE_PIXELS
from packtrain.records.open import data_files, named_files
from packtrain.records.schemas.converters import SchemaOptions, load_formatting
from packtrain.records.shards.address import is_remote, remote_state
from packtrain.records.source import SourceSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Which records the user does not want; what they leave out is in the ledger and is not a failure."""

    min_seconds: float | None = None  # of each video or audio clip
    max_seconds: float | None = None
    sources: tuple[str, ...] = ()  # keep only these; empty keeps all
    max_images_per_sample: int | None = None
    max_sample_length: int | None = None  # tokens
    limit: int | None = None  # keep this many records, drawn at random
    eval_size: float | None = None  # records that are held out: a share below 1, or a number of records
    eval_part: bool = False  # keep those instead of the others

    def __post_init__(self) -> None:
        for name in ("max_images_per_sample", "max_sample_length", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, got=value, expected="a positive number", fix="leave it out for no limit")
        if self.min_seconds is not None and self.max_seconds is not None and self.min_seconds > self.max_seconds:
            raise ConfigError(
                "min_seconds, max_seconds",
                got=f"{self.min_seconds} > {self.max_seconds}",
                expected="min_seconds <= max_seconds",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One measurement, as a value that workers can be sent; equal requests give equal tables."""

    specs: tuple[SourceSpec, ...]
    model: str  # folder with the model's config, tokenizer and processor files
    limits: MediaLimits = field(default_factory=MediaLimits)
    schema: SchemaOptions = field(default_factory=SchemaOptions)
    filters: Filters = field(default_factory=Filters)
    loss_on: LossOn | None = None
    add_eos: bool | None = None  # None: for plain text
    allow_outside_root: bool = False
    max_image_pixels: int = MAX_IMAGE_PIXELS
    seed: int = 0
    tokenizer: str | None = None  # folder of the tokenizer as transformers builds it, where the model's is not enough
    chat_template: str | None = None  # the user's own, in place of the model's
    strict_columns: bool = False  # refuse records with anything that nothing reads
    template_date: str | None = None  # YYYY-MM-DD, what the chat template writes as today; `dated` gives it one

    plugins: tuple[str, ...] = ()  # modules that register the model's family

    def settings(self) -> ProcessorSettings:
        """The model's processor settings; its family is known from here on, in whatever process."""
        load_plugins(self.plugins)
        settings = read_settings(self.model, tokenizer=self.tokenizer, chat_template=self.chat_template)
        return replace(settings, template_date=self.template_date)

    def with_date(self) -> Request:
        """With one date for all that its chat template renders, today's where none is given; none where none is used.

        What is measured, encoded or compared begins with this: a template must not look at the clock later.
        """
        wanted = date_for(self.chat_template or read_settings(self.model).templates, self.template_date)
        return self if wanted == self.template_date else replace(self, template_date=wanted)

    def __post_init__(self) -> None:
        names = get_args(LossOn)
        if self.loss_on is not None and self.loss_on not in names:
            raise ConfigError("loss_on", got=self.loss_on, expected=", ".join(names), fix=nearest(self.loss_on, names))
        if self.template_date is not None:
            check_date(self.template_date)

    def describe(self) -> JsonObject:
        """What decides the numbers, as plain values that are the same wherever model and data lie.

        What the model is, its settings say. Media are where they are from the data's own folder. Shares of a mixture
        are applied when packing.
        """
        plain = {name: value for name, value in asdict(self).items() if name not in ("model", "tokenizer")}
        for name in ("template_date", "chat_template", "strict_columns", "plugins"):
            if not plain[name]:  # as of most: what they are known by has no such name
                del plain[name]
        if not plain["filters"]["eval_size"]:
            del plain["filters"]["eval_size"], plain["filters"]["eval_part"]
        if (function := self.schema.formatting_func) is not None:
            plain["schema"]["formatting_func"] = without_folder(function)
        for spec, place in zip(plain["specs"], self.places().sources, strict=True):
            del spec["repeats"], spec["weight"]
            if spec["max_samples"] is None:
                del spec["max_samples"]
            if place.root is not None:
                del spec["path"]
                spec["media_root"] = os.path.relpath(place.media_root, place.root)
        return plain

    @property
    def draws(self) -> bool:
        """Are some records drawn at random, so that all have to be counted first?"""
        filters = self.filters
        return bool(filters.limit or filters.eval_size or any(spec.max_samples for spec in self.specs))

    def places(self) -> Places:
        """Where everything lies that `describe` says nothing of."""
        sources = tuple(
            SourcePlace(path=spec.path, media_root=spec.media_root, root=local_root(spec), in_files=in_files(spec))
            for spec in self.specs
        )
        function = self.schema.formatting_func
        return Places(model=self.model, tokenizer=self.tokenizer, formatting_func=function, sources=sources)

    @classmethod
    def from_description(
        cls, plain: JsonObject, places: Places, mixture: Mapping[str, JsonObject] | None = None
    ) -> Request:
        """The request that `describe`, `places` and `mixture` tell of, as they are read back from a file."""
        shares = mixture or {}
        filters, schema = plain["filters"], plain["schema"]
        schema = schema if places.formatting_func is None else {**schema, "formatting_func": places.formatting_func}
        specs = (
            {**spec, "path": place.path, "media_root": place.media_root, **shares.get(spec["name"], {})}
            for spec, place in zip(plain["specs"], places.sources, strict=True)
        )
        return cls(
            **{
                **plain,
                "model": places.model,
                "tokenizer": places.tokenizer,
                "specs": tuple(SourceSpec(**spec) for spec in specs),
                "limits": MediaLimits(**plain["limits"]),
                "schema": SchemaOptions(**schema),
                "filters": Filters(**{**filters, "sources": tuple(filters["sources"])}),
                "plugins": tuple(plain.get("plugins", ())),
            }
        )

    def mixture(self) -> dict[str, dict[str, float | None]]:
        """How much of each source is to be used."""
        return {spec.name: {"repeats": spec.repeats, "weight": spec.weight} for spec in self.specs}


RULES_VERSION = 4  # raised whenever the same inputs would be measured differently
_BEGINNING, _LINE = 1 << 8, 1 << 20  # bytes, and most of the line that they end in


def measure_inputs(request: Request, *, content_hash: bool = False, by_processor: bool = False) -> JsonObject:
    """Data files, request, processor settings, the module of the user's formatting function and the rules' version.

    Nothing here says where model and data lie: see `Request.places`.
    """
    formatting = load_formatting(request.schema.formatting_func)[1] if request.schema.formatting_func else None
    request = request.with_date()
    settings = request.settings()
    inputs = {
        "rules": RULES_VERSION,
        "request": request.describe(),
        "settings": settings_state(settings),
        "date": None,  # the request has it, where the chat template writes one
        "formatting_func": digest(formatting) if formatting is not None else None,
        "data": _data_state(named_files(request.specs), content=content_hash),
        "revisions": {spec.name: revision for spec in request.specs if (revision := hub_revision(spec)) is not None},
        "transformers": metadata.version("transformers") if by_processor else None,
    }
    return json.loads(json.dumps(inputs, default=str))  # type: ignore[no-any-return]  # as it will be read back


def stream_inputs(request: Request) -> JsonObject:
    """What a stream that is not measured depends on. Its data may grow: how its first file begins stands for them."""
    local = [spec for spec in request.specs if local_root(spec) is not None]
    first = next((file for file in data_files(local) if os.path.isfile(file)), None)
    try:
        settings = settings_state(request.settings())
    except ConfigError:  # no model that we could read; with an encoder of its own a stream needs none
        settings = {"model": request.model}
    return {"request": request.describe(), "settings": settings, "begins": _beginning(first)}


def _beginning(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        with open(file, "rb") as stream:
            # To the end of a record: datasets of one kind begin with the same words.
            return hashlib.sha256(stream.read(_BEGINNING) + stream.readline(_LINE)).hexdigest()
    except OSError:  # which reading it will say
        return None


def _data_state(files: Mapping[str, str], *, content: bool) -> JsonObject:
    """What identifies each data file: size and time, or content; of a remote one what its store says."""
    remote = {name: remote_state(file) for name, file in files.items() if is_remote(file)}
    return files_state({name: file for name, file in files.items() if name not in remote}, content=content) | remote


def settings_state(settings: ProcessorSettings) -> JsonObject:
    """The processor's settings by name, long ones as a hash, and the tokenizer's file."""
    tokenizer = Path(settings.tokenizer_folder or settings.folder) / "tokenizer.json"
    own = family_code(settings.model_type)
    return {
        "model_type": settings.model_type,
        **({} if own is None else {"family": own}),
        "processor": dict(settings.processor),
        "image_processor": dict(settings.image),
        "video_processor": dict(settings.video),
        "vision_config": settings.config.get("vision_config", {}),
        "config": digest(dict(settings.config)),
        "chat_template": digest(settings.chat_template),
        **({} if settings.tool_template is None else {"tool_template": digest(settings.tool_template)}),
        "special_tokens": dict(settings.special_tokens),
        "tokenizer_config": digest(dict(settings.tokenizer_config)),
        "tokenizer": files_state({tokenizer.name: tokenizer}, content=True)[tokenizer.name],
    }
