"""What the tests of commands share: the command line in this process, cost tables made from arrays, a model's shape."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Run

from packtrain import cli
from packtrain.app.demo_model import write_shape

sys.path.append(str(Path(__file__).parents[1] / "plans"))  # tables and lengths, as the tests of plans make them


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command line's own entry, in this process: exit code, stdout, stderr."""
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


@pytest.fixture(scope="session")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with nothing but a config, of three billion parameters."""
    return write_shape(tmp_path_factory.mktemp("shape"))
