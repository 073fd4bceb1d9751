"""A run that is killed and resumed is the same run: every loss and every weight, bit by bit, dropout on."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_run import dataset, losses, model_of, same, shared, trainer_of, weights, write_samples
from transformers import TrainerCallback

from packtrain import DatasetConfig, MultiModalIterableDataset
from packtrain.core.artifacts import write_json
from packtrain.core.checksums import FileSum
from packtrain.core.errors import ArtifactError
from packtrain.modeling.load import reload_weights
from packtrain.training.checkpoints import KIND, MARKER, VERSION, find_latest

sys.path.append(str(Path(__file__).parents[1] / "delivery"))
from processes import process_of

pytestmark = pytest.mark.contract
KINDS = ("full", "lora", "dora")


def small(kind: str = "full", family: str = "llama") -> Any:
    return model_of(family, method=kind)


def uninterrupted(kind: str = "full", family: str = "llama") -> Any:
    return _uninterrupted(kind, family)  # a cache takes other ways to say the same for something else


@cache
def _uninterrupted(kind: str, family: str) -> Any:
    trainer = trainer_of(dataset(family), shared() / f"whole-{kind}-{family}", small(kind, family))
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps >= 8
    return trainer


def assert_is_the_same(again: Any, kind: str = "full", family: str = "llama") -> None:
    before = uninterrupted(kind, family)
    assert losses(again) == losses(before), "every loss of the whole run, also those before the checkpoint"
    assert same(weights(again), weights(before))


@pytest.mark.parametrize(("step", "workers"), [(1, 0), (4, 2), (6, 0)])
def test_resumed_at_a_step_it_is_the_same_run(tmp_path: Path, step: int, workers: int) -> None:
    checkpoint = Path(uninterrupted().args.output_dir) / f"checkpoint-{step}"
    again = trainer_of(dataset(), tmp_path, small(), dataloader_num_workers=workers)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert_is_the_same(again)
    assert again.trained == uninterrupted().trained[step * 3 :], "nothing is trained twice, nothing is left out"


def online(**settings: Any) -> MultiModalIterableDataset:
    """A stream of a run whose data nobody has measured: two and a half passes."""
    config = DatasetConfig(
        dataset_path=str(write_samples(shared() / "stream", pictures=True)),
        model="tiny:qwen3_vl",
        online=True,
        packing_buffer=5,
        packing_length=176,
        packs_per_step=3,
        max_steps=8,
        **settings,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKTRAIN_CACHE", str(shared() / "stream" / "cache"))
        data = MultiModalIterableDataset(config)
        data.build()
    return data


@cache
def _whole_stream() -> Any:
    trainer = trainer_of(online(), shared() / "whole-stream", model_of("qwen3_vl"), save_steps=4)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("workers", "kept"), [(0, True), (2, True), (0, False)])
def test_a_stream_is_resumed_at_a_step(tmp_path: Path, workers: int, kept: bool) -> None:
    """From the state in the checkpoint, and without it from the beginning of the stream."""
    whole = _whole_stream()
    trained = [name for batch in whole.trained for name in batch]
    assert Counter(trained).most_common()[-1][1] >= 2, "else the stream has not come again"
    checkpoint = Path(whole.args.output_dir) / "checkpoint-4"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["packtrain.stream"]["packs"] == 12
    again = trainer_of(online(), tmp_path / "again", model_of("qwen3_vl"), dataloader_num_workers=workers)
    if not kept:
        again._progress._dataset = None
    again.train(resume_from_checkpoint=str(checkpoint))
    assert losses(again) == losses(whole)
    assert again.trained == whole.trained[12:]
    assert same(weights(again), weights(whole))
    other = trainer_of(online(max_image_pixels=10**6), tmp_path / "other", model_of("qwen3_vl"))
    with pytest.raises(ArtifactError, match="stream"):
        other.train(resume_from_checkpoint=str(checkpoint))


def test_dropout_is_on_and_seen(tmp_path: Path) -> None:
    without = trainer_of(dataset(), tmp_path, model_of(dropout=0.0), save_strategy="no", max_steps=2)
    without.train()
    assert losses(without)[1] != losses(uninterrupted())[1]


def test_random_numbers_that_are_not_restored_would_be_seen(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(Path(uninterrupted().args.output_dir) / "checkpoint-3", checkpoint)
    again = trainer_of(dataset(), tmp_path, small())
    again._load_rng_state = lambda _: torch.manual_seed(9)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert losses(again) != losses(uninterrupted())


@pytest.mark.parametrize("kind", [pytest.param("lora"), pytest.param("dora", marks=pytest.mark.more)])
def test_adapters(tmp_path: Path, kind: str) -> None:
    checkpoint = Path(uninterrupted(kind).args.output_dir) / "checkpoint-3"
    assert not (checkpoint / "model.safetensors").exists(), "adapters only"
    again = trainer_of(dataset(), tmp_path, small(kind))
    again.train(resume_from_checkpoint=str(checkpoint))
    assert_is_the_same(again, kind)


OTHERS = ("qwen2_vl", "idefics3", "smolvlm", "llava", "llava_next", "llava_onevision", "internvl", "gemma3")


@pytest.mark.parametrize("family", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_models_that_are_saved_under_other_names(tmp_path: Path, family: str) -> None:
    """Most families are: their weights must not be taken for those of another model, and be left as they were."""
    before = trainer_of(dataset(family), tmp_path / "whole", small(family=family))
    before.train()
    again = trainer_of(dataset(family), tmp_path / "again", small(family=family))
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(again) == losses(before)
    assert same(weights(again), weights(before))


@pytest.mark.more
def test_parts_that_are_trained_whole_beside_adapters(tmp_path: Path) -> None:
    def made() -> Any:
        return model_of("qwen3_vl", method="lora", train_projector=True)

    data = dataset("qwen3_vl")
    before = trainer_of(data, tmp_path / "whole", made())
    start = weights(before)
    before.train()
    changed = {name for name, weight in weights(before).items() if not torch.equal(weight, start[name])}
    assert any("merger" in name for name in changed)
    again = trainer_of(data, tmp_path / "again", made())
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert losses(again) == losses(before)
    assert same(weights(again), weights(before))


# ---- killed


class Kill(TrainerCallback):
    """Ends the process without a word, in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder: str, place: str, kind: str, family: str, step: int, workers: int) -> None:
    torch.set_num_threads(1)
    data, parts = dataset(family, folder=Path(place)), {"callbacks": [Kill(step)]}
    trainer = trainer_of(data, Path(folder), small(kind, family), parts=parts, dataloader_num_workers=workers)
    trainer.train(resume_from_checkpoint=find_latest(Path(folder)) is not None)


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "family", "workers"),
    [("full", "llama", 0), ("full", "llama", 2), ("lora", "llama", 0), ("full", "qwen3_vl", 0)],
)
def test_killed_at_random_steps_it_is_the_same_run(tmp_path: Path, kind: str, family: str, workers: int) -> None:
    # Twice: a run that was resumed is killed as well.
    steps = sorted(random.Random(f"{kind}{family}{workers}").sample(range(1, 7), 2))
    place = str(shared() / family)
    dataset(family)
    for step in steps:
        process = process_of(train_until_killed, str(tmp_path), place, kind, family, step, workers)
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        found = find_latest(tmp_path)
        assert found is not None
        assert found.step == step
    again = trainer_of(dataset(family), tmp_path, small(kind, family), dataloader_num_workers=workers)
    again.train(resume_from_checkpoint=True)
    assert_is_the_same(again, kind, family)


# ---- what is refused


def test_a_checkpoint_of_another_plan_names_both(tmp_path: Path) -> None:
    checkpoint = str(Path(uninterrupted().args.output_dir) / "checkpoint-2")
    other = dataset(packs_per_step=2)
    with pytest.raises(ArtifactError) as caught:
        trainer_of(other, tmp_path, small()).train(resume_from_checkpoint=checkpoint)
    assert dataset().schedule.hash in str(caught.value)
    assert other.schedule.hash in str(caught.value)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    trainer = trainer_of(dataset(), tmp_path, small())
    with pytest.raises(ArtifactError, match="no complete checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ArtifactError, match="no such folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


def test_an_incomplete_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 3):
        shutil.copytree(Path(uninterrupted().args.output_dir) / f"checkpoint-{step}", run / f"checkpoint-{step}")
    (run / "checkpoint-3" / MARKER).unlink()
    again = trainer_of(dataset(), run, small(), save_strategy="no")
    again.train(resume_from_checkpoint=True)
    assert_is_the_same(again)
    assert len(again.trained) == (again.state.max_steps - 2) * 3
    with pytest.raises(ArtifactError, match=MARKER):
        trainer_of(dataset(), run, small()).train(resume_from_checkpoint=str(run / "checkpoint-3"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def zero_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


@pytest.mark.parametrize("damage", [flip, zero_half])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", MARKER])
def test_damage_of_the_same_size_is_passed_over_and_said(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    run = tmp_path / "run"
    for step in (2, 3):
        shutil.copytree(Path(uninterrupted().args.output_dir) / f"checkpoint-{step}", run / f"checkpoint-{step}")
    damage(run / "checkpoint-3" / name)
    again = trainer_of(dataset(), run, small(), save_strategy="no")
    with pytest.warns(UserWarning, match=r"skipped.*checkpoint-3"):
        assert again._checkpoint(True) == str(run / "checkpoint-2")
    with pytest.raises(ArtifactError, match=name):
        again._checkpoint(str(run / "checkpoint-3"))
    damage(run / "checkpoint-2" / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"model\.safetensors differs from what was written"):
        again._checkpoint(True)


def test_weights_of_another_step_in_its_place_are_noticed(tmp_path: Path) -> None:
    for step in (2, 3):
        shutil.copytree(Path(uninterrupted().args.output_dir) / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    shutil.copy(tmp_path / "checkpoint-2" / "model.safetensors", tmp_path / "checkpoint-3")
    again = trainer_of(dataset(), tmp_path, small(), save_strategy="no")
    with pytest.warns(UserWarning, match=r"skipped.*checkpoint-3.*model\.safetensors"):
        again.train(resume_from_checkpoint=True)
    assert_is_the_same(again)


def test_weights_only_cannot_be_resumed(tmp_path: Path) -> None:
    trainer_of(dataset(), tmp_path, small(), save_only_model=True, max_steps=1).train()
    with pytest.raises(ArtifactError, match="weights only"):
        trainer_of(dataset(), tmp_path, small()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_full_disk_ends_the_run_and_the_checkpoint_before_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(dataset(), tmp_path, small())
    real = torch.save

    def save(found: Any, path: Any, *more: Any, **options: Any) -> None:
        if trainer.state.global_step == 3 and str(path).endswith("optimizer.pt"):
            Path(path).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        real(found, path, *more, **options)

    monkeypatch.setattr("torch.save", save)
    with pytest.raises(ArtifactError, match=r"(?s)No space left.*checkpoint-2 is complete"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    monkeypatch.undo()
    again = trainer_of(dataset(), tmp_path, small())
    again.train(resume_from_checkpoint=True)
    assert_is_the_same(again)


def list_again(checkpoint: Path, name: str) -> None:
    """As one who wants to deceive would, or another trainer: the checksum fits."""
    listed = json.loads((checkpoint / MARKER).read_text())
    facts = {key: value for key, value in listed.items() if key not in ("kind", "version", "checksum")}
    facts["files"][name] = FileSum.of(checkpoint / name).plain()
    write_json(checkpoint / MARKER, KIND, VERSION, facts, checked=True)


def other_shape(path: Path) -> None:
    """A moment that is smaller than its weight: kernels do not look."""
    found = torch.load(path, weights_only=True)
    next(iter(found["state"].values()))["exp_avg"] = torch.ones(3, 3)
    torch.save(found, path)


def other_state(**values: Any) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **values})) and None


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("optimizer.pt", other_shape, r"exp_avg of shape \(3, 3\)"),
        ("optimizer.pt", lambda path: torch.save([1], path), "another optimizer"),
        ("scheduler.pt", lambda path: torch.save(5, path), "another optimizer"),
        ("scheduler.pt", lambda path: torch.save({"lr_lambdas": [None], "last_epoch": "x"}, path), "another optimizer"),
        ("rng_state.pth", lambda path: torch.save({}, path), "random states of another kind"),
        ("trainer_state.json", lambda path: path.write_text("[]"), "TypeError"),
        ("trainer_state.json", lambda path: path.write_bytes(b"\xff"), "UnicodeDecodeError"),
        ("trainer_state.json", other_state(global_step=10**30), "global_step of another kind"),
        ("trainer_state.json", other_state(log_history=5, train_batch_size=None), "train_batch_size, log_history of"),
        ("trainer_state.json", other_state(stateful_callbacks=5), "TypeError"),
    ],
)
def test_states_of_another_kind_are_refused_in_words(
    tmp_path: Path, name: str, change: Callable[[Path], Any], words: str
) -> None:
    broken = tmp_path / "checkpoint-2"
    shutil.copytree(Path(uninterrupted().args.output_dir) / "checkpoint-2", broken)
    change(broken / name)
    list_again(broken, name)
    with pytest.raises(ArtifactError, match=words):
        trainer_of(dataset(), tmp_path / "run", small()).train(resume_from_checkpoint=str(broken))


@pytest.mark.parametrize("content", ["[]", "{}"])
def test_the_config_of_a_checkpoint_is_not_followed(tmp_path: Path, content: str) -> None:
    """It could ask for a model of any size; the run knows its own."""
    changed = tmp_path / "checkpoint-2"
    shutil.copytree(Path(uninterrupted().args.output_dir) / "checkpoint-2", changed)
    (changed / "config.json").write_text(content)
    model = small()
    reload_weights(model, changed)
    saved = load_file(changed / "model.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in model.state_dict().items() if name in saved)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    """Each of its files that is read by torch is read as tensors and plain values only."""
    source = Path(uninterrupted().args.output_dir) / "checkpoint-2"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        broken = tmp_path / name / "checkpoint-2"
        shutil.copytree(source, broken)
        marked = tmp_path / f"{name}-was-here"
        torch.save(Evil(str(marked)), broken / name)
        list_again(broken, name)
        with pytest.raises(ArtifactError, match=rf"(?s)checkpoint-2/{name}.*cannot load as tensors"):
            trainer_of(dataset(), tmp_path / "run", small()).train(resume_from_checkpoint=str(broken))
        assert not marked.exists()


@pytest.mark.parametrize("place", ["optimizer_0", "scheduler.pt", "checkpoint.json", "."])
def test_links_in_a_checkpoint_are_not_followed(tmp_path: Path, place: str) -> None:
    """What a link leads to is not in the checkpoint that was looked through."""
    run, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoint-2"
    marked, elsewhere = tmp_path / "was-here", tmp_path / "elsewhere"
    shutil.copytree(Path(uninterrupted().args.output_dir) / "checkpoint-2", checkpoint)
    linked = checkpoint / place
    if linked.exists():
        shutil.move(linked, elsewhere)
    else:
        elsewhere.mkdir()
        (elsewhere / ".metadata").write_bytes(pickle.dumps(Evil(str(marked))))
    linked.symlink_to(elsewhere)
    with pytest.raises(ArtifactError, match=rf"(?s){linked.name}.*a link"):
        trainer_of(dataset(), run, small()).train(resume_from_checkpoint=True)
    assert not marked.exists()


def test_the_best_checkpoint_is_looked_through_too(tmp_path: Path) -> None:
    """Its place is written in a checkpoint, and it is read at the end of the run."""
    trainer = trainer_of(dataset(), tmp_path, small())
    best, marked = tmp_path / "checkpoint-1", tmp_path / "was-here"
    shutil.copytree(Path(uninterrupted().args.output_dir) / "checkpoint-1", best)
    (best / "pytorch_model_fsdp_0").mkdir()
    (best / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(Evil(str(marked))))
    trainer.state.best_model_checkpoint = str(best)
    with pytest.raises(ArtifactError, match=r"it would call \w+\.mkdir"):
        trainer._load_best_model()
    assert not marked.exists()


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))
