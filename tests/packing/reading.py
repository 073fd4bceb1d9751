"""What the tests of plans share: a config for the small table, and what a plan holds as plain values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.packing_config import PackingConfig

LENGTH = 20_000


def config(**settings: Any) -> PackingConfig:
    return PackingConfig(**{"packing_length": LENGTH, **settings})


def ledger(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def packs(plan: PackPlan, epoch: int = 0) -> list[list[tuple[int, int, int]]]:
    """(row, start, tokens) of every entry, pack by pack."""
    found = []
    for number in range(plan.epoch(epoch).num_packs):
        pack = plan.epoch(epoch).pack(number)
        found.append(list(zip(pack.rows.tolist(), pack.starts.tolist(), pack.tokens.tolist(), strict=True)))
    return found
