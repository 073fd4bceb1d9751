"""Trainer trains every pack once, resumes bit by bit at any step, and the ways that would lose data are shown to."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from made_packs import PADDED, plan_of, reads
from small_training import G, Model, Packs, PackTrainer, arguments, same, trainer_of, weights
from transformers import PretrainedConfig, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.delivery.loader.pack_loader import PackLoader
from packtrain.delivery.trainers.mixin import PlanProgress, check_arguments, trainer_arguments
from packtrain.delivery.trainers.token_loss import token_loss
from packtrain.packing.schedule import Schedule

pytestmark = pytest.mark.contract
EPOCHS = (10, 7, 9)  # packs of each epoch: 3, 2 and 3 steps of 4


def all_packs(*epochs: int) -> Counter[tuple[int, int]]:
    return Counter((epoch, pack) for epoch, packs in enumerate(epochs) for pack in range(packs))


def real(trained: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [key for key in trained if key[1] >= 0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PackTrainer]:
    """A run without interruption, with a checkpoint after every step."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = trainer_of(Packs(plan_of(*EPOCHS)), folder)
    trainer.train()
    return folder, trainer


def test_every_pack_of_every_epoch_is_trained_once(whole: tuple[Path, PackTrainer]) -> None:
    trainer = whole[1]
    assert Counter(real(trainer.trained)) == all_packs(*EPOCHS)
    assert trainer.state.global_step == trainer.state.max_steps == 8
    assert not same(weights(trainer), list(Model().parameters()))


def test_epochs_are_those_of_the_plan(whole: tuple[Path, PackTrainer]) -> None:
    shown = [line["epoch"] for line in whole[1].state.log_history if "loss" in line]
    assert shown == pytest.approx([1 / 3, 2 / 3, 1, 1.5, 2, 2 + 1 / 3, 2 + 2 / 3, 3], abs=1e-3)


@pytest.mark.parametrize(("step", "workers"), [(1, 0), (2, 2), (3, 0), (4, 0), (5, 2), (7, 0), (8, 0)])
def test_resumed_at_any_step_it_is_the_same_run(
    whole: tuple[Path, PackTrainer], tmp_path: Path, step: int, workers: int
) -> None:
    folder, before = whole
    data = Packs(plan_of(*EPOCHS), log=tmp_path / "log")
    again = trainer_of(data, tmp_path, dataloader_num_workers=workers)
    told = again.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}")).metrics
    assert again.trained == before.trained[step * G :]
    samples = told["train_samples_per_second"] * told["train_runtime"]
    assert samples == pytest.approx(len(real(again.trained)), rel=0.01), "one sample in each pack of this call"
    assert same(weights(again), weights(before))
    assert sorted(reads(tmp_path / "log")) == sorted(pack for _, pack in real(before.trained[step * G :]))


def test_workers_change_nothing(whole: tuple[Path, PackTrainer], tmp_path: Path) -> None:
    trainer = trainer_of(Packs(plan_of(*EPOCHS)), tmp_path, dataloader_num_workers=2, save_strategy="no")
    trainer.train()
    assert trainer.trained == whole[1].trained
    assert same(weights(trainer), weights(whole[1]))


def test_what_happens_at_the_end_of_epochs_happens_there(tmp_path: Path) -> None:
    trainer = trainer_of(Packs(plan_of(*EPOCHS)), tmp_path, save_strategy="epoch", logging_strategy="epoch")
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (3, 5, 8)]
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == [3, 5, 8]


def test_a_checkpoint_of_another_schedule_is_refused(whole: tuple[Path, PackTrainer], tmp_path: Path) -> None:
    checkpoint = str(whole[0] / "checkpoint-2")
    for other in (Packs(plan_of(*EPOCHS), size=5), Packs(plan_of(*EPOCHS, seed=1))):
        with pytest.raises(ArtifactError, match="loader state"):
            trainer_of(other, tmp_path).train(resume_from_checkpoint=checkpoint)


def test_a_checkpoint_of_another_trainer_is_refused(whole: tuple[Path, PackTrainer], tmp_path: Path) -> None:
    foreign = trainer_of(Packs(plan_of(*EPOCHS)), tmp_path, max_steps=2)
    foreign.remove_callback(PlanProgress)
    foreign.train()
    with pytest.raises(ArtifactError, match="without a position"):
        trainer_of(Packs(plan_of(*EPOCHS)), tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


# ---- the loss


def test_every_token_of_a_step_weighs_the_same(tmp_path: Path) -> None:
    data, model = Packs(plan_of(7)), Model(dropout=0.0)
    batches = [batch for batch in data.loader() if batch.info.keys[0].step == 1]
    assert len(batches) == 3, "one pack less than a step has"
    with torch.no_grad():
        losses = [token_loss(model(batch["input_ids"]), batch["labels"]) for batch in batches]
    counts = [batch.info.supervised_tokens for batch in batches]
    assert len(set(counts)) > 1
    wanted = sum(loss.item() * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    args = arguments(tmp_path, **{**trainer_arguments(data.schedule), "learning_rate": 0.0, "save_strategy": "no"})
    trainer = PackTrainer(model=model, args=args, train_dataset=data)
    trainer.train()
    assert [line["loss"] for line in trainer.state.log_history if "loss" in line][1] == pytest.approx(wanted, rel=1e-5)


def test_labels_are_smoothed_as_trainer_does_it(tmp_path: Path) -> None:
    """In steps and in evaluations, over all tokens of either."""
    data, smoother, model = Packs(plan_of(7)), LabelSmoother(0.1), Model(dropout=0.0)
    model.config = PretrainedConfig()  # for which Trainer asks then

    def loss_of(batches: list[Any]) -> float:
        labels = [batch["labels"] for batch in batches]
        tokens = sum(int((one[:, 1:] != -100).sum()) for one in labels)
        options = {"shift_labels": True, "num_items_in_batch": tokens}
        with torch.no_grad():
            outputs = [model(batch["input_ids"]) for batch in batches]
        return sum(smoother(found, one, **options).item() for found, one in zip(outputs, labels, strict=True))

    whole, options = list(data.loader()), {"learning_rate": 0.0, "save_strategy": "no", "label_smoothing_factor": 0.1}
    wanted = [loss_of([batch for batch in whole if batch.info.keys[0].step == step]) for step in range(2)]
    args = arguments(tmp_path, **{**trainer_arguments(data.schedule), **options})
    trainer = PackTrainer(model=model, args=args, train_dataset=data, eval_dataset=data)
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged == pytest.approx(wanted, rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss_of(whole), rel=1e-5)
    with pytest.raises(ConfigError, match=r"label_smoothing_factor: 0.1 \(a custom loss"):
        PackTrainer(model=model, args=args, train_dataset=data, compute_loss_func=token_loss)


def test_a_pack_without_loss_has_a_loss_of_nothing() -> None:
    logits = torch.randn(1, 8, 90, requires_grad=True)
    loss = token_loss({"logits": logits}, torch.full((1, 8), -100), num_items_in_batch=torch.tensor(5))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0
    assert token_loss({"logits": logits}, torch.full((1, 8), -100)).item() == 0.0


# ---- evaluation


def token_mean(data: Packs, world_size: int = 1) -> float:
    """Over the tokens of all ranks, as a loop of one's own takes it."""
    model, total, tokens = Model().eval(), 0.0, 0
    for rank in range(world_size):
        for batch in data.loader(rank=rank, world_size=world_size):
            total += token_loss(model(batch["input_ids"]), batch["labels"], 1).item()
            tokens += batch.info.supervised_tokens
    return total / tokens


class Rows(Packs):
    """Two samples in each batch, padded."""

    def get_collator(self) -> Any:
        return PADDED

    def loader(self, **options: Any) -> PackLoader:
        return super().loader(**{**options, "collator": None, "rows_per_batch": 2})


@pytest.mark.parametrize("size", [1, 8])
def test_the_loss_of_an_evaluation_is_that_of_its_tokens(tmp_path: Path, size: int) -> None:
    plan = plan_of(7)
    held_out = {"packs": Packs(plan), "rows": Rows(plan)}
    args = arguments(tmp_path, per_device_eval_batch_size=size, eval_strategy="no")
    trainer = PackTrainer(model=Model(), args=args, train_dataset=Packs(plan_of(*EPOCHS)), eval_dataset=held_out)
    wanted = token_mean(Packs(plan))
    assert token_mean(Packs(plan), world_size=4) == pytest.approx(wanted, rel=1e-6), "packs that fill up add nothing"
    with torch.no_grad():
        model = Model().eval()
        means = [token_loss(model(batch["input_ids"]), batch["labels"]).item() for batch in Packs(plan).loader()]
    assert abs(sum(means) / len(means) - wanted) > 1e-3, "a mean of means is another number"
    for _ in range(2):
        found = trainer.evaluate()
        for name in held_out:
            assert found[f"eval_{name}_loss"] == pytest.approx(wanted, abs=1e-5)
            assert (found[f"eval_{name}_samples"], found[f"eval_{name}_failures"]) == (7, 0)
    assert trainer.compute_loss_func is token_loss


def test_an_evaluation_of_other_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)eval_dataset.*list.*MultiModalDataset"):
        trainer_of(Packs(plan_of(*EPOCHS)), tmp_path).evaluate([1, 2])


# ---- arguments


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size: 2 instead of 1"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps: 3 instead of 4"),
        ({"max_steps": 9}, "max_steps: 9 instead of 1 to 8"),
        ({"ignore_data_skip": True}, "train the first packs again and never the last"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"max_steps": -1, "num_train_epochs": 4}, "set DatasetConfig(epochs=4, ...)"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: 5.0"),
        ({"batch_eval_metrics": True, "eval_strategy": "no"}, "batch_eval_metrics"),
        ({"label_names": ["answers"]}, "label_names"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"data_seed": 0}, "data_seed: 0 (the schedule sets the order)"),
        ({"length_column_name": "size"}, "length_column_name"),
        ({"dataloader_in_order": False}, "dataloader_in_order: False"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
    ],
)
def test_arguments_that_would_lose_data_are_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_of(Packs(plan_of(*EPOCHS)), tmp_path, **given)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_what_was_left_at_its_default_follows_from_the_schedule(tmp_path: Path) -> None:
    """As other trainers take them; the arguments themselves stay as they are, for another dataset."""
    data, plain = Packs(plan_of(*EPOCHS)), arguments(tmp_path)
    with pytest.warns(UserWarning, match="per_device_train_batch_size 8 -> 1, gradient_acc"):
        trainer = PackTrainer(model=Model(), args=plain, train_dataset=data)
    derived = trainer_arguments(data.schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PackTrainer(model=Model(), args=arguments(tmp_path, **derived), train_dataset=data)
    assert {name: getattr(trainer.args, name) for name in derived} == derived
    assert (plain.max_steps, plain.remove_unused_columns, plain.per_device_train_batch_size) == (-1, True, 8)
    steps = [data.schedule.num_steps(epoch) for epoch in range(len(EPOCHS))]
    for epochs, expected in ((1, steps[0]), (1.5, steps[0] + round(steps[1] / 2)), (len(EPOCHS), sum(steps))):
        fewer = PackTrainer(model=Model(), args=arguments(tmp_path, num_train_epochs=epochs), train_dataset=data)
        assert fewer.args.max_steps == expected


def test_all_problems_are_said_at_once(tmp_path: Path) -> None:
    schedule = Schedule(plan_of(8), packs_per_step=4)
    args = arguments(
        tmp_path, per_device_train_batch_size=8, ignore_data_skip=True, max_steps=2, label_smoothing_factor=1.5
    )
    with pytest.raises(ConfigError) as caught:
        check_arguments(args, schedule)
    names = ("per_device_train_batch_size", "ignore_data_skip", "gradient_accumulation_steps")
    for name in (*names, "label_smoothing_factor: 1.5 (from 0 to below 1)"):
        assert name in str(caught.value)


def test_arguments_follow_from_the_number_of_ranks() -> None:
    schedule = Schedule(plan_of(10, 7), packs_per_step=6)
    found = [
        trainer_arguments(schedule, world_size=world_size)["gradient_accumulation_steps"] for world_size in (1, 2, 4, 8)
    ]
    assert found == [6, 3, 2, 1]
    assert trainer_arguments(schedule, world_size=4)["max_steps"] == 4


def test_fewer_steps_than_the_plan_has_may_be_trained(tmp_path: Path) -> None:
    trainer = trainer_of(Packs(plan_of(*EPOCHS)), tmp_path, max_steps=4, save_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.state.epoch == pytest.approx(1.5)


# ---- the obvious ways, and what they lose


def test_trainer_takes_all_epochs_to_be_as_long_as_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Epochs(PackTrainer):
        def get_train_dataloader(self) -> PackLoader:
            return self.train_dataset.loader(collator=None, rank=0, world_size=1)  # an epoch at a time

    epochs = (5, 11)
    data = Packs(plan_of(*epochs))
    options = {**trainer_arguments(data.schedule), "max_steps": -1, "save_strategy": "no"}
    with monkeypatch.context() as patch:
        patch.setattr("packtrain.delivery.trainers.mixin.check_arguments", lambda *_, **__: None)
        patch.setattr("packtrain.delivery.trainers.mixin.with_derived", lambda args, *_, **__: args)
        losing = Epochs(
            model=Model(),
            args=arguments(tmp_path / "a", **options),
            train_dataset=data,
            data_collator=None,
        )
    losing.train()
    assert Counter(real(losing.trained)) < all_packs(*epochs), "the end of the longer epoch is never trained"
    ours = trainer_of(data, tmp_path / "b", save_strategy="no")
    ours.train()
    assert Counter(real(ours.trained)) == all_packs(*epochs)


def test_skipping_no_data_on_resume_trains_packs_twice_and_others_never(
    whole: tuple[Path, PackTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.delivery.trainers.mixin.check_arguments", lambda *_, **__: None)
    folder, before = whole
    again = trainer_of(Packs(plan_of(*EPOCHS)), tmp_path, ignore_data_skip=True)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    trained = Counter(real(before.trained[: 3 * G] + again.trained))
    assert max(trained.values()) > 1
    assert set(trained) < set(all_packs(*EPOCHS))


def test_a_loader_that_draws_from_the_global_generator_changes_dropout(tmp_path: Path) -> None:
    """The same packs in the same order, an epoch at a time and all at once: only drawing tells them apart."""
    data = Packs(plan_of(8, 8))

    def train(span: str, own_generator: bool) -> PackTrainer:
        class Spans(PackTrainer):
            def get_train_dataloader(self) -> PackLoader:
                loader = self.train_dataset.loader(collator=None, rank=0, world_size=1, span=span)
                if not own_generator:
                    loader.generator = None
                return loader

        trainer = Spans(
            model=Model(),
            args=arguments(tmp_path / "run", save_strategy="no", **trainer_arguments(data.schedule)),
            train_dataset=data,
            data_collator=None,
        )
        trainer.train()
        return trainer

    ours = [train(span, True) for span in ("epoch", "run")]
    assert ours[0].trained == ours[1].trained
    assert same(weights(ours[0]), weights(ours[1]))
    drawn = [train(span, False) for span in ("epoch", "run")]
    assert drawn[0].trained == drawn[1].trained
    assert not same(weights(drawn[0]), weights(drawn[1]))


def test_an_ordinary_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)train_dataset.*list.*MultiModalDataset"):
        PackTrainer(model=Model(), args=arguments(tmp_path, max_steps=1), train_dataset=[1, 2])


@pytest.mark.full
def test_arguments_of_trl_that_change_the_loss_or_the_batches_are_refused(tmp_path: Path) -> None:
    config = pytest.importorskip("trl").SFTConfig
    schedule = Schedule(plan_of(8), packs_per_step=4)
    usual = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": []}
    kept = {
        "max_length": None,
        "packing": False,
        "eval_packing": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    check_arguments(config(**usual, **kept, **trainer_arguments(schedule)), schedule)
    refused = {
        "loss_type": "dft",
        "completion_only_loss": False,
        "assistant_only_loss": True,
        "packing": True,
        "eval_packing": True,
        "padding_free": True,
        "pad_to_multiple_of": 8,
        "max_length": 512,
        "shuffle_dataset": True,
        "chat_template_path": "template.jinja",
        "eos_token": "<end>",
        "router_aux_loss_coef": 0.1,
        "packing_strategy": "wrapped",
        "truncation_mode": "keep_end",
        "dataset_text_field": "content",
        "pad_token": "<pad>",
    }
    for name, value in refused.items():
        with pytest.raises(ConfigError, match=f"{name}: {value}"):
            check_arguments(config(**usual, **{name: value}, **trainer_arguments(schedule)), schedule)
    own = config(**usual, dataset_kwargs={"add_special_tokens": False}, **trainer_arguments(schedule))
    with pytest.raises(ConfigError, match=r"dataset_kwargs: .* .only skip_prepare_dataset"):
        check_arguments(own, schedule)
    harmless = {"model_init_kwargs", "trust_remote_code", "dataset_num_proc", "activation_offloading"}
    theirs = {one.name for one in fields(config)} - {one.name for one in fields(TrainingArguments)}
    assert theirs == {*refused, "dataset_kwargs", *harmless}, "a new one may change batches or the loss"


def test_weights_of_tokens_that_no_loss_takes_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(Packs(plan_of(*EPOCHS)), tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    batch["loss_weights"] = torch.ones(batch["labels"].shape)
    with pytest.raises(ConfigError, match=r"(?s)loss_weighting.*PackedTrainer"):
        trainer.compute_loss(trainer.model, batch)


def test_a_trainer_of_other_ranks_than_the_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that do not know of each other would each train a model of their own."""
    args, data = arguments(tmp_path), Packs(plan_of(*EPOCHS))
    assert args.world_size == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"(?s)rank 0 of 1 in the trainer, rank 1 of 2 .*use_cpu=True"):
        PackTrainer(model=Model(), args=args, train_dataset=data)
    assert data.loader(rank=0, world_size=1).batch_sampler.world_size == 1, (
        "a loader for other ranks is what was asked for"
    )
