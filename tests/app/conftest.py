"""What the tests of commands share: cost tables made from arrays, a model's shape."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from packtrain.demo import write_shape

sys.path.append(str(Path(__file__).parents[1] / "packing"))  # tables and lengths, as the tests of plans make them


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no number of workers is said, no processes are started for a few chats."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})


@pytest.fixture(scope="session")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with nothing but a config, of three billion parameters."""
    return write_shape(tmp_path_factory.mktemp("shape"))
