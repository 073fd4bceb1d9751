"""The data of all fault tests, the process that ranks are forked from, and what an undisturbed run delivers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_data as data
import pytest
from fault_groups import MakeRun, Nursery, Run
from fault_ledgers import Attempt, problems


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data.make_lines(tmp_path_factory.mktemp("lines") / "data")


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data.make_shards(tmp_path_factory.mktemp("shards") / "data")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what is measured and packed is kept for all tests that do not harm it."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def reference(
    nursery: Nursery, lines: Path, shards: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Attempt]:
    """What one process without workers is given that nobody disturbs, by the kind of access."""
    known: dict[str, Attempt] = {}

    def find(kind: str) -> Attempt:
        if kind not in known:
            path = lines if kind == "map" else shards
            run = Run(nursery, tmp_path_factory.mktemp("reference") / "run", kind, data.config(path, cache))
            run.finish()
            known[kind] = run.ledgers()[0]
            packs = {(line.epoch, line.pack) for line in known[kind].lines}
            assert len(packs) == len(known[kind].lines) > 5 * data.PACKS_PER_STEP, "too few steps to disturb"
            assert max(len(line.ids) for line in known[kind].lines) > 1, "nothing was packed"
        return known[kind]

    return find


@pytest.fixture
def make_run(nursery: Nursery, lines: Path, shards: Path, cache: Path, tmp_path: Path) -> Iterator[MakeRun]:
    """A new run over the common data, or over those that are given."""
    numbers = iter(range(1000))

    def make(kind: str, path: Path | str | None = None, own_cache: Path | None = None, **settings: Any) -> Run:
        where = path if path is not None else lines if kind == "map" else shards
        config = data.config(where, own_cache or cache, **settings)
        return Run(nursery, tmp_path / f"run-{next(numbers)}", kind, config)

    yield make
    assert nursery.living() == [], "processes are left"


@pytest.fixture
def own_lines(lines: Path, tmp_path: Path) -> Path:
    """A copy of the lines that may be harmed."""
    shutil.copytree(lines.parent, tmp_path / "lines")
    return tmp_path / "lines" / "data.jsonl"


@pytest.fixture
def sound(reference: Callable[[str], Attempt]) -> Callable[[Run], None]:
    """Asserts that a run delivered what it would have without any disturbance."""

    def check(run: Run) -> None:
        found = problems(run.ledgers(), reference(run.kind), data.PACKS_PER_STEP)
        assert found == [], found

    return check
