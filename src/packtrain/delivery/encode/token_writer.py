"""Tokenizing a measured dataset once: in several processes, part by part; what an interruption leaves is used again.

In:     a cost table and its rows, where data files are read, a folder
Out:    the folder with every row's tokens, see token_table
Costs:  one tokenizing of every text; on disk 4 bytes for each token of text; in memory one part for each process
Fails:  data that are not as measured, or cannot be read (DataError); a folder that cannot be written, or a disk that is
        full (ArtifactError). A record that cannot be tokenized has no tokens and fails where it is read, as it does
        without a cache
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from packtrain.core.artifacts import alone, atomic_path, read_json, remove_leftovers, write_json
from packtrain.core.errors import ArtifactError, RecordError
from packtrain.core.fingerprint import differences, digest
from packtrain.core.values import MediaHeader
from packtrain.delivery.encode.decode import media_header
from packtrain.delivery.encode.encode import SampleEncoder
from packtrain.delivery.encode.pack_source import media_read
from packtrain.delivery.encode.reader import RecordReader
from packtrain.delivery.encode.row_table import RowTable
from packtrain.delivery.encode.sample_tokens import SampleTokens
from packtrain.delivery.encode.token_table import (
    FINGERPRINT,
    KIND,
    NOT_KEPT,
    PART_SCHEMA,
    TOKENS,
    VERSION,
    TokenPart,
    TokenTable,
    digest_of,
    part_batch,
    part_name,
    read_part,
    token_inputs,
    wrong_size,
)
from packtrain.measuring.engines import in_processes
from packtrain.measuring.request import Request
from packtrain.measuring.table import CostTable
from packtrain.records.span import Files

PART_TOKENS = 4_000_000  # of text; 16 MB
PART_ROWS = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenProgress:
    """How far tokenizing is; handed to the caller after every part."""

    rows: int
    total: int
    resumed: int = 0  # rows that an earlier process had finished
    changed: tuple[str, ...] = ()  # why older tokens could not be used


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """What all parts of one folder have in common."""

    request: Request
    rows: Path
    files: Files
    folder: Path
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Consecutive rows that make one part."""

    number: int
    start: int
    stop: int


def make_tokens(
    table: CostTable,
    rows: RowTable,
    files: Files,
    folder: Path,
    *,
    lock: Path,
    workers: int = 1,
    report: Callable[[TokenProgress], None] = lambda _: None,
) -> TokenTable:
    """The tokens of a table: those in the folder if they were made from the same, else made now.

    One process makes them, others with the same lock (outside of the folder, which may be removed) wait. Nothing is
    reported where everything is there.
    """
    inputs = token_inputs(table)
    task = _Task(request=table.request(), rows=rows.path, files=files, folder=folder, fingerprint=digest(inputs))
    spans = list(_spans(table.column("text_tokens")))
    try:
        with alone(lock) as held:
            found = _found(folder, inputs)
            if not found.whole:
                folder.mkdir(parents=True, exist_ok=True)
                if held:
                    _remove_leftovers(folder)
                # From now on the folder says that it is not complete, and what its parts are to be made from.
                write_json(folder / TOKENS, KIND, VERSION, {"inputs": inputs, "parts": None})
                parts = [asdict(part) for part in _made(task, spans, found, workers, report)]
                write_json(folder / TOKENS, KIND, VERSION, {"inputs": inputs, "parts": parts})
            return TokenTable.load(folder).opened()
    except OSError as error:
        raise _not_written(folder, error) from error
    finally:
        _latest.clear()


def _not_written(folder: Path, error: OSError) -> ArtifactError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    first = "make room" if full else "check its disk, and whether another process removes files there"
    return ArtifactError(
        str(folder),
        got=f"{type(error).__name__}: {error}",
        expected="space for the tokens of the dataset" if full else "a writable folder",
        fix=f"{first}; then run the same command again (finished parts are kept); or set data.cache_tokens: false",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What is in a folder: parts as it lists them, where they are of the same inputs and were complete."""

    changed: tuple[str, ...] = ()  # why they cannot be used as they are
    parts: tuple[TokenPart, ...] | None = None

    @property
    def whole(self) -> bool:
        return self.parts is not None and not self.changed


def _found(folder: Path, inputs: dict[str, object]) -> _Found:
    """What an earlier process has left, its parts looked for."""
    if not (folder / TOKENS).exists():
        return _Found()
    try:
        content = read_json(folder / TOKENS, KIND, VERSION)
        changed = tuple(differences(content["inputs"], inputs))
        if changed or content["parts"] is None:
            return _Found(changed=changed)
        parts = tuple(TokenPart(**part) for part in content["parts"])
    except ArtifactError as error:
        return _Found(changed=(f"{TOKENS}: {error.got}",))
    except (KeyError, TypeError) as error:
        return _Found(changed=(f"{TOKENS}: {error}",))
    names = map(part_name, range(len(parts)))
    sizes = [(name, wrong_size(folder / name, part.bytes)) for name, part in zip(names, parts, strict=True)]
    return _Found(changed=tuple(f"{name}: {wrong}" for name, wrong in sizes if wrong), parts=parts)


def _made(
    task: _Task,
    spans: list[_Span],
    found: _Found,
    workers: int,
    report: Callable[[TokenProgress], None],
) -> list[TokenPart]:
    """Every part, on the disk."""
    _remove_others(task.folder, len(spans))
    listed, changed = dict(enumerate(found.parts or ())), found.changed
    done = {one.number: part for one in spans if (part := _kept(task, one, listed.get(one.number))) is not None}
    missing = [one for one in spans if one.number not in done]
    rows = resumed = sum(part.rows for part in done.values())
    total = spans[-1].stop if spans else 0
    report(TokenProgress(rows=rows, total=total, resumed=resumed, changed=changed))
    for number, part in _written(task, missing, workers):
        done[number] = part
        rows += part.rows
        report(TokenProgress(rows=rows, total=total, resumed=resumed, changed=changed))
    return [done[one.number] for one in spans]


def _written(task: _Task, missing: list[_Span], workers: int) -> Iterator[tuple[int, TokenPart]]:
    work = functools.partial(_write_part, task)
    # A stream of records is read forward only: each process would read it from its beginning.
    count = 1 if any(spec.streaming for spec in task.request.specs) else min(workers, len(missing))
    if count <= 1:
        return map(work, missing)
    return in_processes(count, work, missing, stage="tokenizing", name=_rows_named)


def _rows_named(one: _Span) -> str:
    return f"rows {one.start} to {one.stop - 1}"


def _spans(text_tokens: np.ndarray) -> Iterator[_Span]:
    """Rows cut into parts: the same whatever the number of processes."""
    ends, start, number = np.cumsum(text_tokens, dtype=np.int64), 0, 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = min(int(np.searchsorted(ends, before + PART_TOKENS, side="right")), start + PART_ROWS)
        stop = max(stop, start + 1)
        yield _Span(number=number, start=start, stop=stop)
        start, number = stop, number + 1


def _remove_others(folder: Path, parts: int) -> None:
    """Parts that there will not be."""
    names = {part_name(number) for number in range(parts)}
    for path in folder.glob("part-*.arrow"):
        if path.name not in names:
            path.unlink(missing_ok=True)


def _remove_leftovers(folder: Path) -> None:
    """What killed processes have left; only for the one that holds the lock."""
    for path in folder.glob(".part-*.tmp"):
        path.unlink(missing_ok=True)
    remove_leftovers(folder, (TOKENS,))


def _kept(task: _Task, span: _Span, listed: TokenPart | None) -> TokenPart | None:
    """A part that was finished before, from the same inputs, and as it was listed if it was."""
    path = task.folder / part_name(span.number)
    if not path.is_file():
        return None
    try:
        check = read_part(path, task.fingerprint, span.stop - span.start).check
    except ValueError:
        return None
    part = _described(path, check)
    return part if listed in (None, part) else None


def _described(path: Path, check: np.ndarray) -> TokenPart:
    return TokenPart(
        rows=len(check),
        bytes=path.stat().st_size,
        sha256=digest_of(path),
        not_kept=int((np.asarray(check) == NOT_KEPT).sum()),
    )


# ---- in a process that tokenizes


class _Tools:
    """What reads and tokenizes rows in one process."""

    def __init__(self, task: _Task) -> None:
        self._rows = RowTable(task.rows)
        self._reader = RecordReader(task.request, self._rows, task.files)
        self._encoder = SampleEncoder(task.request)

    def tokens(self, number: int) -> SampleTokens | None:
        """The tokens of one row; None where they cannot be made: reading it will say why, and count it."""
        row = self._rows.row(number)
        with self._reader.opened(number) as record:
            store = self._reader.store(row.source)

            def headers() -> list[MediaHeader]:
                return [media_header(store, medium) for medium in record.media()]

            try:
                return self._encoder.text_tokens(record, media_read(headers, row.id, row.origin))
            except RecordError:
                return None


_latest: dict[tuple[int, str], _Tools] = {}  # of one task, so that its tokenizer is loaded once in a process


def _write_part(task: _Task, span: _Span) -> tuple[int, TokenPart]:
    """Tokenize the rows of one part and write it, whole or not at all."""
    tools = _tools(task)
    batch = part_batch([tools.tokens(number) for number in range(span.start, span.stop)])
    path = task.folder / part_name(span.number)
    schema = PART_SCHEMA.with_metadata({FINGERPRINT: task.fingerprint})
    with (
        atomic_path(path) as temporary,
        pa.OSFile(str(temporary), "wb") as file,
        pa.ipc.new_file(file, schema) as writer,
    ):
        writer.write_batch(batch)
    return span.number, _described(path, batch.column("check").to_numpy())


def _tools(task: _Task) -> _Tools:
    key = os.getpid(), task.fingerprint
    if key not in _latest:
        _latest.clear()
        _latest[key] = _Tools(task)
    return _latest[key]
