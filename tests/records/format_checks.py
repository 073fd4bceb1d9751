"""What the tests of formats share: read a source whole, and see that it keeps the contract on the way."""

from __future__ import annotations

import os
from typing import Any

from packtrain.records.source import Entry, Format, SourceSpec, Unit, open_format


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
    return read


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
