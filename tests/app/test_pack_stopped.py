"""`packtrain pack` that is stopped: no signal is lost, a plan is there whole or not at all, and the words are true."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Run, files
from lengths import lvis_like
from tables import write_table

from packtrain.app.pack import pack
from packtrain.cli.interruptible import never_lost
from packtrain.packing.pack_plan import PLAN
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.plan_builder import PackProgress


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    return write_table(tmp_path / "costs", lvis_like(200, 1)).folder


@pytest.mark.parametrize("compiled", [False, True])
def test_stopping_leaves_nothing_and_says_what_comes_next(
    run: Run, costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    def stop(_self: object, progress: PackProgress) -> None:
        assert any(tmp_path.glob(".p.*.tmp/entries-0000.arrow")), "it had begun to write"
        if compiled:  # as Python reports a signal that came while compiled code was returning
            inner = SystemError("returned a result with an exception set")
            inner.__cause__ = KeyboardInterrupt()
            raise SystemError("returned a result with an exception set") from inner
        raise KeyboardInterrupt

    monkeypatch.setattr("packtrain.cli.pack.PackBar.update", stop)
    code, out, err = run("pack", costs, "-n", 8192, "-o", tmp_path / "p", "--json")
    assert (code, out) == (1, "")
    assert "starts over" in err
    assert {path.name for path in tmp_path.iterdir()} == {"costs"}


def _into_a_callback() -> None:
    """A signal while compiled code calls back into Python, which cannot raise there, and prints what it drops."""
    ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGINT))()


def _into_a_finalizer() -> None:
    class Dies:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    Dies()


def _anywhere() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C as in a terminal: a shell that starts tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("send", [_into_a_callback, _into_a_finalizer, _anywhere])
def test_no_signal_is_lost(
    run: Run,
    costs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heard: None,
    send: Callable[[], None],
) -> None:
    went_on = []

    def stop(_self: object, progress: PackProgress) -> None:
        send()
        until = time.monotonic() + 30
        while time.monotonic() < until:  # as work that goes on
            time.sleep(0.01)
        went_on.append(progress)

    monkeypatch.setattr("packtrain.cli.pack.PackBar.update", stop)
    code, out, err = run("pack", costs, "-n", 8192, "-o", tmp_path / "p", "--json")
    assert (code, out, "starts over" in err, "ignored" in err, went_on) == (1, "", True, False, [])
    assert {path.name for path in tmp_path.iterdir()} == {"costs"}


def test_what_fails_because_of_a_signal_is_no_fault(
    run: Run, costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: None
) -> None:
    """As compilers fail that were not told what they had compiled."""

    def stop(_self: object, progress: PackProgress) -> None:
        _into_a_callback()
        raise RuntimeError("no compiled object yet")

    monkeypatch.setattr("packtrain.cli.pack.PackBar.update", stop)
    code, out, err = run("pack", costs, "-n", 8192, "-o", tmp_path / "p", "--json")
    assert (code, out, "interrupted" in err, "compiled" in err) == (1, "", True, False)


def test_a_fault_after_a_signal_was_heard_is_told(heard: None) -> None:
    """As of a run that was stopped by it, and could not save its checkpoint."""
    asked = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: asked.set() if dropped else signal.default_int_handler(*_))
    dropped: list[bool] = []

    def work() -> None:
        _into_a_callback()
        dropped.append(True)
        while not asked.wait(0.01):
            pass
        time.sleep(0.1)  # as a step that is finished
        raise OSError("disk is full")

    with pytest.raises(OSError, match="disk is full"), never_lost():
        work()


@pytest.mark.parametrize(
    ("moment", "words", "there"),
    [
        ("packtrain.app.pack.choose_work_model", "nothing was written", False),
        ("packtrain.packing.plan_builder.PackPlan.load", "the plan was already complete", True),
        ("packtrain.packing.schedule.balance_table", "the same command continues", True),
    ],
)
def test_words_are_true_whenever_it_is_stopped(
    run: Run,
    costs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heard: None,
    moment: str,
    words: str,
    there: bool,
) -> None:
    monkeypatch.setattr(moment, lambda *_, **__: _anywhere())
    code, out, err = run("pack", costs, "-n", 8192, "-o", tmp_path / "p", "--json")
    assert (code, out, words in err) == (1, "", True)
    assert (tmp_path / "p" / PLAN).exists() == there
    monkeypatch.undo()
    assert pack(costs, PackingConfig(packing_length=8192), tmp_path / "p").num_epochs == 1


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_stopped(tmp_path: Path, how: signal.Signals) -> None:
    """A plan is there whole or not at all, and the same command makes the same plan."""
    costs = write_table(tmp_path / "costs", lvis_like(20_000, 1)).folder
    command = [
        sys.executable,
        "-m",
        "packtrain.cli",
        "pack",
        str(costs),
        "-n",
        "8192",
        "--epochs",
        "100",  # a second or two: long enough to be stopped in
        "--json",
        "-o",
    ]
    process = subprocess.Popen(
        [*command, str(tmp_path / "p")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # not as a shell's background has it
    )
    while process.poll() is None and not any(tmp_path.glob(".p.*.tmp/entries-0001.arrow")):
        time.sleep(0.01)
    process.send_signal(how)
    out, err = process.communicate()
    assert process.returncode != 0, f"it was not stopped, or too late to test anything: {err}"
    assert (out, (tmp_path / "p").exists()) == ("", False)
    if how is signal.SIGINT:
        assert (process.returncode, "interrupted" in err, "Traceback" in err) == (1, True, False)
        assert not list(tmp_path.glob(".p.*"))
    for name in ("p", "q"):
        subprocess.run([*command, str(tmp_path / name)], check=True, capture_output=True)
    assert files(tmp_path / "p") == files(tmp_path / "q")
