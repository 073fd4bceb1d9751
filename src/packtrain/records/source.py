"""What a source of records is: a specification, units of work and raw entries; and the table of formats."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from packtrain.core.errors import RecordError
from packtrain.core.values import MediaKind, MediaRef

if TYPE_CHECKING:
    from packtrain.records.formats.source_files import Format


RawRecord: TypeAlias = Mapping[str, Any]  # the JSON of a user, or a row of a table: nothing is known of its values


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """One dataset: where it is and how to read it. A mixture is several of these."""

    name: str  # the `source` column of the cost table
    path: str
    format: str  # a key of FORMATS
    media_root: str
    split: str = "train"  # of Hugging Face datasets, and of folders whose files are named after splits
    subset: str | None = None  # for Hugging Face datasets that have several configurations
    streaming: bool = False
    max_samples: int | None = None  # use only this number of its records, drawn at random
    repeats: float | None = None  # how often each record is to be used; applied when packing
    weight: float | None = None  # share of the mixture; applied when packing


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A piece of a source that one worker reads alone.

    The pieces depend on the data only, never on the number of workers, so that results are the same for any number.
    """

    file: str
    number: int = 0  # counted over the whole dataset, without gaps, in reading order; set by `iter_units`
    source: int = 0  # position in the list of SourceSpecs; set by `iter_units`
    start: int = 0  # bytes of a line file, rows of a table; what it means is the format's own business
    stop: int = 0
    first: int = 0  # 1-based line, or 0-based row or sample, of the unit's first entry in its file
    payload: Any = None  # the raw entries themselves where a file can only be read from its beginning


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One raw element of a source, before its schema is known; exactly one of value and error is set."""

    origin: str  # file:line, file:row or shard:member, with the file's name relative to the dataset
    value: RawRecord | None = None
    error: RecordError | None = None
    media: Mapping[str, MediaRef] = field(default_factory=dict)  # media that travel beside the value (tar members)
    at: int = -1  # its place: a byte of the decompressed file, or a row of a table
    padded: bool = False  # a row of a table: it has the keys of other rows, too, without a value
    check: int = 0  # crc32 of its raw text, or of a table's row; 0 where it has none


# The kind of a medium by the ending of its file's name.
MEDIA_ENDINGS: Mapping[str, MediaKind] = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "mpo"), "image"),
    **dict.fromkeys(("mp4", "m4v", "mkv", "webm", "mov", "avi", "mpg", "mpeg", "ts", "flv", "ogv"), "video"),
    **dict.fromkeys(("wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "wma"), "audio"),
}  # type: ignore[dict-item]
# Lazy paths: a format is imported when it is first used, so that its libraries are not needed before.
FORMATS: Mapping[str, str] = {
    "jsonl": "packtrain.records.formats.jsonl:JsonLines",
    "json": "packtrain.records.formats.json_array:JsonArray",
    "parquet": "packtrain.records.formats.tables:Parquet",
    "arrow": "packtrain.records.formats.tables:Arrow",
    "csv": "packtrain.records.formats.delimited:CommaSeparated",
    "tsv": "packtrain.records.formats.delimited:TabSeparated",
    "hf_dataset": "packtrain.records.formats.hf_dataset:HFDataset",
    "webdataset": "packtrain.records.formats.tar_shards:TarShards",
}


def open_format(name: str) -> Format:
    """The reader for a key of FORMATS."""
    module, _, attribute = FORMATS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()  # type: ignore[no-any-return]
