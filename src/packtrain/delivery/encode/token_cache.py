"""Tokens of a measured dataset, kept: one folder for each cost table, memory-mapped by every process that reads it.

tokens.json        what they were made from, and the rows, size and checksum of every part; written last, so that a
                   folder without complete parts says so
part-00000.arrow   the text sides of consecutive rows: one record batch, with a key and a checksum for each row

Nothing that depends on pixels is kept. A row's key says which record and media sizes its tokens were made from.

Tokenizing, in several processes, costs one pass over every text, 4 bytes of disk for each token, and memory for one
part in each process. Finished parts survive an interruption. A record that cannot be tokenized has no tokens and fails
where it is read, as it does without a cache.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packtrain.core.artifacts import alone, atomic_path, read_json, remove_leftovers, write_json
from packtrain.core.checksums import FileSum
from packtrain.core.errors import ArtifactError, RecordError, in_one_line
from packtrain.core.fingerprint import differences, digest
from packtrain.core.values import MediaHeader
from packtrain.delivery.encode.decode import media_header
from packtrain.delivery.encode.encode import SampleEncoder
from packtrain.delivery.encode.pack_source import read_media
from packtrain.delivery.encode.row_table import RecordReader, RowTable
from packtrain.delivery.encode.sample_tokens import SampleTokens
from packtrain.measuring.engines import in_processes
from packtrain.measuring.request import Request
from packtrain.measuring.table import CostTable
from packtrain.packing.pack_plan import plan_inputs
from packtrain.records.shards.data_files import LocalFiles

KIND, VERSION = "sample-tokens", 5
TOKENS = "tokens.json"
NOT_KEPT = -1  # the check of a row whose record could not be tokenized
FINGERPRINT = b"packtrain.fingerprint"
PART_TOKENS = 4_000_000  # of text; 16 MB
PART_ROWS = 16_384
_NUMBERS = pa.list_(pa.field("item", pa.int32(), nullable=False))
_LISTS = {"ids": (-1,), "supervised": (-1, 2), "runs": (-1, 3)}
PART_SCHEMA = pa.schema(
    [
        *(pa.field(name, _NUMBERS, nullable=False) for name in _LISTS),
        *(pa.field(name, pa.int64(), nullable=False) for name in ("key", "check")),
    ]
)
FIX = "packtrain cache clear --kind tokens removes it; it is rebuilt"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPart:
    """One file of a folder, as tokens.json has it."""

    rows: int
    not_kept: int  # rows without tokens
    bytes: int
    checksum: str

    @classmethod
    def of(cls, path: Path, check: np.ndarray) -> TokenPart:
        """Describe a file as it is now; `check` is its checksum column."""
        not_kept = int((check == NOT_KEPT).sum())
        return cls(rows=len(check), not_kept=not_kept, **asdict(FileSum.of(path)))


def token_inputs(table: CostTable) -> dict[str, Any]:
    """Everything tokens depend on: the inputs of the table, its rows, and the tokenizers package."""
    inputs = {name: value for name, value in plan_inputs(table).items() if name != "mixture"}
    return {**inputs, "tokenizers": metadata.version("tokenizers"), "format": VERSION}


def part_name(number: int) -> str:
    """The file of a part."""
    return f"part-{number:05d}.arrow"


# ---- reading


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartColumns:
    """The columns of a part, memory-mapped."""

    key: np.ndarray
    check: np.ndarray
    lists: Mapping[str, tuple[np.ndarray, np.ndarray]]  # offsets and values of the lists of every row

    @classmethod
    def open(cls, path: Path, fingerprint: str, rows: int) -> PartColumns:
        """ValueError says what is wrong with the file."""
        try:
            batches = pa.ipc.open_file(pa.memory_map(str(path)))
            if batches.num_record_batches != 1 or not batches.schema.equals(PART_SCHEMA):
                raise ValueError("other columns")
            written_for = (batches.schema.metadata or {}).get(FINGERPRINT, b"").decode()
            if written_for != fingerprint:
                raise ValueError(f"tokens of other inputs ({written_for or 'unknown'}): rebuilt in the meantime")
            batch = batches.get_batch(0)
            batch.validate()
        except (OSError, pa.ArrowException) as error:  # ArrowInvalid is a ValueError too
            raise ValueError(str(error)) from None
        if batch.num_rows != rows:
            raise ValueError(f"{batch.num_rows:,} rows instead of {rows:,}")
        lists = {name: (batch[name].offsets.to_numpy(), batch[name].values.to_numpy()) for name in _LISTS}
        return cls(key=batch["key"].to_numpy(), check=batch["check"].to_numpy(), lists=lists)

    def sample(self, at: int) -> SampleTokens | None:
        """One row, compared with its checksum; None where it is not what was written."""
        columns = {}
        for name, shape in _LISTS.items():
            offsets, values = self.lists[name]
            part = values[int(offsets[at]) : int(offsets[at + 1])]
            if len(part) % abs(shape[-1]):
                return None
            columns[name] = part.reshape(shape)
        sample = SampleTokens(key=int(self.key[at]), **columns)
        return sample if sample.check == self.check[at] else None


class TokenTable:
    """The tokens in one folder, by row of its cost table. It pickles as what it knows of the folder.

    A process maps all parts at once and keeps them: what is removed from the folder afterwards is still there for it.
    """

    def __init__(self, folder: Path, fingerprint: str, parts: tuple[TokenPart, ...]) -> None:
        self.folder, self.fingerprint, self.parts = folder, fingerprint, parts
        self._starts = np.concatenate([[0], np.cumsum([part.rows for part in parts], dtype=np.int64)])
        self._mapped: list[PartColumns] | None = None

    @classmethod
    def load(cls, folder: str | Path) -> TokenTable:
        """A complete folder; its files are there and as large as they were."""
        folder = Path(folder)
        content = read_json(folder / TOKENS, KIND, VERSION)
        try:
            if content["parts"] is None:
                raise ArtifactError(str(folder), got="incomplete tokens", fix="run the same command again")
            table = cls(folder, digest(content["inputs"]), tuple(TokenPart(**part) for part in content["parts"]))
        except (KeyError, TypeError) as error:
            raise ArtifactError(
                str(folder / TOKENS), got=in_one_line(error), expected="a list of token files", fix=FIX
            ) from None
        for number in range(len(table.parts)):
            table._require_size(number)
        return table

    def open_parts(self) -> TokenTable:
        """Return this table after mapping all of its parts."""
        if self._mapped is None:
            self._mapped = [self._part(number) for number in range(len(self.parts))]
        return self

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def not_kept(self) -> int:
        """Rows that are tokenized when they are read."""
        return sum(part.not_kept for part in self.parts)

    def tokens(self, row: int) -> SampleTokens | None:
        """The text side of one row's sample; None where it is not kept. Damage is noticed."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        columns, at = self._columns(number), row - int(self._starts[number])
        if columns.check[at] == NOT_KEPT:
            return None
        sample = columns.sample(at)
        if sample is None:
            raise self._damaged_error(number, f"row {at} is not what was written")
        return sample

    def faults(self) -> Iterator[str]:
        """Problems of the files, after reading all of them to the end."""
        for number, part in enumerate(self.parts):
            name = part_name(number)
            if FileSum.of(self.folder / name) != FileSum(bytes=part.bytes, checksum=part.checksum):
                yield f"{name}: its content is not what was written"
            elif (self._part(number).check == NOT_KEPT).sum() != part.not_kept:
                yield f"{name}: other rows than {TOKENS} says"

    def _columns(self, number: int) -> PartColumns:
        mapped = self.open_parts()._mapped
        assert mapped is not None
        return mapped[number]

    def _part(self, number: int) -> PartColumns:
        self._require_size(number)
        try:
            return PartColumns.open(self.folder / part_name(number), self.fingerprint, self.parts[number].rows)
        except ValueError as error:
            raise self._damaged_error(number, str(error)) from None

    def _require_size(self, number: int) -> None:
        """Check the size before mapping: reading past the end of a mapped file would kill the process."""
        if wrong := _wrong_size(self.folder, number, self.parts[number]):
            raise self._damaged_error(number, wrong)

    def _damaged_error(self, number: int, got: str) -> ArtifactError:
        name = part_name(number)
        return ArtifactError(str(self.folder / name), got=got, expected="cached tokens as they were written", fix=FIX)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenTable, (self.folder, self.fingerprint, self.parts)


def _wrong_size(folder: Path, number: int, part: TokenPart) -> str | None:
    """The problem with the size of a part, if there is one."""
    try:
        size = (folder / part_name(number)).stat().st_size
    except FileNotFoundError:
        return "no such file"
    return None if size == part.bytes else f"{size:,} of {part.bytes:,} bytes"


# ---- writing


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenProgress:
    """How far tokenizing is; handed to the caller after every part."""

    rows: int
    total: int
    resumed: int = 0  # rows that an earlier process had finished
    changed: tuple[str, ...] = ()  # why older tokens could not be used


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """Settings that all parts of one folder share."""

    request: Request
    rows: Path
    files: LocalFiles
    folder: Path
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Consecutive rows that make one part."""

    number: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"rows {self.start} to {self.stop - 1}"


def make_tokens(
    table: CostTable,
    rows: RowTable,
    files: LocalFiles,
    folder: Path,
    *,
    lock: Path,
    workers: int = 1,
    report: Callable[[TokenProgress], None] = lambda _: None,
) -> TokenTable:
    """The tokens of a table: those in the folder if they were made from the same, else made now.

    One process makes them, others with the same lock (outside of the folder, which may be removed) wait. Nothing is
    reported where everything is there. DataError: the data are not as measured, or cannot be read. ArtifactError: the
    folder cannot be written.
    """
    inputs = token_inputs(table)
    task = _Task(request=table.request(), rows=rows.path, files=files, folder=folder, fingerprint=digest(inputs))
    spans = list(_split_rows(table.column("text_tokens")))
    try:
        with alone(lock) as locked:
            changed, listed = _read_listing(folder, inputs)
            if changed or listed is None:
                folder.mkdir(parents=True, exist_ok=True)
                _remove_others(folder, len(spans), leftovers=locked)
                # From now on the folder says that it is not complete, and what its parts are to be made from.
                write_json(folder / TOKENS, KIND, VERSION, {"inputs": inputs, "parts": None})
                finished = {
                    one.number: part for one in spans if (part := _finished_part(task, one, listed or ())) is not None
                }
                written = _write_missing(task, [one for one in spans if one.number not in finished], workers)
                parts = _collect_parts(
                    finished, written, TokenProgress(rows=0, total=len(table), changed=changed), report
                )
                listing = [asdict(parts[number]) for number in sorted(parts)]
                write_json(folder / TOKENS, KIND, VERSION, {"inputs": inputs, "parts": listing})
            return TokenTable.load(folder).open_parts()
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


def _read_listing(folder: Path, inputs: dict[str, Any]) -> tuple[tuple[str, ...], tuple[TokenPart, ...] | None]:
    """Why tokens.json cannot be used as it is, and its parts if they come from these inputs."""
    if not (folder / TOKENS).exists():
        return (), None
    try:
        content = read_json(folder / TOKENS, KIND, VERSION)
        changed = tuple(differences(content["inputs"], inputs))
        if changed or content["parts"] is None:
            return changed, None
        parts = tuple(TokenPart(**part) for part in content["parts"])
    except (ArtifactError, KeyError, TypeError) as error:
        return (f"{TOKENS}: {error.got if isinstance(error, ArtifactError) else error}",), None
    sizes = ((number, _wrong_size(folder, number, part)) for number, part in enumerate(parts))
    return tuple(f"{part_name(number)}: {wrong}" for number, wrong in sizes if wrong), parts


def _collect_parts(
    finished: Mapping[int, TokenPart],
    written: Iterator[tuple[int, TokenPart]],
    progress: TokenProgress,
    report: Callable[[TokenProgress], None],
) -> dict[int, TokenPart]:
    """Every part by its number, with progress reported at first and after each that is written."""
    parts = dict(finished)
    resumed = rows = sum(part.rows for part in parts.values())
    report(replace(progress, rows=rows, resumed=resumed))
    for number, part in written:
        parts[number] = part
        rows += part.rows
        report(replace(progress, rows=rows, resumed=resumed))
    return parts


def _write_missing(task: _Task, missing: list[_Span], workers: int) -> Iterator[tuple[int, TokenPart]]:
    work = functools.partial(_write_part, task)
    # A stream of records is read forward only: each process would read it from its beginning.
    count = 1 if any(spec.streaming for spec in task.request.specs) else min(workers, len(missing))
    if count <= 1:
        return map(work, missing)
    return in_processes(count, work, missing, stage="tokenizing", name=str)


def _split_rows(text_tokens: np.ndarray) -> Iterator[_Span]:
    """Rows cut into parts: the same whatever the number of processes."""
    ends, start, number = np.cumsum(text_tokens, dtype=np.int64), 0, 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = min(int(np.searchsorted(ends, before + PART_TOKENS, side="right")), start + PART_ROWS)
        stop = max(stop, start + 1)
        yield _Span(number=number, start=start, stop=stop)
        start, number = stop, number + 1


def _remove_others(folder: Path, parts: int, *, leftovers: bool) -> None:
    """Parts that there will not be; with the lock held also what killed processes have left."""
    names = {part_name(number) for number in range(parts)}
    for path in folder.glob("part-*.arrow"):
        if path.name not in names:
            path.unlink(missing_ok=True)
    if leftovers:
        for path in folder.glob(".part-*.tmp"):
            path.unlink(missing_ok=True)
        remove_leftovers(folder, (TOKENS,))


def _finished_part(task: _Task, span: _Span, listed: tuple[TokenPart, ...]) -> TokenPart | None:
    """A part that was finished before, from the same inputs, and as it was listed if it was."""
    path = task.folder / part_name(span.number)
    if not path.is_file():
        return None
    try:
        part = TokenPart.of(path, PartColumns.open(path, task.fingerprint, span.stop - span.start).check)
    except ValueError:
        return None
    return part if span.number >= len(listed) or part == listed[span.number] else None


# ---- in a process that tokenizes


class _Tools:
    """The reader and the encoder of one process."""

    def __init__(self, task: _Task) -> None:
        self._rows = RowTable(task.rows)
        self._reader = RecordReader(task.request, self._rows, task.files)
        self._encoder = SampleEncoder(task.request)

    def tokens(self, number: int) -> SampleTokens | None:
        """The tokens of one row; None where they cannot be made: reading it will say why, and count it."""
        row = self._rows.row(number)
        with self._reader.open_record(number) as record:
            store = self._reader.store(row.source)

            def headers() -> list[MediaHeader]:
                return [media_header(store, medium) for medium in record.media()]

            try:
                return self._encoder.text_tokens(record, read_media(headers, row.id, row.origin))
            except RecordError:
                return None


_latest: dict[tuple[int, str], _Tools] = {}  # of one task, so that its tokenizer is loaded once in a process


def _tools(task: _Task) -> _Tools:
    key = os.getpid(), task.fingerprint
    if key not in _latest:
        _latest.clear()
        _latest[key] = _Tools(task)
    return _latest[key]


def part_batch(samples: list[SampleTokens | None]) -> pa.RecordBatch:
    """The columns of a part."""
    columns = []
    for name in _LISTS:
        lists = [np.zeros(0, np.int32) if one is None else getattr(one, name).reshape(-1) for one in samples]
        offsets = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int32)
        values = np.concatenate([np.zeros(0, np.int32), *lists])
        columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=_NUMBERS))
    columns.append(pa.array([0 if one is None else one.key for one in samples], pa.int64()))
    columns.append(pa.array([NOT_KEPT if one is None else one.check for one in samples], pa.int64()))
    return pa.record_batch(columns, schema=PART_SCHEMA)


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
    return span.number, TokenPart.of(path, batch["check"].to_numpy())
