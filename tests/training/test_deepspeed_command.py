"""`packtrain train` with ZeRO-2 of DeepSpeed on two processes: the weights are those of one process."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from small_run import difference
from test_sharded_command import STEPS, weights_in, write_config
from test_trainer_sharded import TOLERANCE

from packtrain.app.train.train import train

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs packtrain[deepspeed]"),
]


def test_zero2_leaves_the_weights_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    config, out = write_config(tmp_path), tmp_path / "zero2"
    train(config, (f"training.output_dir={tmp_path / 'one'}",))
    launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "packtrain.cli", "train"]
    given = [str(config), "training.sharding=zero2", f"training.output_dir={out}"]
    # Stopped after two steps and resumed: checkpoints are DeepSpeed's own, too.
    for more in (["training.max_steps=2"], ["--resume", f"training.max_steps={STEPS}"]):
        done = subprocess.run([*launched, *given, *more], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "packing check" in done.stdout
    assert f"complete: step {STEPS} of {STEPS}" in done.stdout
    assert difference(weights_in(tmp_path / "one" / "final"), weights_in(out / "final")) < TOLERANCE
