"""Fixtures of the tests of measuring: a tiny model, written once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from packtrain.families import tiny


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "PACKTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen2.5-VL; tests that change it copy it first."""
    return tiny.write("qwen2_5_vl", tmp_path_factory.mktemp("models") / "qwen2_5_vl")
