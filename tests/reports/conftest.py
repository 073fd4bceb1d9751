"""Studies that are written once and looked at by many tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import studies
from browser import REQUIRED, Browser, find_browser
from study_parts import Made

from packtrain.reports.study_files import write_study

MADE = {"lvis": lambda: studies.lvis(3000), "hostile": studies.hostile, "single": studies.single}


@pytest.fixture(scope="session", params=sorted(MADE))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Path]:
    """A study and the folder with its files."""
    return _write(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def lvis(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Path]:
    """The ordinary study."""
    return _write("lvis", tmp_path_factory)


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Path]:
    """The study with names that try to be markup."""
    return _write("hostile", tmp_path_factory)


_WRITTEN: dict[str, tuple[Made, Path]] = {}


def _write(name: str, factory: pytest.TempPathFactory) -> tuple[Made, Path]:
    if name not in _WRITTEN:
        made, out = MADE[name](), factory.mktemp(name) / "study"
        write_study(made.study, made.samples, out)
        _WRITTEN[name] = made, out
    return _WRITTEN[name]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    binary = find_browser()
    if binary is None:
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, but there is no Chromium on PATH")
        pytest.skip("no Chromium on PATH; install one to look at the page as people see it")
    with Browser(binary) as found:
        yield found
