"""Damages files of a folder in many ways, one after the other, and opens what they are of: `damage.py FOLDER SEED N`.

Prints each case before it is tried, so that a crash has a name, and what became of it where it was not refused.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.core.errors import ArtifactError
from packtrain.core.fingerprint import digest
from packtrain.delivery.encode.row_table import ROW_SCHEMA, RowTable
from packtrain.measuring.table import COST_SCHEMA, CostTable
from packtrain.packing.pack_plan import PackPlan


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The same bytes with a fault as disks, copies and people make them."""
    found, at = bytearray(content), draw.randrange(len(content))
    length = min(len(content) - at, draw.choice((1, 1, 2, 8, 64, 512)))
    match draw.randrange(7):
        case 0:
            found[at] ^= 1 << draw.randrange(8)
        case 1:
            found[at : at + length] = draw.randbytes(length)
        case 2:
            found[at : at + length] = bytes(length)
        case 3:
            del found[at:]
        case 4:
            del found[at : at + length]
        case 5:
            found[at:at] = draw.randbytes(length)
        case 6:
            found[at : at + 8] = draw.choice((b"\xff" * 8, b"\x00" * 7 + b"\x80", b"\x01" + bytes(7)))
    return bytes(found)


def of_plan(folder: Path) -> Any:
    plan = PackPlan.load(folder)
    packs = [plan.epoch(number) for number in range(plan.num_epochs)]
    loads = [one.load(name).tolist() for one in packs for name in ("end", "tokens", "patches", "images")]
    return (
        digest(asdict(plan.summary)),
        loads,
        [one.pack(number).rows.tolist() for one in packs for number in range(5)],
    )


def of_rows(folder: Path) -> Any:
    rows = RowTable.open(folder)
    return rows.fingerprint, rows.files, [rows._table[name].to_pylist() for name in ROW_SCHEMA.names]


def of_costs(folder: Path) -> Any:
    table = CostTable.load(folder)
    columns = [np.asarray(table.column(name)).tolist() for name in COST_SCHEMA.names]
    return (
        digest(table.summary.to_json()),
        columns,
        table.rows(["tokens", "id"], np.arange(0, len(table), 7))["tokens"].tolist(),
    )


OPENED: dict[str, Callable[[Path], Any]] = {"plan": of_plan, "rows": of_rows, "costs": of_costs}
NAMES = {"plan": "*", "rows": "rows-*", "costs": "[cm]*"}


def main(root: Path, seed: int, count: int) -> int:
    """How many cases were not refused in words, though what was read is not what was written."""
    wrong = refused = 0
    for kind, opened in OPENED.items():
        whole = opened(root / kind)
        files = sorted(path for path in (root / kind).glob(NAMES[kind]) if path.is_file() and path.stat().st_size)
        for number in range(count):
            draw = random.Random(f"{seed} {kind} {number}")
            path = draw.choice(files)
            content = path.read_bytes()
            path.write_bytes(mutated(content, draw))
            print(f"{kind} {number} {path.name}", flush=True)
            try:
                if opened(root / kind) != whole:
                    print("  OTHER CONTENT")
                    wrong += 1
            except ArtifactError:
                refused += 1
            except Exception:
                print(traceback.format_exc())
                wrong += 1
            path.write_bytes(content)
    print(f"refused: {refused}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(100, main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
