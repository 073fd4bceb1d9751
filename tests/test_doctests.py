"""The worked examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import packtrain

SRC = Path(packtrain.__file__).parent


def test_examples() -> None:
    attempted = 0
    for path in sorted(SRC.rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            name = ".".join(("packtrain", *path.relative_to(SRC).with_suffix("").parts))
            found = doctest.testmod(importlib.import_module(name))
            assert found.failed == 0, name
            attempted += found.attempted
    assert attempted >= 10
