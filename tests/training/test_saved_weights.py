"""What a checkpoint must have to be resumed is there when it is saved, and is all read when it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import dataset, model_of, trainer_of

from packtrain.core.artifacts import read_json, write_json
from packtrain.core.checksums import FileSum
from packtrain.core.errors import ArtifactError
from packtrain.training.checkpoints import KIND, MARKER, VERSION

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


def listed_anew(checkpoint: Path) -> None:
    """Write the list of a checkpoint's files as if they had been saved as they are."""
    content = read_json(checkpoint / MARKER, KIND, VERSION)
    files = {name: FileSum.of(checkpoint / name).plain() for name in content["files"]}
    facts = {name: content[name] for name in ("step", "world_size", "resumable")}
    write_json(checkpoint / MARKER, KIND, VERSION, {**facts, "files": files}, checked=True)


def without_an_adapter(checkpoint: Path) -> str:
    """Its name; another one takes its place in the file, and the list says that it was saved so."""
    path = checkpoint / "adapter_model.safetensors"
    found = load_file(path)
    name = next(iter(found))
    found[name.replace(".0.", ".7.")] = found.pop(name)
    save_file(found, path, metadata={"format": "pt"})
    listed_anew(checkpoint)
    return name


def test_an_adapter_that_a_checkpoint_lacks_ends_the_resumed_run(tmp_path: Path) -> None:
    first = trainer_of(dataset(), tmp_path, model_of(method="lora"), max_steps=1)
    first.train()
    without_an_adapter(tmp_path / "checkpoint-1")
    again = trainer_of(dataset(), tmp_path, model_of(method="lora"), max_steps=2)
    with pytest.raises(ArtifactError, match=r"missing: .*unexpected: "):
        again.train(resume_from_checkpoint=True)


def test_the_best_adapters_are_read_as_strictly(tmp_path: Path) -> None:
    trainer = trainer_of(dataset(), tmp_path, model_of(method="lora"), max_steps=1)
    trainer.train()
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    trained = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if "lora_" in name:
                weight.zero_()
    trainer._load_best_model()
    assert all(torch.equal(weight, trained[name]) for name, weight in trainer.model.named_parameters())
    without_an_adapter(tmp_path / "checkpoint-1")
    with pytest.raises(ArtifactError, match=r"missing: .*unexpected: "):
        trainer._load_best_model()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_checkpoint_without_weights_is_an_error_when_it_is_saved(tmp_path: Path, method: str) -> None:
    trainer = trainer_of(dataset(), tmp_path, model_of(method=method), max_steps=1)
    written: list[str] = []

    def config_alone(folder: str, **_: Any) -> None:
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "config.json").write_text("{}")
        written.append(folder)

    trainer.save_model = config_alone
    with pytest.raises(ArtifactError, match=r"safetensors was written, but config\.json"):
        trainer.train()
    assert written, "nothing was saved, so nothing was tested"
    assert not (tmp_path / "checkpoint-1").exists()


def test_adapters_inside_a_transformers_model_are_an_error_when_they_are_saved(tmp_path: Path) -> None:
    """It saves nothing else, and no run could be resumed from that."""
    peft = pytest.importorskip("peft")
    model = model_of()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    trainer = trainer_of(dataset(), tmp_path, model, max_steps=1)
    with pytest.raises(ArtifactError, match="get_peft_model"):
        trainer.train()
    assert not (tmp_path / "checkpoint-1").exists()
