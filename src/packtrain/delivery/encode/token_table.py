"""Tokens of a measured dataset, kept: one folder for each cost table, memory-mapped by every process that reads it.

tokens.json        what they were made from, and the rows, size and digest of every part; written last, so that a folder
                   without complete parts says so
part-00000.arrow   the text sides of some consecutive rows: one record batch, lists of numbers, a checksum for each row

Media are not kept, nor anything that depends on pixels: whoever reads compares the codes of record and media.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packtrain.core.artifacts import read_json
from packtrain.core.errors import ArtifactError, in_one_line
from packtrain.core.fingerprint import digest
from packtrain.delivery.encode.sample_tokens import SampleTokens
from packtrain.measuring.table import CostTable
from packtrain.packing.pack_plan import plan_inputs

KIND, VERSION = "sample-tokens", 3
TOKENS = "tokens.json"
NOT_KEPT = -1  # the check of a row whose record could not be tokenized
FINGERPRINT = b"packtrain.fingerprint"
_NUMBERS = pa.list_(pa.field("item", pa.int32(), nullable=False))
PART_SCHEMA = pa.schema(
    [
        *(pa.field(name, _NUMBERS, nullable=False) for name in ("ids", "learned", "runs")),
        *(pa.field(name, pa.int64(), nullable=False) for name in ("media", "record", "check")),
    ]
)
_LISTS = {"ids": (-1,), "learned": (-1, 2), "runs": (-1, 3)}
FIX = "packtrain cache clear --kind tokens removes it; it is rebuilt"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPart:
    """One file of a folder, as tokens.json has it."""

    rows: int
    bytes: int
    sha256: str
    not_kept: int  # rows without tokens


def token_inputs(table: CostTable) -> dict[str, Any]:
    """What tokens are made from: all that the table was measured from, its rows, and the tokenizers package."""
    named = {name: value for name, value in plan_inputs(table).items() if name != "mixture"}
    return {**named, "tokenizers": metadata.version("tokenizers"), "format": VERSION}


def part_name(number: int) -> str:
    """The file of a part."""
    return f"part-{number:05d}.arrow"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartColumns:
    """The columns of a part, memory-mapped."""

    media: np.ndarray
    record: np.ndarray
    check: np.ndarray
    lists: Mapping[str, tuple[np.ndarray, np.ndarray]]  # offsets and values of the lists of every row


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
            made = cls(folder, digest(content["inputs"]), tuple(TokenPart(**part) for part in content["parts"]))
        except (KeyError, TypeError) as error:
            raise ArtifactError(str(folder / TOKENS), got=in_one_line(error), expected="its parts", fix=FIX) from None
        for number in range(len(made.parts)):
            made._require_size(number)
        return made

    def opened(self) -> TokenTable:
        """This one, with all of its parts mapped."""
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
        check = int(columns.check[at])
        if check == NOT_KEPT:
            return None
        found = _sample(columns, at)
        if found is None or found.check != check:
            raise self._damaged(number, f"row {at} is not what was written")
        return found

    def faults(self) -> Iterator[str]:
        """What is wrong with the files, all of them read to their end."""
        for number, part in enumerate(self.parts):
            name = part_name(number)
            if digest_of(self.folder / name) != part.sha256:
                yield f"{name}: its content is not what was written"
                continue
            check = self._part(number).check
            if len(check) != part.rows or int((check == NOT_KEPT).sum()) != part.not_kept:
                yield f"{name}: other rows than {TOKENS} says"

    def _columns(self, number: int) -> PartColumns:
        mapped = self.opened()._mapped
        assert mapped is not None
        return mapped[number]

    def _part(self, number: int) -> PartColumns:
        self._require_size(number)
        try:
            return read_part(self.folder / part_name(number), self.fingerprint, self.parts[number].rows)
        except ValueError as error:
            raise self._damaged(number, str(error)) from None

    def _require_size(self, number: int) -> None:
        """Before it is mapped: reading past the end of a mapped file would kill the process."""
        path, expected = self.folder / part_name(number), self.parts[number].bytes
        if wrong := wrong_size(path, expected):
            raise self._damaged(number, wrong)

    def _damaged(self, number: int, got: str) -> ArtifactError:
        name = part_name(number)
        return ArtifactError(str(self.folder / name), got=got, expected="cached tokens as they were written", fix=FIX)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenTable, (self.folder, self.fingerprint, self.parts)


def wrong_size(path: Path, expected: int) -> str | None:
    """What is wrong with the size of a file, if anything is."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "no such file"
    return None if size == expected else f"{size:,} of {expected:,} bytes"


def read_part(path: Path, fingerprint: str, rows: int) -> PartColumns:
    """The columns of a part, memory-mapped; ValueError says what is wrong with it."""
    try:
        batches = pa.ipc.open_file(pa.memory_map(str(path)))
        if batches.num_record_batches != 1 or not batches.schema.equals(PART_SCHEMA):
            raise ValueError("other columns")
        found = (batches.schema.metadata or {}).get(FINGERPRINT, b"").decode()
        if found != fingerprint:
            raise ValueError(f"tokens of other inputs ({found or 'unknown'}): rebuilt in the meantime")
        batch = batches.get_batch(0)
        batch.validate()
    except (OSError, pa.ArrowException) as error:  # ArrowInvalid is a ValueError too
        raise ValueError(str(error)) from None
    if batch.num_rows != rows:
        raise ValueError(f"{batch.num_rows:,} rows instead of {rows:,}")
    lists = {name: batch.column(name) for name in _LISTS}
    return PartColumns(
        **{name: batch.column(name).to_numpy() for name in ("media", "record", "check")},
        lists={name: (column.offsets.to_numpy(), column.values.to_numpy()) for name, column in lists.items()},
    )


def part_batch(samples: list[SampleTokens | None]) -> pa.RecordBatch:
    """The columns of a part."""
    columns = []
    for name in _LISTS:
        lists = [np.zeros(0, np.int32) if one is None else getattr(one, name).reshape(-1) for one in samples]
        offsets = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int32)
        values = np.concatenate([np.zeros(0, np.int32), *lists])
        columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=_NUMBERS))
    for name in ("media", "record"):
        columns.append(pa.array([0 if one is None else getattr(one, name) for one in samples], pa.int64()))
    columns.append(pa.array([NOT_KEPT if one is None else one.check for one in samples], pa.int64()))
    return pa.record_batch(columns, schema=PART_SCHEMA)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sample(columns: PartColumns, at: int) -> SampleTokens | None:
    """One row; None where its lists cannot be right."""
    found = {}
    for name, shape in _LISTS.items():
        offsets, values = columns.lists[name]
        part = values[int(offsets[at]) : int(offsets[at + 1])]
        if len(part) % abs(shape[-1]):
            return None
        found[name] = part.reshape(shape)
    return SampleTokens(media=int(columns.media[at]), record=int(columns.record[at]), **found)
