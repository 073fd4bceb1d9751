"""Which files a source consists of, in reading order, and how messages call them."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from packtrain.core.errors import ConfigError, RecordError
from packtrain.records.formats.splits import by_split, choose_split, is_saved_dataset, split_folder
from packtrain.records.shards.address import has_wildcards, is_remote, list_remote
from packtrain.records.source import Entry, SourceSpec, Unit
from packtrain.records.span import Plain

# A snapshot is a folder of links: REPO/snapshots/COMMIT/data/a.parquet -> REPO/blobs/HASH
_SNAPSHOT = re.compile(r"(.*/(?:datasets|models|spaces)--[^/]+)/snapshots/[^/]+(?:/.*)?", re.DOTALL)


def hub_snapshots(folder: str) -> list[str]:
    """The snapshots in a folder of the hub's cache, the latest first; none in any other folder."""
    if not all(os.path.isdir(os.path.join(folder, name)) for name in ("blobs", "snapshots")):
        return []
    folders = [entry for entry in os.scandir(os.path.join(folder, "snapshots")) if entry.is_dir()]
    return [entry.path for entry in sorted(folders, key=lambda entry: -entry.stat().st_mtime)]


def allowed_places(folder: str) -> tuple[str, ...]:
    """The real folders that a file of this one may lie in, each with a slash at its end."""
    real = os.path.realpath(folder)
    snapshot = _SNAPSHOT.fullmatch(real)
    places = [real, *([f"{snapshot[1]}/blobs"] if snapshot else [])]
    return tuple(os.path.join(place, "") for place in places)


T = TypeVar("T")
# The endings by which a folder's data files are found; a file that is named directly may be called anything.
ENDINGS: Mapping[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst"),
    "json": (".json", ".json.gz", ".json.zst"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "csv": (".csv", ".csv.gz", ".csv.zst"),
    "tsv": (".tsv", ".tsv.gz", ".tsv.zst"),
    "webdataset": (".tar", ".tar.gz", ".tgz", ".tar.zst"),
}
LINK_OUT = "file is a link out of the dataset's folder"
NOT_A_FILE = "not a regular file"
RESULT_MARKS = ("measure.json", ".measure.journal")
MAX_BRACES = 1_000_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
YAML_ENDINGS = (".yaml", ".yml")


def kind_of_name(name: str) -> str | None:
    """The format that a file's ending promises."""
    lowered = name.lower()
    return next((kind for kind, endings in ENDINGS.items() if lowered.endswith(endings)), None)


def is_hub_name(path: str) -> bool:
    """Could this be org/name on the Hugging Face hub? Something that is named like a data file is a path."""
    return bool(_HUB_NAME.fullmatch(path)) and not kind_of_name(path) and not path.lower().endswith(YAML_ENDINGS)


def expand_braces(pattern: str) -> list[str]:
    """The names that a pattern like `shard-{000..012}.tar` or `{train,val}.tar` names, in its order.

    >>> expand_braces("s-{08..10}.tar")
    ['s-08.tar', 's-09.tar', 's-10.tar']
    >>> expand_braces("s-{0..2}.tar")
    ['s-0.tar', 's-1.tar', 's-2.tar']
    """
    names = [""]
    position = 0
    for braces in _BRACES.finditer(pattern):
        choices = _choices(braces.group(1), pattern)
        if len(names) * len(choices) > MAX_BRACES:
            raise _too_many(pattern)
        fixed = pattern[position : braces.start()]
        names = [name + fixed + choice for name in names for choice in choices]
        position = braces.end()
    return [name + pattern[position:] for name in names]


def _choices(body: str, pattern: str) -> list[str]:
    """The choices of one pair of braces."""
    if bounds := _RANGE.fullmatch(body):
        low, high = bounds.groups()
        if abs(int(high) - int(low)) >= MAX_BRACES:
            raise _too_many(pattern)
        step = 1 if int(high) >= int(low) else -1
        # As in a shell, numbers are padded where one of the bounds is.
        width = (
            max(len(low), len(high)) if any(len(bound) > 1 and bound.startswith("0") for bound in (low, high)) else 0
        )
        return [str(number).zfill(width) for number in range(int(low), int(high) + step, step)]
    return body.split(",") if "," in body else ["{" + body + "}"]


def _too_many(pattern: str) -> ConfigError:
    return ConfigError(
        "dataset_path", got=pattern, expected=f"a pattern of at most {MAX_BRACES:,} files", fix="shorten its ranges"
    )


def is_pattern(path: str) -> bool:
    """Does this path name several files by wildcards or braces? A file that exists under that name is no pattern."""
    if is_remote(path):
        return has_wildcards(path) or _BRACES.search(path) is not None
    return not os.path.lexists(path) and (any(mark in path for mark in "*?[") or _BRACES.search(path) is not None)


def dataset_root(path: str) -> str:
    """The folder to which names in messages, and media, are relative."""
    if os.path.isdir(path) or (is_remote(path) and path.endswith("/")):
        return path
    if not is_pattern(path):
        return os.path.dirname(path) or "."
    fixed = re.split(r"[*?\[{]", path, maxsplit=1)[0]
    return os.path.dirname(fixed) or "."


def local_root(spec: SourceSpec) -> str | None:
    """The folder that names of a local source's files are relative to; None for remote data and hub names."""
    return dataset_root(spec.path) if os.path.isabs(spec.path) and not is_remote(spec.path) else None


def list_files(path: str, format: str) -> list[str]:
    """The files of a source in reading order: one file, those of a folder, or those that a pattern names."""
    if is_remote(path):
        return list_remote(expand_braces(path), ENDINGS[format])
    if os.path.isdir(path):
        return sorted(walk(path, ENDINGS[format]))
    if not is_pattern(path):
        return [path]
    names: list[str] = []
    for name in expand_braces(path):
        # A name without wildcards stays even where nothing is there: a missing shard must be noticed, not left out.
        wild = any(mark in name for mark in "*?[")
        names.extend(sorted(glob.glob(name, recursive=True)) if wild else [name])
    return names


def split_files(spec: SourceSpec) -> list[str]:
    """The files of a source; of a folder with splits, those of the one that is asked for."""
    names = _files_by_name(spec)
    if not _is_folder(spec.path):
        return list(names.values())
    by_name = by_split(spec, list(names))
    chosen = set(by_name.get(choose_split(spec, by_name), ()))
    return [file for name, file in names.items() if name in chosen]


def split_notes(specs: Iterable[SourceSpec]) -> tuple[str, ...]:
    """Notes about the splits of folders."""
    return tuple(note for spec in specs if (note := split_note(spec)))


def split_note(spec: SourceSpec) -> str | None:
    """A note on which split of a folder is read and which are not; None if there is only one."""
    if spec.format == "hf_dataset" or not _is_folder(spec.path):
        return None
    names = list(_files_by_name(spec))
    grouped = by_split(spec, names)
    split = choose_split(spec, grouped)
    others = sorted(
        f"{other} ({_files(len(grouped[other]))})" for other in grouped if other is not None and other != split
    )
    if strange := len(names) - sum(map(len, grouped.values())):
        others.append(f"{_files(strange)} that the README.md does not name")
    if split is None or not others:
        return None
    return f"{spec.name}: split {split} is read ({_files(len(grouped[split]))}); left: {', '.join(others)}"


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def _is_folder(path: str) -> bool:
    return path.endswith("/") if is_remote(path) else os.path.isdir(path)


def _files_by_name(spec: SourceSpec) -> dict[str, str]:
    return {shown_name(spec, file): file for file in list_files(spec.path, spec.format)}


def _is_result(parent: str, name: str) -> bool:
    """Is this a folder that packtrain has written? What it found in the data is not data."""
    return any(os.path.exists(os.path.join(parent, name, mark)) for mark in RESULT_MARKS)


def walk(folder: str, endings: tuple[str, ...] = ("",)) -> Iterator[str]:
    """Files below a folder whose names end so. Hidden ones are left out; links to folders are not followed."""
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(name for name in folders if not (name.startswith(".") or _is_result(parent, name)))
        for name in sorted(names):
            if not name.startswith(".") and name.lower().endswith(endings):
                yield os.path.join(parent, name)


def dataset_files(spec: SourceSpec) -> list[str]:
    """The local files that a source consists of; none for a dataset on the hub."""
    if not os.path.isdir(spec.path):
        return [spec.path] if os.path.exists(spec.path) else []
    return sorted(walk(split_folder(spec) if is_saved_dataset(spec.path) else spec.path))


def source_files(spec: SourceSpec) -> Iterator[tuple[str, RecordError | None]]:
    """Every file of a source, with an error for those that must not be opened."""
    places = allowed_places(spec.path) if os.path.isdir(spec.path) else None
    for file in split_files(spec):
        if places and os.path.islink(file) and not os.path.realpath(file).startswith(places):
            detail = "select files by a pattern, such as folder/**/*, to follow such links"
            yield file, RecordError("read", LINK_OUT, detail)
        elif os.path.lexists(file) and not os.path.isfile(file):  # opening a pipe would wait for ever
            yield file, RecordError("read", NOT_A_FILE)
        else:
            yield file, None


def in_chunks(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Lists of items of about `most` bytes; even an empty item takes memory."""
    chunk: list[T] = []
    total = 0
    for item in items:
        chunk.append(item)
        total += 64 + size(item)
        if total >= most:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def shown_name(spec: SourceSpec, file: str) -> str:
    """The name of a file in messages: relative to the dataset."""
    return writable(os.path.relpath(file, dataset_root(spec.path)).replace(os.sep, "/"))


def writable(name: str) -> str:
    """A file name as text that a table takes: names are bytes, and need not be UTF-8."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


class Format:
    """A way in which records are stored in files. Every verb keeps memory flat whatever the size of the data.

    Subclasses say how a file is cut into units, what its entries are, and what the entry at one place is.
    """

    def cut(self, file: str) -> Iterator[Unit]:
        """The units of one file. Raises RecordError at a fault, after the units before it."""
        raise NotImplementedError

    def entries(self, unit: Unit, name: str) -> Iterator[Entry]:
        """The entries of one unit of a file that messages call `name`.

        A broken entry is yielded with its error; the iteration never ends early without an entry that says so.
        """
        raise NotImplementedError

    def entry_at(self, file: str, plain: Plain, at: int, origin: str) -> Entry:
        """The entry at a place; RecordError where there is none, OSError where the bytes cannot be had."""
        raise NotImplementedError

    def num_entries(self, unit: Unit) -> int:
        """Number of `entries` of a unit; reads them if there is no other way."""
        return sum(1 for _ in self.entries(unit, ""))

    def units(self, spec: SourceSpec) -> Iterator[Unit]:
        """The units of every file of a source, in reading order; a fault is a unit that says so."""
        for file, fault in source_files(spec):
            yield from [Unit(file=file, payload=fault)] if fault else self.units_of_file(file)

    def units_of_file(self, file: str) -> Iterator[Unit]:
        """The units of one file, and a failed one at a fault."""
        try:
            yield from self.cut(file)
        except RecordError as error:
            yield Unit(file=file, payload=error)

    def read(self, spec: SourceSpec, unit: Unit) -> Iterator[Entry]:
        """The entries of one unit; of a failed unit one with its error."""
        name = shown_name(spec, unit.file)
        if isinstance(unit.payload, RecordError):
            return iter([Entry(origin=name, error=unit.payload)])
        return self.entries(unit, name)

    def count(self, spec: SourceSpec, unit: Unit) -> int:
        """Number of entries that `read` yields."""
        return 1 if isinstance(unit.payload, RecordError) else self.num_entries(unit)

    def read_at(self, spec: SourceSpec, file: str, plain: Plain, at: int, origin: str) -> Entry:
        """The one entry at a place that `read` gave; `plain` holds the decompressed bytes of `file`.

        OSError where the bytes cannot be had; what does not belong there is an entry with its error.
        """
        try:
            return self.entry_at(file, plain, at, origin)
        except RecordError as error:
            return Entry(origin=origin, error=error, at=at)
