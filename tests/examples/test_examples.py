"""Every example runs as a process of its own, trains each sample once, goes on exactly, reaches the same weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from packtrain.modeling.load import load_model

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
NAMES = ("plain_loop", "trainer", "trl_sft", "accelerate_two", "lightning_fit")
RANKS = {"trl_sft": 2, "accelerate_two": 2, "lightning_fit": 2}  # of processes; the others have one
SAMPLES, STEPS = 36, 5
MODEL, LENGTH = "tiny:qwen3_vl", 192
full, contract = pytest.mark.full, pytest.mark.contract
QUICK = [pytest.param(name, marks=contract) for name in ("plain_loop", "trainer")]
LONG = [
    *(pytest.param(name, marks=full) for name in ("trl_sft", "lightning_fit")),
    pytest.param("accelerate_two", marks=[full, contract]),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run of an example left behind."""

    weights: dict[str, Tensor]
    seen: tuple[list[tuple[int, list[str]]], ...]  # of each rank: step and samples of each batch
    printed: str

    def samples(self) -> Counter[str]:
        return Counter(name for rank in self.seen for _, ids in rank for name in ids)


Example = Callable[..., Run]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats as JSON Lines, every third with a picture."""
    folder = tmp_path_factory.mktemp("data")
    lines = []
    for number in range(SAMPLES):
        text = " ".join(f"word{number * 7 + place}" for place in range(1 + number % 9))
        content = [{"type": "text", "text": text}]
        if number % 3 == 0:
            Image.new("RGB", (40 + 8 * (number % 4), 36), (number * 7, 90, 20)).save(folder / f"{number}.png")
            content.insert(0, {"type": "image", "image": f"{number}.png"})
        answer = [{"type": "text", "text": text[::-1]}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": f"r{number}", "messages": messages}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "data.jsonl"


@pytest.fixture(scope="module")
def example(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """Runs an example into a folder; a run with the same arguments is made once."""
    root = tmp_path_factory.mktemp("examples")
    made: dict[tuple[str, str, int | None], Run] = {}

    def run(name: str, out: str = "whole", steps: int | None = None) -> Run:
        if (name, out, steps) not in made:
            made[name, out, steps] = start(name, data, root / name / out, root / "cache", steps)
        return made[name, out, steps]

    return run


def start(name: str, data: Path, out: Path, cache: Path, steps: int | None) -> Run:
    return start_script(EXAMPLES / f"{name}.py", data, out, cache, steps, RANKS.get(name, 1))


def start_script(script: Path, data: Path, out: Path, cache: Path, steps: int | None, ranks: int) -> Run:
    log = out.parent / f"{out.name}-log-{steps}"
    log.mkdir(parents=True)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    arguments = ["--data", str(data), "--model", MODEL, "--out", str(out), "--packing-length", str(LENGTH)]
    arguments += ["--steps", str(steps)] if steps else []
    done = subprocess.run(
        [sys.executable, *launch, str(HERE / "recorded.py"), str(log), str(script), *arguments],
        env={
            **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
            **{"PACKTRAIN_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd=log,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-9000:]
    logs = sorted(log.glob("*.jsonl"))
    assert [path.stem for path in logs] == [str(rank) for rank in range(ranks)], "as many processes as it says"
    batches = [[json.loads(line) for line in path.read_text().splitlines()] for path in logs]
    return Run(
        weights=load_file(out / "final" / "model.safetensors"),
        seen=tuple([(batch["step"], batch["ids"]) for batch in rank] for rank in batches),
        printed=done.stdout,
    )


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


def test_every_example_is_tested() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(NAMES)


@pytest.mark.full
@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_every_sample_is_trained_once(example: Example, name: str) -> None:
    run = example(name)
    assert run.samples() == Counter(f"r{number}" for number in range(SAMPLES))
    for rank in run.seen:
        assert any(ids for _, ids in rank), "every rank had work"
        assert sorted({step for step, _ in rank}) == list(range(STEPS))


@pytest.mark.full
@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_all_reach_the_same_weights(example: Example, name: str, tmp_path: Path) -> None:
    """Whoever trains, on however many processes: the same samples from the same start."""
    found, plain = example(name).weights, example("plain_loop").weights
    model = load_model(MODEL, cache_dir=tmp_path)
    model.save_pretrained(tmp_path / "start")
    assert difference(found, load_file(tmp_path / "start" / "model.safetensors")) > 1e-3, "it has learned something"
    assert difference(found, plain) < 1e-5


@full
def test_processes_that_would_train_models_of_their_own_are_refused(data: Path, tmp_path: Path) -> None:
    """Without a GPU, a trainer that is not told so does not join the processes of torchrun."""
    untold = tmp_path / "trainer.py"
    untold.write_text((EXAMPLES / "trainer.py").read_text().replace("not torch.accelerator.is_available()", "False"))
    with pytest.raises(AssertionError, match=r"rank 0 of 1 in the trainer, rank \d of 2"):
        start_script(untold, data, tmp_path / "out", tmp_path / "cache", 1, ranks=2)
    assert not (tmp_path / "out" / "final").exists()


@pytest.mark.full
@contract
def test_the_loss_falls(example: Example) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", example("plain_loop").printed)]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5


@full
@pytest.mark.parametrize("name", ["plain_loop", "trainer", "trl_sft", "accelerate_two"])
def test_stopped_and_started_again_it_is_the_same_run(example: Example, name: str) -> None:
    whole = example(name)
    first, second = example(name, "stopped", 2), example(name, "stopped")
    for done, rest, everything in zip(first.seen, second.seen, whole.seen, strict=True):
        assert done + rest == everything
        assert done
        assert rest
    assert difference(first.weights, whole.weights) > 1e-3, "it was stopped in the middle"
    assert difference(second.weights, whole.weights) == 0.0
