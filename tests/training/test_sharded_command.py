"""`packtrain train` on two ranks that share the weights out: what it leaves is what ranks with whole weights leave."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_run import difference, write_samples
from test_trainer_sharded import SMOOTH, TOLERANCE, as_launched, fresh, launch

from packtrain.app.train.train import train
from packtrain.core.errors import ConfigError

sys.path.append(str(Path(__file__).parents[1] / "delivery"))

ADAPTERS = "adapter_model.safetensors"
pytestmark = pytest.mark.full
FAMILY, STEPS = "qwen3_vl", 3
FSDP, UNCHECKED = "training.sharding=fsdp", "training.packing_check=false"
LORA = ("model.method=lora", "model.lora_rank=4", "model.lora_dropout=0", UNCHECKED)


def write_config(folder: Path) -> Path:
    lines = write_samples(folder).read_text().splitlines(keepends=True)
    few = folder / "few.jsonl"  # evaluated before every save: weights are brought together then
    few.write_text("".join(lines[:4]))
    content = {
        "model": {"model_name_or_path": f"tiny:{FAMILY}", "train_vision": True, "train_projector": True},
        "data": {"dataset_path": str(write_samples(folder)), "packing_length": 176, "eval_path": str(few)},
        "training": {
            **SMOOTH,
            "packs_per_step": 4,
            "max_steps": STEPS,
            "use_cpu": True,
            "eval_steps": 1,
            "save_steps": STEPS,
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


# ---- what runs on each rank


def trained(config: str, out: Path, *given: str, stop_at: int | None = None, resume: bool = False) -> Any:
    """A run to its end, or until a signal comes to the second rank after a step."""
    from packtrain.training.callbacks import RunLogger
    from packtrain.training.trainer import PackedTrainer

    fresh("fsdp" if "training.sharding=fsdp" in given else "ddp")
    seen: dict[str, Any] = {}
    begin, on_step, on_packing_check = PackedTrainer._begin, RunLogger.on_step, RunLogger.on_packing_check
    proofs: list[Any] = []

    def looked(self: Any) -> None:
        found = list(self.model.parameters())  # before it computes anything, which brings the outermost ones together
        seen["sharded"] = sum(hasattr(weight, "full_tensor") for weight in found), len(found)
        begin(self)

    def stepped(self: Any, metrics: Any) -> None:
        on_step(self, metrics)
        if metrics.step == stop_at and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    PackedTrainer._begin, RunLogger.on_step = looked, stepped  # type: ignore[method-assign]
    RunLogger.on_packing_check = lambda self, report: proofs.append(report.outcome)  # type: ignore[method-assign]
    try:
        outcome = train(config, (*given, f"training.output_dir={out}"), resume=resume)
    finally:
        PackedTrainer._begin, RunLogger.on_step, RunLogger.on_packing_check = begin, on_step, on_packing_check  # type: ignore[method-assign]
    return outcome.outcome.status, outcome.outcome.step, outcome.ready.resumed, seen["sharded"], proofs


def refused(config: str, *given: str) -> str:
    """What is said before a run that does not start."""
    try:
        train(config, given, dry_run=True)
    except ConfigError as error:
        return str(error)
    return ""


def all_runs(rank: int, world_size: int, config: str, folder: str) -> dict[str, Any]:
    """One start of processes for all of them, since that is what takes long."""
    as_launched(rank, world_size)
    run, place = partial(trained, config), Path(folder)
    return {
        "ddp": run(place / "ddp", UNCHECKED),
        "adapters on ddp": run(place / "adapters-ddp", *LORA),
        "fsdp": run(place / "fsdp", FSDP),  # from now on accelerate's variables of the process ask for it
        "merged": run(place / "merged", FSDP, *LORA, "model.merge_adapters=true"),
        "stopped": run(place / "adapters", FSDP, *LORA, stop_at=1),
        "resumed": run(place / "adapters", FSDP, *LORA, resume=True),
        "dry run": refused(config, FSDP, UNCHECKED),
        "four bits": run(place / "qlora", FSDP, *LORA, "model.method=qlora") if find_spec("bitsandbytes") else None,
    }


# ---- the tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[dict[str, Any]]:
    """What both ranks say of every run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKTRAIN_CACHE", str(folder / "cache"))
        config = write_config(folder)
        train(config, dry_run=True)  # measured and packed before any process group is there
        return launch(2, all_runs, str(config), str(folder), folder=folder / "meeting", seconds=400)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForImageTextToText

    model, said = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    return dict(model.named_parameters())


def test_the_final_weights_are_those_of_ranks_with_whole_weights(runs: list[dict[str, Any]], folder: Path) -> None:
    for rank in runs:
        assert rank["ddp"][:3] == rank["fsdp"][:3] == ("complete", STEPS, 0)
        assert rank["ddp"][3][0] == 0
        assert rank["fsdp"][3][0] == rank["fsdp"][3][1] > 0, "every weight is shared out"
        assert (rank["ddp"][4], rank["fsdp"][4]) == ([], ["passed"]), "said once the weights are shared out"
        assert "2 processes on cpu, on which accelerate does not shard weights" in rank["dry run"]
    whole, shared = weights_in(folder / "ddp" / "final"), weights_in(folder / "fsdp" / "final")
    assert difference(whole, shared) < TOLERANCE


def test_the_adapters_of_a_run_that_was_stopped_are_those_of_whole_ones(
    runs: list[dict[str, Any]], folder: Path
) -> None:
    for rank in runs:
        assert rank["stopped"][:3] == ("interrupted", 2, 0)
        assert rank["resumed"][:3] == ("complete", STEPS, 2)
        assert rank["resumed"][3][0] == rank["resumed"][3][1] > 0
    assert bytes_saved(folder / "adapters") < 0.7 * bytes_saved(folder / "fsdp"), "without what is frozen"
    whole, shared = (load_file(folder / name / "final" / ADAPTERS) for name in ("adapters-ddp", "adapters"))
    assert any("lora_B" in name and weight.abs().max() > 0.01 for name, weight in whole.items()), "they have learned"
    assert difference(whole, shared) < TOLERANCE


def bytes_saved(run: Path) -> int:
    """The weights of its last checkpoint."""
    return sum(path.stat().st_size for path in (run / f"checkpoint-{STEPS}" / "pytorch_model_fsdp_0").iterdir())


def test_adapters_are_merged_into_sharded_weights(runs: list[dict[str, Any]], folder: Path) -> None:
    from peft import PeftModel

    from packtrain.modeling.load import load_model

    assert runs[0]["merged"][:2] == ("complete", STEPS)
    adapted = PeftModel.from_pretrained(load_model(f"tiny:{FAMILY}"), folder / "adapters-ddp" / "final")
    wanted = dict(adapted.merge_and_unload().named_parameters())
    found = weights_in(folder / "merged" / "final")
    assert difference(wanted, found) < TOLERANCE


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="weights in 4 bits need bitsandbytes")
def test_weights_in_four_bits_stay_whole_and_the_others_are_shared_out(
    runs: list[dict[str, Any]], folder: Path
) -> None:
    for rank in runs:
        assert rank["four bits"][:2] == ("complete", STEPS)
        sharded, weights = rank["four bits"][3]
        assert weights - sharded == 2 * 7, "the matrices of the decoder's layers"
    said = json.loads((folder / "qlora" / "run.json").read_text())["notes"]
    assert any("4-bit weights are not sharded" in note for note in said)
    found = load_file(folder / "qlora" / "final" / ADAPTERS)
    assert any("lora_B" in name and weight.abs().max() > 0.01 for name, weight in found.items()), "they have learned"
