"""The loss, the learning rates, the evaluation and the refusals of PackedTrainer, with tiny real models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import (
    SAMPLES,
    Gradients,
    dataset,
    difference,
    losses,
    model_of,
    same,
    shared,
    trainer_of,
    weights,
    write_samples,
)
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from packtrain.core.errors import ConfigError, DataError, PacktrainError
from packtrain.delivery.encode.encoded_sample import IGNORED, PackKey
from packtrain.modeling.load import load_model
from packtrain.modeling.model_settings import ModelSettings
from packtrain.modeling.preparation import ready_model
from packtrain.predicting.values import TrainingSetup
from packtrain.training.loss import Evaluated, preserve_random_state
from packtrain.training.meter import Meter, StepMeter
from packtrain.training.optimizers import parameter_groups
from packtrain.training.step_settings import StepSettings
from packtrain.training.trainer import PackedTrainer

pytestmark = pytest.mark.contract
TOLERANCE = 1e-5


# ---- the loss


@cache
def alone(family: str) -> dict[str, Tensor]:
    """The gradient of all samples one by one, with a loss written out here."""
    data, model = dataset(family, packing=False, packs_per_step=SAMPLES, epochs=1), model_of(family, dropout=0.0)
    collate, tokens = data.get_collator(), 0
    for pack in range(SAMPLES):
        batch = collate([data[pack]])
        targets = batch.pop("labels")[0, 1:]
        logits = model.train()(**batch).logits[0, :-1]
        cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").backward()
        tokens += int((targets != IGNORED).sum())
    found = {name: weight.grad / tokens for name, weight in model.named_parameters() if weight.grad is not None}
    assert max(float(grad.abs().max()) for grad in found.values()) > 0.01, "there is something to compare"
    return found


def first_gradients(folder: Path, family: str, step: StepSettings, **settings: Any) -> dict[str, Tensor]:
    data, seen = dataset(family, epochs=1, **settings), Gradients()
    model = model_of(family, dropout=0.0)
    options = {"max_grad_norm": 0.0, "save_strategy": "no", "max_steps": 1}
    trainer = trainer_of(data, folder, model, parts={"step": step, "callbacks": [seen]}, **options)
    trainer.train()
    assert sorted(name for ids in trainer.trained for name in ids) == sorted(f"r{n}" for n in range(SAMPLES))
    return seen.found


LAYOUTS = {
    "packed in one batch": {"packing_length": 4096, "packs_per_step": 1},
    "packed in many": {"packs_per_step": 16},
    "packed and aligned": {"packs_per_step": 16, "pack_alignment": 8},
    "padded one by one": {"packing": False, "packs_per_step": SAMPLES},
    "padded in rows": {"packing": False, "packs_per_step": SAMPLES, "rows_per_batch": 5},
}


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_a_step_does_not_depend_on_its_batches(tmp_path: Path, layout: str, chunked: bool) -> None:
    step = StepSettings(chunked_loss=chunked, loss_chunk=7)
    found = first_gradients(tmp_path, "llama", step, **LAYOUTS[layout])
    assert difference(found, alone("llama")) < TOLERANCE


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nor_with_pictures(tmp_path: Path, layout: str) -> None:
    found = first_gradients(tmp_path, "qwen3_vl", StepSettings(loss_chunk=7), **LAYOUTS[layout])
    assert difference(found, alone("qwen3_vl")) < TOLERANCE


def test_a_wrong_number_of_tokens_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.training.loss.batch_weight", lambda info: float(info.tokens))
    found = first_gradients(tmp_path, "llama", StepSettings(), **LAYOUTS["packed in many"])
    assert difference(found, alone("llama")) > 100 * TOLERANCE


@pytest.mark.parametrize("weighting", ["sample", "sqrt"])
def test_weights_of_tokens_are_the_same_in_any_layout_and_way(tmp_path: Path, weighting: str) -> None:
    found = {
        (layout, chunked): first_gradients(
            tmp_path,
            "llama",
            StepSettings(chunked_loss=chunked, loss_weighting=weighting),  # type: ignore[arg-type]
            **LAYOUTS[layout],
        )
        for layout in ("packed in many", "padded in rows")
        for chunked in (True, False)
    }
    first, *others = found.values()
    assert all(difference(first, other) < TOLERANCE for other in others)
    assert difference(first, alone("llama")) > 100 * TOLERANCE, "weights matter"


@pytest.mark.parametrize(("smoothing", "chunked"), [(0.0, True), (0.1, True), (0.1, False)])
def test_the_loss_that_is_logged_is_that_of_the_step(tmp_path: Path, smoothing: float, chunked: bool) -> None:
    data, parts = dataset(), {"step": StepSettings(chunked_loss=chunked)}
    options = {"learning_rate": 0.0, "save_strategy": "no", "max_steps": 2, "label_smoothing_factor": smoothing}
    trainer = trainer_of(data, tmp_path, model_of(dropout=0.0), parts=parts, **options)
    trainer.train()
    model, collate = model_of(dropout=0.0).eval(), data.get_collator()
    batch = [collate([data.source[key]]) for key in keys_of_step(data, 1)]
    labels = [dict(one).pop("labels") for one in batch]
    tokens = sum(int((one[:, 1:] != IGNORED).sum()) for one in labels)
    loss = partial(LabelSmoother(smoothing), shift_labels=True, num_items_in_batch=tokens)
    with torch.no_grad():
        wanted = sum(float(loss(model(**one), own)) for one, own in zip(batch, labels, strict=True))
    assert losses(trainer)[2] == pytest.approx(wanted, rel=1e-5)


def keys_of_step(data: Any, step: int) -> list[Any]:
    return [PackKey(epoch=0, pack=int(pack)) for pack in data.schedule.step(0, step)]


def cross_entropy_of(model: Any, batch: Any) -> tuple[float, int]:
    targets = batch.pop("labels")[0, 1:]
    with torch.no_grad():
        logits = model(**batch).logits[0, :-1]
    return float(cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")), int((targets != IGNORED).sum())


# ---- what a step does not reach


class SilentSteps:
    """A collator that leaves the packs of some samples without loss."""

    def __init__(self, collate: Any, silent: set[str]) -> None:
        self.collate, self.silent = collate, silent

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if set(batch.info.ids) <= self.silent:
            batch["labels"].fill_(IGNORED)
            batch.info = replace(batch.info, supervised_tokens=0, loss_total=0.0)
        return batch


def plain_loop(data: Any, collate: Any) -> dict[str, Tensor]:
    """As anyone would write it, without hooks on the model; steps without loss are passed over."""
    model = load_model("tiny:qwen3_vl", cache_dir=shared() / "models").train()
    optimizer = torch.optim.AdamW(parameter_groups(model, learning_rate=0.01, weight_decay=0.1), eps=0.01)
    for step in range(data.schedule.num_steps(0)):
        batches = [collate([data.source[key]]) for key in keys_of_step(data, step)]
        tokens = sum(batch.info.supervised_tokens for batch in batches)
        for batch in batches:
            targets = batch.pop("labels")[0, 1:]
            logits = model(**batch).logits[0, :-1]
            (cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") / max(tokens, 1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if tokens:
            optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_a_step_leaves_alone_what_it_does_not_reach(tmp_path: Path) -> None:
    """Without pictures the vision encoder neither decays nor moves; without any loss nothing does."""
    place = shared() / "few-pictures"
    write_samples(place, every=12)
    data = dataset("qwen3_vl", folder=place, packs_per_step=2, epochs=1)
    steps = data.schedule.num_steps(0)
    ids = [
        {sample.id for key in keys_of_step(data, step) for sample in data.source[key].samples} for step in range(steps)
    ]
    pictured = [step for step, names in enumerate(ids) if names & {"r3", "r15"}]
    assert 0 < len(pictured) < steps - 1, "there are steps with and without pictures"
    silent = ids[next(step for step in range(1, steps) if step not in pictured)]
    collate, seen = SilentSteps(data.get_collator(), silent), list[Any]()
    trainer = trainer_of(
        data, tmp_path, model_of("qwen3_vl", dropout=0.0), save_strategy="no", lr_scheduler_type="constant",
        weight_decay=0.1, adam_epsilon=0.01, logging_steps=2,
        parts={"data_collator": collate, "meter": StepMeter(), "on_step": seen.append},
    )  # fmt: skip
    trainer.train()
    assert difference(weights(trainer), plain_loop(data, collate)) < TOLERANCE
    assert [metrics.loss is None for metrics in seen] == [names == silent for names in ids]
    for line in trainer.state.log_history[:-1]:
        known = [one.loss for one in seen[line["step"] - 2 : line["step"]] if one.loss is not None]
        assert line["loss"] == pytest.approx(sum(known) / len(known)), "a mean over the steps that have one"


def test_a_loss_that_is_no_number_is_seen(tmp_path: Path) -> None:
    model = model_of()
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    trainer = trainer_of(dataset(), tmp_path, model, save_strategy="no", max_steps=1)
    trainer.train()
    assert math.isnan(losses(trainer)[1])


def test_it_learns(tmp_path: Path) -> None:
    trainer = trainer_of(dataset(epochs=4), tmp_path, save_strategy="no", learning_rate=0.02)
    trainer.train()
    found = losses(trainer)
    assert found[max(found)] < 0.5 * found[1]


# ---- learning rates


def test_parts_have_their_own_learning_rate_and_follow_the_schedule(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Rates(Told):
        def end(self, **facts: Any) -> None:
            seen.append(dict(facts["learning_rates"]))

    step = StepSettings(vit_lr=0.001, aligner_lr=0.004, loss_chunk=16)
    trainer = trainer_of(
        dataset("qwen3_vl"), tmp_path, parts={"step": step, "meter": Rates()}, save_strategy="no",
        lr_scheduler_type="linear", warmup_steps=2, max_steps=3,
    )  # fmt: skip
    trainer.train()
    assert [rates["language"] for rates in seen] == pytest.approx([0.0, 0.005, 0.01])
    for rates in seen:
        assert rates["vision"] == pytest.approx(rates["language"] / 10)
        assert rates["projector"] == pytest.approx(rates["language"] * 0.4)


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "constant_with_warmup", "inverse_sqrt", "polynomial"])
def test_schedulers_and_warmup_as_a_ratio(tmp_path: Path, scheduler: str) -> None:
    trainer = trainer_of(
        dataset(), tmp_path, save_strategy="no", lr_scheduler_type=scheduler, warmup_steps=0.5, max_steps=4
    )
    trainer.train()
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert rates[0] == 0.0
    assert max(rates) == pytest.approx(0.01)


# ---- the meter


class Told(Meter):
    """A meter that writes down what it is told."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def begin(self) -> None:
        self.said.append("begin")

    def add_batch(self, info: Any, waited: float) -> None:
        assert waited >= 0
        self.said.append(info.samples)

    def end(self, **facts: Any) -> Any:
        self.said.append(("end", facts["step"], float(facts["loss"]), float(facts["grad_norm"]) > 0))
        return facts["step"]

    def state_dict(self) -> dict[str, int]:
        return {"ends": len(self.said)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.said.append(("loaded", state["ends"]))


def test_a_meter_is_told_of_every_step_once(tmp_path: Path) -> None:
    meter, steps = Told(), list[Any]()
    trainer = trainer_of(dataset(), tmp_path, parts={"meter": meter, "on_step": steps.append}, logging_steps=2)
    trainer.train()
    ends = [said for said in meter.said if isinstance(said, tuple)]
    total = trainer.state.max_steps
    assert [end[1] for end in ends] == steps == list(range(1, total + 1))
    assert all(end[3] for end in ends)
    mean = (ends[0][2] + ends[1][2]) / 2
    assert losses(trainer)[2] == pytest.approx(mean, rel=1e-6), "Trainer logs the mean since the last line"
    again = Told()
    resumed = trainer_of(dataset(), tmp_path / "again", parts={"meter": again})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.said[0][0] == "loaded"
    assert [said[1] for said in again.said if isinstance(said, tuple)][1:] == list(range(4, total + 1))


def test_the_real_meter_and_its_names_in_the_log(tmp_path: Path) -> None:
    trainer = trainer_of(dataset(), tmp_path, parts={"meter": StepMeter()}, save_strategy="no", max_steps=2)
    trainer.train()
    line = trainer.state.log_history[1]
    assert line["perf/global_seq_len_max"] >= line["perf/global_seq_len_avg"] > 0
    assert line["samples_seen"] > 0


# ---- evaluation


def held_out(**settings: Any) -> Any:
    """Other samples than those that are trained."""
    folder = shared() / "held-out"
    write_samples(folder, 11, pictures=False)
    return dataset(folder=folder, epochs=1, **settings)


def test_evaluation_is_the_same_number_packed_and_padded(tmp_path: Path) -> None:
    ways = [
        held_out(packing_length=128),
        held_out(packing_length=1024, packs_per_step=7),
        held_out(packing=False),
        held_out(packing=False, packs_per_step=8, rows_per_batch=4),
    ]
    model = model_of().train()
    found = []
    for number, data in enumerate(ways):
        trainer = trainer_of(dataset(), tmp_path / str(number), model, parts={"eval_dataset": data})
        found.append(trainer.evaluate())
    assert model.training
    assert [metrics["eval_samples"] for metrics in found] == [11.0] * 4
    assert [m["eval_loss"] for m in found] == pytest.approx([found[0]["eval_loss"]] * 4, rel=1e-6)
    collate, model = ways[2].get_collator(), model.eval()
    sums = [cross_entropy_of(model, collate([ways[2][pack]])) for pack in range(11)]
    wanted = sum(total for total, _ in sums) / sum(number for _, number in sums)
    assert found[0]["eval_loss"] == pytest.approx(wanted, rel=1e-6)


def test_evaluating_does_not_change_the_run(tmp_path: Path) -> None:
    plain = trainer_of(dataset(), tmp_path / "plain", save_strategy="no")
    plain.train()
    looked = trainer_of(
        dataset(), tmp_path / "looked", parts={"eval_dataset": held_out()}, save_strategy="no",
        eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    looked.train()
    assert sum("eval_loss" in line for line in looked.state.log_history) == looked.state.max_steps
    assert losses(looked) == losses(plain)
    assert same(weights(looked), weights(plain))
    assert looked.model.training


def test_a_model_that_draws_while_it_is_evaluated_changes_nothing() -> None:
    torch.manual_seed(0)
    with preserve_random_state():
        torch.rand(5)
    assert torch.equal(torch.rand(3), torch.manual_seed(0) and torch.rand(3))


def test_data_without_loss_is_refused_and_not_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.training.loss.batch_weight", lambda info: 0.0)
    trainer = trainer_of(dataset(), tmp_path, parts={"eval_dataset": held_out()})
    with pytest.raises(DataError, match="without a supervised token"):
        trainer.evaluate()


def test_several_datasets_have_names(tmp_path: Path) -> None:
    trainer = trainer_of(dataset(), tmp_path, parts={"eval_dataset": {"a": held_out(), "b": held_out(packing=False)}})
    found = trainer.evaluate()
    assert found["eval_a_loss"] == pytest.approx(found["eval_b_loss"], abs=1e-6)


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_evaluated_and_saved_once_at_a_step(tmp_path: Path, strategy: str) -> None:
    trainer = trainer_of(
        dataset(), tmp_path, parts={"eval_dataset": held_out()}, eval_strategy=strategy, eval_steps=2,
        save_strategy=strategy, save_steps=2,
    )  # fmt: skip
    trainer.train()
    ends = [4, 8] if strategy == "epoch" else [2, 4, 6, 8]
    assert [line["step"] for line in trainer.state.log_history if "eval_loss" in line] == ends
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{end}" for end in ends]


def with_losses(trainer: Any, found: tuple[float, ...]) -> Any:
    """Evaluations give these losses, one after the other, by their step."""

    def evaluate(*_: Any) -> Evaluated:
        at = int(trainer.state.global_step) - 1
        return Evaluated(loss=found[at], samples=1, tokens=1, batches=1)

    return evaluate


STOPPING: dict[str, Any] = {
    **{"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True},
    **{"metric_for_best_model": "loss", "greater_is_better": False},
}


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_early_stopping_ends_with_the_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    parts = {"step": StepSettings(early_stopping_patience=2, loss_chunk=16), "eval_dataset": held_out()}
    trainer = trainer_of(dataset(family), tmp_path, parts=parts, **STOPPING)
    monkeypatch.setattr("packtrain.training.trainer.evaluate", with_losses(trainer, (5.0, 4.0, 4.5, 4.2, 1.0)))
    trainer.train()
    assert trainer.state.global_step == 4, "two evaluations after the best"
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    best, last = (type(trainer.model).from_pretrained(tmp_path / f"checkpoint-{step}").state_dict() for step in (2, 4))
    assert same(weights(trainer), best)
    assert not same(best, last)


def test_how_long_nothing_was_better_is_part_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"step": StepSettings(early_stopping_patience=2, loss_chunk=16), "eval_dataset": held_out()}
    trainer = trainer_of(dataset(), tmp_path, parts=parts, max_steps=3, **STOPPING)
    monkeypatch.setattr("packtrain.training.trainer.evaluate", with_losses(trainer, (5.0, 4.0, 4.5)))
    trainer.train()
    again = trainer_of(dataset(), tmp_path / "again", parts=parts, **STOPPING)
    monkeypatch.setattr("packtrain.training.trainer.evaluate", with_losses(again, (9.0, 9.0, 9.0, 4.2, 1.0)))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == 4


def test_a_run_that_was_stopped_early_is_saved_and_stays_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 100}

    def made(folder: str, patience: int) -> Any:
        parts = {"step": StepSettings(early_stopping_patience=patience, loss_chunk=16), "eval_dataset": held_out()}
        trainer = trainer_of(dataset(), tmp_path / folder, parts=parts, **options)
        monkeypatch.setattr("packtrain.training.trainer.evaluate", with_losses(trainer, (5.0, 4.0, *(6.0,) * 9)))
        return trainer

    stopped = made("a", 2)
    stopped.train()
    assert [path.name for path in (tmp_path / "a").glob("checkpoint-*")] == ["checkpoint-4"]
    for patience, last in ((2, 4), (3, 5)):
        again = made(f"again-{patience}", patience)
        again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
        assert again.state.global_step == last
        assert bool(again.trained) == (last > 4)


def test_no_checkpoint_before_its_time(tmp_path: Path) -> None:
    trainer = trainer_of(dataset(), tmp_path, parts={"step": StepSettings(save_delay_steps=5)}, save_steps=1)
    trainer.train()
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")) == [5, 6, 7, 8]


def test_the_newest_and_the_best_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(
        dataset(), tmp_path, parts={"eval_dataset": held_out()}, eval_strategy="steps", eval_steps=1, save_steps=1,
        metric_for_best_model="loss", load_best_model_at_end=True, save_total_limit=2,
    )  # fmt: skip
    synthetic = (5.0, 3.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0)
    monkeypatch.setattr("packtrain.training.trainer.evaluate", with_losses(trainer, synthetic))
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-8"]


# ---- before the first step


def test_a_model_that_keeps_samples_apart_passes_and_nothing_is_drawn(tmp_path: Path) -> None:
    told: list[Any] = []
    parts = {"packing_check": True, "on_packing_check": told.append}
    checked = trainer_of(dataset(), tmp_path / "a", parts=parts, save_strategy="no", max_steps=2)
    checked.train()
    assert told == [checked.check_report]
    plain = trainer_of(dataset(), tmp_path / "b", save_strategy="no", max_steps=2)
    plain.train()
    assert checked.check_report is not None
    assert checked.check_report.passed
    assert plain.check_report is None
    assert losses(checked) == losses(plain)
    assert same(weights(checked), weights(plain))


def test_every_modality_is_looked_at(tmp_path: Path) -> None:
    trainer = trainer_of(dataset("qwen3_vl"), tmp_path, parts={"packing_check": True}, save_strategy="no", max_steps=1)
    trainer.train()
    assert trainer.check_report is not None
    assert {name.split("(")[1].split(",")[0] for name in trainer.check_report.samples} >= {"text", "image"}
    assert "neighbours, other pixels" in {finding.check for finding in trainer.check_report.checks}
    assert "training gradients" in {finding.check for finding in trainer.check_report.checks}


def test_a_model_that_mixes_samples_does_not_start(tmp_path: Path) -> None:
    model = model_of()
    model.model.layers[0].register_forward_hook(lambda _, given, out: out + 0.1 * out.mean(1, keepdim=True))
    trainer = trainer_of(dataset(), tmp_path, model, parts={"packing_check": True}, save_strategy="no")
    with pytest.raises(PacktrainError, match=r"(?s)before the first step.*packing_check=False"):
        trainer.train()
    assert trainer.trained == []


@pytest.mark.parametrize("packing_check", [True, False])
def test_a_compiler_that_fails_is_said_in_words(tmp_path: Path, packing_check: bool) -> None:
    model, failure = model_of(), type("InductorError", (RuntimeError,), {"__module__": "torch._inductor.exc"})

    def fail(*_: Any) -> None:
        raise failure("NoValidChoicesError")

    model.model.layers[0].register_forward_pre_hook(fail)
    trainer = trainer_of(dataset(), tmp_path, model, parts={"packing_check": packing_check}, save_strategy="no")
    with pytest.raises(ConfigError, match=r"(?s)could not be compiled.*NoValidChoices.*varlen or sdpa.*compile: false"):
        trainer.train()


def test_flex_attention_does_not_train_on_a_cpu() -> None:
    settings = ModelSettings(name="tiny:llama", attn_implementation="flex")
    with pytest.raises(ConfigError, match=r"(?s)no backward for it.*training\.attn_implementation: sdpa"):
        ready_model(settings, TrainingSetup(), device=torch.device("cpu"), packing=True, seed=0)


def test_padded_rows_have_nothing_to_check(tmp_path: Path) -> None:
    data = dataset(packing=False, rows_per_batch=2, packs_per_step=8)
    trainer = trainer_of(data, tmp_path, parts={"packing_check": True}, save_strategy="no", max_steps=1)
    trainer.train()
    assert trainer.check_report is None
    assert len(trainer.trained) == 4


# ---- arguments, and what is saved


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"label_smoothing_factor": 1.5}, r"label_smoothing_factor: 1.5 .from 0"),
        ({"torch_compile": True}, "use `compile`"),
        ({"restore_callback_states_from_checkpoint": True}, "restore_callback_states"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
        ({"neftune_noise_alpha": 5.0}, "noise shrinks with the length of a row"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        trainer_of(dataset(), tmp_path, **given)
    assert caught.value.exit_code == 2


def test_noise_is_refused_with_any_collator(tmp_path: Path) -> None:
    data = dataset()
    collate = data.get_collator()
    with pytest.raises(ConfigError, match="noise shrinks with the length of a row"):
        trainer_of(data, tmp_path, parts={"data_collator": lambda rows: collate(rows)}, neftune_noise_alpha=5.0)


def test_plain_arguments_and_a_model_as_it_was_loaded_are_enough(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same run as with derived arguments and a model that was made ready; losses are printed as Trainer does."""
    data, plain = dataset("qwen3_vl", epochs=1), {"output_dir": str(tmp_path), "use_cpu": True, "save_strategy": "no"}
    found = []
    for model in (load_model("tiny:qwen3_vl", cache_dir=shared() / "models"), model_of("qwen3_vl", dropout=0.0)):
        args = TrainingArguments(dataloader_pin_memory=False, report_to=[], logging_steps=1, **plain)
        ours = PackedTrainer(model=model, args=args, train_dataset=data, data_collator=data.get_collator())
        ours.train()
        assert ours.check_report is not None
        found.append((losses(ours), ours.state.global_step))
    assert found[0] == found[1]
    assert found[0][1] == data.schedule.num_steps() > 1
    assert capfd.readouterr().out.count("'loss'") == 2 * found[0][1]


def test_padded_rows_may_be_trained_with_noise(tmp_path: Path) -> None:
    data = dataset(packing=False, rows_per_batch=2, packs_per_step=8)
    trainer = trainer_of(data, tmp_path, save_strategy="no", max_steps=1, neftune_noise_alpha=5.0)
    trainer.train()
    assert len(trainer.trained) == 4


def test_metrics_of_logits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compute_metrics"):
        trainer_of(dataset(), tmp_path, parts={"compute_metrics": lambda _: {}})


def test_an_ordinary_eval_dataset_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(dataset(), tmp_path, parts={"eval_dataset": [1, 2]})
    with pytest.raises(ConfigError, match="eval_dataset"):
        trainer.evaluate()


def test_a_learning_rate_for_a_part_that_is_not_there(tmp_path: Path) -> None:
    trainer = trainer_of(dataset(), tmp_path, parts={"step": StepSettings(vit_lr=0.1)})
    with pytest.raises(ConfigError, match="no vision encoder"):
        trainer.train()


def test_the_config_is_saved_as_it_came(tmp_path: Path) -> None:
    model = model_of()
    model.config.use_cache = True
    trainer = trainer_of(dataset(), tmp_path, model, max_steps=1)
    trainer.train()
    saved = json.loads((tmp_path / "checkpoint-1" / "config.json").read_text())
    assert saved.get("use_cache", True) is True
    assert not (tmp_path / "checkpoint-1" / "training_args.bin").exists(), "a pickle that nobody reads"


def test_a_loss_of_the_user(tmp_path: Path) -> None:
    def doubled(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        targets = labels[..., 1:]
        keep = targets != IGNORED
        total = cross_entropy(outputs["logits"][..., :-1, :][keep], targets[keep], reduction="sum")
        return 2 * total / num_items_in_batch

    found = []
    for number, parts in enumerate(({}, {"compute_loss_func": doubled})):
        trainer = trainer_of(dataset(), tmp_path / str(number), parts=parts, save_strategy="no", max_steps=1)
        trainer.train()
        found.append(losses(trainer)[1])
    assert found[1] == pytest.approx(2 * found[0], rel=1e-5)


def test_a_loss_of_the_user_knows_no_weights(tmp_path: Path) -> None:
    parts = {"step": StepSettings(loss_weighting="sample"), "compute_loss_func": lambda *_, **__: None}
    with pytest.raises(ConfigError, match=r"(?s)'sample'.*does not get the weights.*label_smoothing_factor"):
        trainer_of(dataset(), tmp_path, parts=parts, label_smoothing_factor=0.1)
