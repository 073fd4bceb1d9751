"""What the tests of formats share: read a source whole, and see that it keeps the contract on the way."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.core.values import MediaRef
from packtrain.records.formats.hf_dataset import in_files
from packtrain.records.formats.source_files import Format
from packtrain.records.formats.tar_shards import MEDIA_TOO_LARGE
from packtrain.records.open import loses_more
from packtrain.records.shards.decompression import file_blocks, file_compression
from packtrain.records.source import Entry, SourceSpec, Unit, open_format


def source(path: object, format: str, **settings: Any) -> SourceSpec:
    """A source at a path."""
    return SourceSpec(name="test", path=os.fspath(path), format=format, media_root=".", **settings)  # type: ignore[call-overload]


def reader(format: str, **settings: Any) -> Format:
    """A reader with some of its limits changed."""
    made = open_format(format)
    for name, value in settings.items():
        assert hasattr(made, name), f"{format} has no {name}"
        setattr(made, name, value)
    return made


def read_units(spec: SourceSpec, **settings: Any) -> list[tuple[Unit, list[Entry]]]:
    """Every unit with its entries; read in order, and each again by a reader that has seen nothing else."""
    made = reader(spec.format, **settings)
    units = list(made.units(spec))
    read = [(unit, list(made.read(spec, unit))) for unit in units]
    for unit, entries in read:
        assert shown(reader(spec.format, **settings).read(spec, unit)) == shown(entries), (
            "depends on what was read before"
        )
        if hasattr(made, "count"):
            assert made.count(spec, unit) == len(entries), "count and read disagree"
        for entry in entries:
            assert (entry.value is None) != (entry.error is None), "exactly one of value and error"
            assert entry.error is None or entry.error.stage == "read"
    check_places(spec, made, read)
    return read


class HeldBytes:
    """The decompressed bytes of a file in memory, up to the fault where there is one."""

    def __init__(self, file: str, path: str | None = None) -> None:
        self.path, self.data, self.bytes_read = path, b"", 0
        with suppress(RecordError):
            for block in file_blocks(file):
                self.data += block

    def read_at(self, position: int, length: int) -> bytes:
        piece = self.data[position : position + length]
        self.bytes_read += len(piece)
        return piece


class PlainFiles:
    """Data files as plain bytes; compressed ones as a copy that is gone after the block."""

    def __init__(self, in_memory: bool = False) -> None:
        self.in_memory = in_memory
        self.opened: list[str] = []

    @contextmanager
    def plain(self, file: str) -> Iterator[HeldBytes]:
        self.opened.append(file)
        if self.in_memory or file_compression(file) == "none":
            yield HeldBytes(file, None if self.in_memory else file)
            return
        with tempfile.NamedTemporaryFile() as copy:
            copy.write(HeldBytes(file).data)
            copy.flush()
            yield HeldBytes(file, copy.name)


def check_places(spec: SourceSpec, made: Format, read: list[tuple[Unit, list[Entry]]]) -> None:
    """Every entry that is one of its own is found again at its place, in any order, from a file or from memory."""
    wanted = [(unit.file, entry) for unit, entries in read for entry in entries if has_place(entry)]
    random.Random(0).shuffle(wanted)
    if not in_files(spec):
        wanted = wanted[:30]  # every step back begins the stream again
    for file in sorted({file for file, _ in wanted}):
        for in_memory in (False, True):
            if in_memory and any(entry.media and not _held(entry) for _, entry in wanted):
                continue  # bounds hold for media in memory that do not for those in a file
            with PlainFiles(in_memory).plain(file if in_files(spec) else os.devnull) as plain:
                here = [entry for at, entry in wanted if at == file]
                for entry in here[:40] if in_memory else here:  # a table is opened again for every row
                    found = made.read_at(spec, file, plain, entry.at, entry.origin)
                    assert comparable(found) == comparable(entry), "read_at and read disagree"


def has_place(entry: Entry) -> bool:
    """Does this entry stand for itself, and not for the rest of a file, nor for what only streaming bounds?"""
    if entry.error is None:
        return entry.at >= 0
    lost = loses_more(entry.error.stage, entry.error.reason) or entry.error.reason == MEDIA_TOO_LARGE
    return entry.at >= 0 and not lost


def _held(entry: Entry) -> bool:
    return all(ref.data is not None for ref in entry.media.values())


def media_bytes(ref: MediaRef) -> bytes:
    """The bytes that a reference stands for."""
    if ref.data is not None:
        return ref.data
    assert ref.archive
    with open(ref.archive, "rb") as file:
        file.seek(ref.offset)
        return file.read(ref.size)


def comparable(entry: Entry) -> tuple[Any, ...]:
    """All of an entry, with the media it names in place of where they are."""
    media = {name: (ref.name, media_bytes(ref)) for name, ref in entry.media.items()}
    rest = replace(entry, media={}, error=None)
    return repr(rest), entry.error and (entry.error.reason, entry.error.detail), media


def read_all(spec: SourceSpec, **settings: Any) -> list[Entry]:
    """All entries of a source."""
    return [entry for _, entries in read_units(spec, **settings) for entry in entries]


def shown(entries: Any) -> list[tuple[str, Any]]:
    """Entries as (origin, value or reason), to compare."""
    return [(e.origin, e.error.reason if e.error else e.value) for e in entries]


def values(entries: list[Entry]) -> list[Any]:
    """The values of entries that are all sound."""
    assert not [entry.error for entry in entries if entry.error]
    return [entry.value for entry in entries]
