"""From what the user names (a file, a folder, a pattern, a hub name, a mixture) to sources, units and entries."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace

from packtrain.core.errors import ConfigError, RecordError, nearest
from packtrain.core.secrets import hide_secrets
from packtrain.records.formats import jsonl
from packtrain.records.formats.delimited import NOT_CSV
from packtrain.records.formats.jsonl import BOM, parse_object
from packtrain.records.formats.source_files import (
    ENDINGS,
    YAML_ENDINGS,
    Format,
    dataset_files,
    dataset_root,
    expand_braces,
    hub_snapshots,
    is_hub_name,
    is_pattern,
    kind_of_name,
    list_files,
    local_root,
    shown_name,
    split_files,
    walk,
    writable,
)
from packtrain.records.formats.splits import INFO_FILE, SPLITS_FILE, STATE_FILE, is_saved_dataset
from packtrain.records.mixture import MixtureItem, is_registry, mixture_error, read_mixture
from packtrain.records.remote_files import remote_entries, remote_head, remote_units, with_media_check
from packtrain.records.shards.address import is_remote
from packtrain.records.shards.decompression import SPOILING, SPOILT, file_blocks
from packtrain.records.source import FORMATS, Entry, SourceSpec, Unit, open_format
from packtrain.records.span import Plain

# Faults while reading that concern one record; any other means that more is lost than the ledger has lines for.
OF_ONE_RECORD = frozenset(
    (
        *(jsonl.TOO_LONG, jsonl.NOT_UTF8, jsonl.NOT_JSON, jsonl.NOT_OBJECT, jsonl.TOO_DEEP, jsonl.LONE_SURROGATE),
        *(jsonl.PACKED, NOT_CSV, "row cannot be read", "link in archive", "special file in archive", SPOILT),
        *("two members with the same extension", "member has no extension", "media member is too large"),
    )
)
MIXTURE = "mixture"  # what `recognise` calls a YAML file; not a format, but a list of sources
CHAT_KEYS = ("messages", "conversations", "conversation", "texts")  # lists of objects inside one record
_DESCRIBING = (STATE_FILE, INFO_FILE, SPLITS_FILE, "dataset_infos.json")  # files that lie beside data files
YAML = "yaml"  # what users call that format
LOOK = 1 << 22  # bytes looked at to tell a JSON list from JSON Lines


def open_sources(
    path: str,
    format: str | None = None,
    media_root: str | None = None,
    split: str = "train",
    streaming: bool | None = False,
    subset: str | None = None,
    sources: Sequence[str] = (),
) -> list[SourceSpec]:
    """The sources that a path names: one, or those of a mixture. What cannot be used is a ConfigError.

    Of another system's list of datasets only those of these names, `sources`, are looked at. `streaming` is for
    datasets on the hub: nothing is downloaded beforehand; with None only where their files can be read so.
    """
    listed = (
        format == YAML
        or path.lower().endswith(YAML_ENDINGS)
        or (format is None and is_registry(os.path.expanduser(path)))
    )
    if not listed or os.path.isdir(path):
        return [_source(MixtureItem(path=path), format, media_root, split, streaming, subset)]
    if not os.path.isfile(os.path.expanduser(path)):
        raise _nothing_there(path)
    if format == YAML:
        format = None  # that of the mixture itself; its items are recognised
    specs: list[SourceSpec] = []
    problems: list[str] = []
    names: set[str] = set()
    for number, item in enumerate(read_mixture(os.path.expanduser(path), sources, split)):
        try:
            spec = _source(item, format, media_root, split, streaming, subset)
        except ConfigError as error:
            problems.append(f"datasets[{number}]: {error}")
            continue
        specs.append(replace(spec, name=_free_name(spec.name, names)))
        names.add(specs[-1].name)
    if problems:
        raise mixture_error(path, problems)
    return specs


def iter_units(specs: Sequence[SourceSpec]) -> Iterator[Unit]:
    """The units of all sources, numbered in reading order without gaps."""
    number = 0
    for source, spec in enumerate(specs):
        for unit in remote_units(spec) if is_remote(spec.path) else open_format(spec.format).units(spec):
            yield replace(unit, number=number, source=source)
            number += 1


def read_unit(specs: Sequence[SourceSpec], unit: Unit) -> Iterator[Entry]:
    """The entries of one unit."""
    spec = specs[unit.source]
    reader = _reader(spec.format)
    return remote_entries(spec, reader, unit) if is_remote(spec.path) else reader.read(spec, unit)


def read_place(specs: Sequence[SourceSpec], source: int, file: str, plain: Plain, at: int, origin: str) -> Entry:
    """The one entry at a place of a file, as `read_unit` gave it."""
    spec = specs[source]
    entry = _reader(spec.format).read_at(spec, file, plain, at, origin)
    return with_media_check(entry, plain) if entry.media and is_remote(spec.path) else entry


def count_unit(specs: Sequence[SourceSpec], unit: Unit) -> int:
    """Number of entries that `read_unit` yields; reads them only if the format cannot tell."""
    spec = specs[unit.source]
    if is_remote(spec.path):
        return sum(1 for _ in read_unit(specs, unit))
    return _reader(spec.format).count(spec, unit)


def data_files(specs: Sequence[SourceSpec]) -> list[str]:
    """Every local file that the sources consist of, for fingerprints."""
    return [file for spec in specs for file in _local_files(spec)]


def named_files(specs: Sequence[SourceSpec]) -> dict[str, str]:
    """The same files by names that stay when a dataset is moved: relative to it, among several after its source."""
    files: dict[str, str] = {}
    for number, spec in enumerate(specs):
        before = f"{spec.name}/" if len(specs) > 1 else ""
        for file in _local_files(spec):
            name = before + shown_name(spec, file) if local_root(spec) is not None else file
            while files.setdefault(name, file) != file:  # sources "a" and "a/b" may both have an a/b/c
                name = f"{number}:{name}"
    return files


def _local_files(spec: SourceSpec) -> list[str]:
    return dataset_files(spec) if spec.format == "hf_dataset" else split_files(spec)


def loses_more(stage: str, reason: str) -> bool:
    """Is more than one record lost with this fault: a whole file, or the rest of one?"""
    return stage == "read" and reason not in OF_ONE_RECORD


def spoils_file(reasons: Container[str]) -> bool:
    """Is one of these ("stage: reason") a fault for which none of its file's records can be delivered?"""
    return any(f"read: {reason}" in reasons for reason in SPOILING)


def recognise(path: str) -> str:
    """The format of the data at a path, by its content and, where that leaves it open, by its name."""
    if is_remote(path):
        return _kind_of_remote(path)
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return "hf_dataset" if is_saved_dataset(path) else _kind_of_folder(path)
    if is_pattern(path):
        kind = kind_of_name(expand_braces(path)[0])
        matched = list_files(path, kind or "jsonl")
        if not any(os.path.exists(file) for file in matched):
            raise _nothing_there(path)
        return kind or recognise(next(file for file in matched if os.path.exists(file)))
    if os.path.isfile(path):
        listed = path.lower().endswith(YAML_ENDINGS) or is_registry(path)
        return MIXTURE if listed else _kind_of_content(_head(path), path)
    if is_hub_name(path):
        return "hf_dataset"
    raise _nothing_there(path)


def _reader(format: str) -> Format:
    """One reader for each format and process: those of tables keep their place between units."""
    return _reader_of_process(format, os.getpid())


@functools.cache
def _reader_of_process(format: str, pid: int) -> Format:
    """A forked worker must not go on with the open files of its parent."""
    return open_format(format)


def _source(
    item: MixtureItem,
    format: str | None,
    media_root: str | None,
    split: str,
    streaming: bool | None,
    subset: str | None,
) -> SourceSpec:
    """The specification of one dataset; what the item leaves open is taken from the other arguments."""
    path = hide_secrets(os.path.expanduser(item.path))
    format = item.format or format
    if format is not None and format not in FORMATS:
        hint = nearest(format, FORMATS) or "leave it out to detect the format"
        raise ConfigError("dataset_format", got=format, expected="one of " + ", ".join((*FORMATS, YAML)), fix=hint)
    if format is None:
        format = recognise(path)
    elif is_remote(path):
        if format == "hf_dataset":
            raise ConfigError("dataset_format", got=f"{format} and {path}", expected="the format of the remote files")
        if not list_files(path, format):
            raise _nothing_there(path)
    elif format == "hf_dataset" and os.path.isfile(path):
        got, expected = f"{format} and a file", "the format of the file"
        raise ConfigError("dataset_format", got=got, expected=expected, fix="leave it out to detect it")
    elif format != "hf_dataset":
        if not (os.path.exists(path) or is_pattern(path)):
            raise _nothing_there(path)
        if not any(os.path.lexists(file) for file in list_files(path, format)):
            expected = f"files ending in {', '.join(ENDINGS[format])}"
            raise ConfigError(path, got="no such file", expected=expected, fix="check the path and the format")
    local = not is_remote(path) and (os.path.exists(path) or is_pattern(path))
    path = os.path.abspath(path) if local else path
    if is_remote(path) and not is_pattern(path) and list_files(path, format) != [path]:
        path = path.rstrip("/") + "/"  # a folder, and from now on it can be told without asking
    root = os.path.expanduser(item.media_root or media_root or (dataset_root(path) if local else "."))
    if not os.path.isdir(root):
        raise ConfigError("media_root", got=f"{root!r}, which is not a folder", expected="the folder of the media")
    spec = SourceSpec(
        name=item.name or _default_name(path),
        path=path,
        format=format,
        media_root=os.path.abspath(root),
        split=item.split or split,
        subset=item.subset or subset,
        streaming=bool(streaming),
        max_samples=item.max_samples,
        repeats=item.repeats,
        weight=item.weight,
    )
    if format != "hf_dataset":
        split_files(spec)  # a split that is not there is refused here
    return _as_hub_files(spec) if streaming is not False and format == "hf_dataset" and not local else spec


def _as_hub_files(spec: SourceSpec) -> SourceSpec:
    """A dataset on the hub as its files there, of which any row can be read again; itself where that cannot be."""
    from packtrain.records.formats.hf_dataset import hub_files

    files = hub_files(spec)
    return spec if files is None else replace(spec, path=files, format=recognise(files), streaming=False)


def _default_name(path: str) -> str:
    """The last part of a path without its ending."""
    base = os.path.basename(path.rstrip("/"))
    endings = sorted((ending for endings in ENDINGS.values() for ending in endings), key=len, reverse=True)
    ending = next((ending for ending in endings if base.lower().endswith(ending)), "")
    return writable(base[: len(base) - len(ending)] or base or "data")


def _free_name(name: str, names_in_use: set[str]) -> str:
    """The name itself, or with -2, -3, ... where it is taken."""
    names = (f"{name}-{number}" if number > 1 else name for number in itertools.count(1))
    return next(free for free in names if free not in names_in_use)


def _nothing_there(path: str) -> ConfigError:
    return ConfigError(
        "dataset_path",
        got=f"{path!r}, which does not exist",
        expected="a file, a folder, a pattern, a URL, a YAML mixture, or a hub name such as org/name",
        fix="check the path; relative paths start at the current directory, then at that of the config or mixture",
    )


def _kind_of_folder(folder: str) -> str:
    """The format of the data files in a folder."""
    if snapshots := hub_snapshots(folder):
        expected = "one of its snapshots, which hold the dataset at a commit"
        raise ConfigError(
            f"dataset_path {folder}", got="a folder of the hub's cache", expected=expected, fix=f"name {snapshots[0]}"
        )
    files: dict[str, list[str]] = {}
    for file in walk(folder):
        if kind := kind_of_name(file):
            files.setdefault(kind, []).append(file)
    return _one_kind(files, folder, _head)


def _kind_of_remote(path: str) -> str:
    """The format of a remote file, folder or pattern, by the content of the first file that is there."""
    kind = kind_of_name(expand_braces(path)[0])
    if kind is None and not is_pattern(path):
        folder = {kind: files for kind in ENDINGS if (files := list_files(path, kind)) not in ([], [path])}
        kind = (
            _one_kind(folder, path, lambda file: (remote_head(file, "json", LOOK) or ("", b""))[1]) if folder else None
        )
    head = remote_head(path, kind or "jsonl", LOOK)
    if head is None:
        raise _nothing_there(path)
    return _kind_of_content(head[1], head[0])


def _one_kind(files: Mapping[str, Sequence[str]], folder: str, head: Callable[[str], bytes]) -> str:
    """The kind of a folder's files. Beside others, .json files without records are settings; any other are refused."""
    kinds = set(files)
    if len(kinds) > 1 and not any(_holds_records(file, head(file)) for file in files.get("json", ())):
        kinds -= {"json"}
    if len(kinds) == 1:
        return kinds.pop()
    raise ConfigError(
        f"dataset_path {folder}",
        got="files of several formats: " + ", ".join(sorted(kinds)) if kinds else "no data file",
        expected="a folder of jsonl, json, csv, tsv, parquet, arrow or tar files, or one made by save_to_disk",
        fix="set dataset_format to read only those of one format, or list all in a YAML mixture"
        if kinds
        else "set dataset_format: hf_dataset lets the datasets package find the files",
    )


def _holds_records(file: str, head: bytes) -> bool:
    """Does a .json file hold records, as far as its beginning tells, or does it describe something else?"""
    text = head.removeprefix(BOM).strip()
    if os.path.basename(file) in _DESCRIBING or _kind_of_json(text) is None:
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return True  # JSON Lines, or more than is looked at
    lists = [value] if isinstance(value, list) else value.values()
    return any(isinstance(one, list) and one and isinstance(one[0], dict) for one in lists)


def _head(path: str) -> bytes:
    """The decompressed beginning of a local file."""
    head = b""
    try:
        for block in file_blocks(path):
            head += block
            if len(head) >= LOOK:
                break
    except RecordError:
        pass  # what could be read has to do; the fault is reported when the data are read
    return head


def _kind_of_content(head: bytes, path: str) -> str:
    """The format of a file. What its first bytes say counts more than its name."""
    kind = kind_of_name(path)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1") or (head.startswith(b"\xff\xff\xff\xff") and kind in (None, "arrow")):
        return "arrow"
    if head[257:262] == b"ustar":
        return "webdataset"
    if kind not in (None, "json"):
        return kind
    return _kind_of_json(head.removeprefix(BOM).lstrip()) or kind or _unknown(path)


def _unknown(path: str) -> str:
    expected = ", ".join(ending for endings in ENDINGS.values() for ending in endings)
    if path.lower().endswith(".xlsx"):
        got, fix = "XLSX, which is not supported", "save it as CSV, JSON Lines or Parquet"
        raise ConfigError(f"dataset_path {path}", got=got, expected=expected, fix=fix)
    fix = "set dataset_format if the file has another extension"
    raise ConfigError(f"dataset_path {path}", got="an unknown file type", expected=expected, fix=fix)


def _kind_of_json(text: bytes) -> str | None:
    """JSON Lines or one JSON document? Decided by the first line: a document that fills one line has no second."""
    if text.startswith(b"["):
        return "json"
    if not text.startswith(b"{"):
        return None
    first, newline, rest = text.partition(b"\n")
    if not first.rstrip().endswith(b"}"):
        return "json"  # printed over several lines, or longer than what is looked at
    if rest.strip():
        return "jsonl"
    try:
        value = parse_object(first)
    except RecordError:
        return "jsonl" if newline else "json"
    lists = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
    one_record = not lists or any(key in value for key in CHAT_KEYS)
    return "jsonl" if one_record else "json"
