"""What tests of all packages share. In CI property tests try the same examples every time, at a desk new ones."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """One folder for what tests and the processes they kill leave behind; it goes with the last of them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # a worker has the folder of the process that started it
    outside = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", outside)  # pytest clears its own folders, and keeps what failed
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{outside}/torchinductor_tests_{os.getuid()}")  # slow to make
    os.environ["TMPDIR"] = tempfile.tempdir = inside = tempfile.mkdtemp(prefix="tests-")
    config.add_cleanup(lambda: shutil.rmtree(inside, ignore_errors=True))


@pytest.fixture
def run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """The command line's own entry, in this process: exit code, stdout, stderr."""
    from packtrain import cli

    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["packtrain", *map(str, arguments)])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return run
