"""What tests of all packages share. In CI property tests try the same examples every time, at a desk new ones."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked as more is full, too."""
    for item in items:
        if item.get_closest_marker("more") is not None:
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Set modules and tests aside: each run of the trainer collects garbage twice, and would look at all of them."""
    gc.collect()
    gc.freeze()


_unfreeze, _ended = gc.unfreeze, itertools.count(1)
atexit.register(_unfreeze)  # some libraries name everything that is left when Python ends


def _keep_frozen() -> None:
    """Stands for `gc.unfreeze` at the end of a run: what is frozen stays so, and garbage in it goes now and then."""
    if next(_ended) % 20 == 0:
        _unfreeze()
        pytest_collection_finish()


@pytest.fixture(autouse=True, scope="session")
def _frozen_modules() -> Iterator[None]:
    """Modules stay set aside also after a run gave back what it had set aside itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", _keep_frozen)
        yield


@pytest.fixture(scope="module")
def unfreezing() -> Iterator[None]:
    """Python's own `gc.unfreeze`, for tests of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", _unfreeze)
        yield
    pytest_collection_finish()


_command_of = functools.cache(typer.main.get_command)  # a process has one command line, and is slow to make it


@pytest.fixture
def run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """The command line's own entry, in this process: exit code, stdout, stderr."""
    from packtrain import cli

    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(typer.main, "get_command", _command_of)

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
