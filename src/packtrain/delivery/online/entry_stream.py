"""Raw entries in reading order, from any place on: what packing without measuring first reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from packtrain.records.open import iter_units, read_unit
from packtrain.records.source import Entry, SourceSpec


class EntryPlace(NamedTuple):
    """Where an entry stands in its stream; places are in reading order."""

    unit: int = 0
    entry: int = 0

    @property
    def key(self) -> str:
        return f"{self.unit}:{self.entry}"

    @classmethod
    def of_key(cls, key: str) -> EntryPlace:
        """The place that a key stands for."""
        unit, entry = key.split(":")
        return cls(int(unit), int(entry))


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """An entry, and where it stands."""

    place: EntryPlace
    source: int  # position in the request's list of sources
    entry: Entry


class EntryStream(Protocol):
    """Entries in an order that is the same in every process and every time. It must pickle."""

    def read(self, start: EntryPlace) -> Iterator[Arrival]:
        """All entries from a position on; if it is between entries, from the next one."""
        ...


class SourceStream:
    """The entries of data sources, one after the other. Pieces before the start are not read."""

    def __init__(self, specs: Sequence[SourceSpec]) -> None:
        self._specs = tuple(specs)

    def read(self, start: EntryPlace) -> Iterator[Arrival]:
        for unit in iter_units(self._specs):
            if unit.number < start.unit:
                continue
            skipped = start.entry if unit.number == start.unit else 0
            for number, entry in enumerate(read_unit(self._specs, unit)):
                if number >= skipped:
                    yield Arrival(place=EntryPlace(unit.number, number), source=unit.source, entry=entry)
