"""Packings that must not change unnoticed: plans made before and after a change of order are not the same plan."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from lengths import KINDS, WORK, digest_of, lvis_table, packed, packs_of

from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.plan_builder import build_plan
from packtrain.packing.schedule import Schedule

GOLDEN = Path(__file__).with_name("golden.json")
CHANGED = (
    "packs are not what they were. If that is meant, raise PACKER_VERSION in packing/pack_plan.py, so that older plans "
    "are told apart, and write golden.json again: python tests/packing/test_golden.py"
)


def few(kind: str) -> str:
    """The packs of ten samples."""
    sizes = np.array([[6], [5], [4], [3], [2], [8], [1], [7], [5], [5]])
    return str(packs_of(*packed(kind, sizes, np.array([10]), 1)))


def plan_with_windows() -> str:
    """The packs of a plan with windows and leftovers, and their order in each balance."""
    config = PackingConfig(packing_length=20_000, packing_window=40, packing_min_fill_ratio=0.9, epochs=2, seed=3)
    with tempfile.TemporaryDirectory() as folder:
        plan = build_plan(lvis_table(Path(folder), 100), config, WORK)
    packs = [np.split(plan.epoch(n).rows, plan.epoch(n).ends[:-1]) for n in range(2)]
    orders = [
        Schedule(plan, packs_per_step=2, seed=1, balance=balance).order(1) for balance in ("sorted", "strict", "random")
    ]
    return str([[pack.tolist() for pack in epoch] for epoch in packs] + [order.tolist() for order in orders])


CASES: Mapping[str, Callable[[], str]] = {
    **{
        f"{kind}, limits: {limits}, seed: {seed}": partial(digest_of, kind, limits, seed)
        for kind in KINDS
        for limits in (1, 2)
        for seed in (0, 5, None)
    },
    **{f"{kind}, ten samples": partial(few, kind) for kind in ("window_5", *KINDS)},
    "plan with windows": plan_with_windows,
}


@pytest.mark.parametrize("name", CASES)
def test_packs_are_those_of_the_version_before(name: str) -> None:
    assert CASES[name]() == json.loads(GOLDEN.read_text())[name], CHANGED


def test_nothing_golden_is_left_unchecked() -> None:
    assert set(json.loads(GOLDEN.read_text())) == set(CASES)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: make() for name, make in CASES.items()}, indent=1) + "\n")
