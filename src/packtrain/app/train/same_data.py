"""All processes of a run must have prepared the same, and a resumed run what it was begun with, wherever that lies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from packtrain.app.runs.folder import RunFolder
from packtrain.app.train.prepare import Prepared
from packtrain.core.errors import ArtifactError, DataError
from packtrain.core.fingerprint import differences

_NAMED = 4  # numbers that are told


def check_same_data(prepared: Prepared) -> None:
    """Ask all processes before the first step; ranks with other packs would lose samples and wait for each other."""
    from packtrain.training.agreement import said_by_all

    mine = {"schedule": prepared.dataset.schedule.hash, **asdict(prepared.numbers)}
    compare(said_by_all(mine))


def check_resumed(folder: RunFolder, inputs: Mapping[str, Any]) -> None:
    """Refuse to go on with other data or another model than the run was begun with, and name what differs."""
    before = folder.facts().get("measured") if folder.holds_run else None
    changed = differences(before, json.loads(json.dumps(inputs))) if before is not None else []
    if changed:
        raise ArtifactError(
            str(folder.path),
            got="a run of other data or another model: " + "; ".join(changed[:_NAMED]),
            expected="what the run was begun with; it may lie elsewhere",
            fix="bring that back (files without checksums, as parquet, with their times), or begin a new run",
        )


def compare(said: Sequence[Mapping[str, Any]]) -> None:
    """An error that names a rank which says something else than the first, and what."""
    for rank, other in enumerate(said):
        differ = [name for name in said[0] if other.get(name) != said[0][name]]
        if differ:
            raise DataError(
                f"data of rank {rank}",
                got="; ".join(f"{name} {other.get(name)} instead of {said[0][name]}" for name in differ[:_NAMED]),
                expected="what rank 0 has",
                fix="the data changed meanwhile, or the nodes' caches differ: packtrain cache clear, and start again",
            )
