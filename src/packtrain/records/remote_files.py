"""Measuring remote files: one after the other through a local copy, held while its entries are read."""

from __future__ import annotations

import functools
import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace

from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.numbers import GIB
from packtrain.core.values import MediaRef
from packtrain.records.formats.source_files import Format, list_files, shown_name, split_files
from packtrain.records.shards.address import CANNOT_OPEN, identify, reaching
from packtrain.records.shards.decompression import decompress
from packtrain.records.shards.shard_cache import ShardCache
from packtrain.records.source import Entry, SourceSpec, Unit
from packtrain.records.span import Plain

FOLDER, BYTES = "PACKTRAIN_SHARD_CACHE", "PACKTRAIN_SHARD_CACHE_BYTES"  # environment variables
SHARE, MOST = 10, 64 * GIB  # by default a tenth of the disk, and no more than this
LARGEST = 256 << 20  # bytes of a medium that is taken out of its shard; larger ones can be read only meanwhile


def measuring_cache() -> ShardCache:
    """The cache that measuring uses: in the user's cache folder, unless the environment names another."""
    return _cache(os.environ.get(FOLDER) or str(cache_dir() / "shards"), os.environ.get(BYTES, ""))


@functools.cache
def _cache(folder: str, budget: str) -> ShardCache:
    folder = os.path.abspath(os.path.expanduser(folder))
    if budget and not budget.isdecimal():
        raise ConfigError(BYTES, got=budget, expected="a number of bytes")
    if not budget:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            expected = "a folder for copies of remote files while they are measured"
            fix = f"set ${FOLDER}"
            raise ConfigError(f"cache folder {folder}", got=error.strerror, expected=expected, fix=fix) from error
    return ShardCache(folder, int(budget) if budget else min(MOST, shutil.disk_usage(folder).total // SHARE))


def remote_units(spec: SourceSpec) -> Iterator[Unit]:
    """One unit for each file: so a file is fetched by the worker that reads it, and by no other."""
    for file in split_files(spec):
        yield Unit(file=file)


def remote_entries(spec: SourceSpec, reader: Format, unit: Unit) -> Iterator[Entry]:
    """The entries of one remote file, as those of a local file with the same name would be."""
    name = shown_name(spec, unit.file)
    try:
        with reaching(unit.file), measuring_cache().copy(unit.file) as path:
            local = replace(spec, path=path)
            for piece in reader.units(local):
                for entry in reader.read(local, piece):
                    yield _rename_entry(entry, shown_name(local, path), name)
    except RecordError as error:
        yield Entry(origin=name, error=error)


def remote_head(path: str, format: str, length: int) -> tuple[str, bytes] | None:
    """The first file of a URL that is there, and how its content begins."""
    for file in list_files(path, format):
        head = b""
        try:
            with reaching(file):
                for block in decompress(file, identify(file)):
                    head += block
                    if len(head) >= length:
                        break
        except RecordError as error:
            if error.reason == CANNOT_OPEN:
                continue
        return file, head
    return None


def _rename_entry(entry: Entry, copy: str, name: str) -> Entry:
    """The entry of a copy as that of the file itself; media leave the copy, which may be gone when they are read."""
    media = {key: _load_media(ref) for key, ref in entry.media.items()}
    named = replace(entry, origin=name + entry.origin.removeprefix(copy), media=media)
    return with_media_check(named, None)


def with_media_check(entry: Entry, plain: Plain | None) -> Entry:
    """The entry of a remote shard with a check of its media too: what is damaged on its way must be noticed.

    `plain` has those that are not in memory.
    """
    check = entry.check
    for ref in entry.media.values():
        if ref.size <= LARGEST:
            data = ref.data if ref.data is not None else plain.read_at(ref.offset, ref.size) if plain else b""
            check = zlib.crc32(data, check)
    return entry if check == entry.check else replace(entry, check=check)


def _load_media(ref: MediaRef) -> MediaRef:
    if ref.archive is None or ref.size > LARGEST:
        return ref
    with open(ref.archive, "rb") as file:
        return MediaRef(name=ref.name, data=os.pread(file.fileno(), ref.size, ref.offset))
