"""The public surface is a list: names, options and values that users rely on. A change here is a decision."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import typer.main

import packtrain
from packtrain.app.measure import measure_outcome
from packtrain.cli import app
from packtrain.config.sections import ALIASES, SECTIONS
from packtrain.core import values
from packtrain.families.registry import all_families
from packtrain.families.tiny import tiny_families
from packtrain.measuring.columns import COST_SCHEMA, MEDIA_SCHEMA
from packtrain.packing.arrays import STRATEGIES
from packtrain.packing.pack_plan import CUT_SCHEMA, ENTRY_SCHEMA, PACK_SCHEMA
from packtrain.predicting.gpus import CATALOGUE
from packtrain.records.schemas.converters import SCHEMAS, SchemaOptions
from packtrain.records.source import FORMATS
from packtrain.reports.study_files import FILES

SNAPSHOT = Path(__file__).parent / "surface" / "snapshot.json"


def commands(command: Any, name: str) -> dict[str, list[str]]:
    """Every command with its options and arguments."""
    if hasattr(command, "commands"):
        found: dict[str, list[str]] = {}
        for sub, child in sorted(command.commands.items()):
            found |= commands(child, f"{name} {sub}")
        return found
    return {
        name: sorted(option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
    }


def fields(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def surface() -> dict[str, Any]:
    """What is public now."""
    return {
        "names": sorted(packtrain.__all__),
        "commands": commands(typer.main.get_command(app), "packtrain"),
        "measure": list(inspect.signature(measure_outcome).parameters),
        "pack": list(inspect.signature(packtrain.pack).parameters),
        "pack_arrays": list(inspect.signature(packtrain.pack_arrays).parameters),
        "plan": list(inspect.signature(packtrain.plan).parameters),
        "packing_config": fields(packtrain.PackingConfig),
        "loader_state": fields(packtrain.LoaderState),
        "config": {section: list(one.known()) for section, one in SECTIONS.items()},
        "config_aliases": sorted(ALIASES),
        "strategies": list(STRATEGIES),
        "gpus": sorted(CATALOGUE),
        "plan files": [ENTRY_SCHEMA.names, CUT_SCHEMA.names, PACK_SCHEMA.names],
        "study files": list(FILES),
        "values": {
            name: fields(getattr(values, name)) for name in ("Record", "Message", "Cost", "MediaLimits", "LedgerEntry")
        },
        "schema_options": fields(SchemaOptions),
        "costs.parquet": COST_SCHEMA.names,
        "media.parquet": MEDIA_SCHEMA.names,
        "formats": sorted(FORMATS),
        "schemas": sorted(SCHEMAS),
        "families": sorted(name for name, one in all_families().items() if one.rule is not None),
        "tiny": sorted(tiny_families()),
    }


def test_surface_is_the_snapshot() -> None:
    """After a change that is meant: python tests/test_surface.py writes the new snapshot."""
    assert surface() == json.loads(SNAPSHOT.read_text())


def test_every_public_name_can_be_had() -> None:
    for name in packtrain.__all__:
        assert getattr(packtrain, name) is not None
    assert callable(packtrain.measure)


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(surface(), indent=1) + "\n")
