"""The training benchmark trains on the samples it says, in the ways it says, and its numbers follow from its clock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from packtrain.bench import train as bench
from packtrain.bench.train import bench_train, measure_row, with_adapters
from packtrain.bench.train_data import MadeRows, Pool, evenly_chosen, put_into_batches
from packtrain.bench.train_loop import TINY_SETTINGS, BenchTrainer
from packtrain.bench.train_rows import (
    ADAPTERS,
    BASELINE,
    MODELS,
    TINY,
    TINY_TEXT,
    YARDSTICK,
    bench_model,
    bench_rows,
    with_method,
)
from packtrain.cli import bench as commands
from packtrain.core.errors import ConfigError
from packtrain.delivery.collate.collators import PackCollator
from packtrain.delivery.encode.encoded_sample import IGNORED
from packtrain.families.contracts import contract_for
from packtrain.predicting.memory_parts import count

QUICK = replace(TINY_SETTINGS, tokens=400, step_samples=4, workers=0)


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool.of_lvis_shape(longest=8_192, samples=1_000)


def test_samples_have_the_shape_they_are_said_to_have(pool: Pool) -> None:
    assert pool.tokens.max() <= 8_192
    assert 1_150 < pool.tokens.mean() < 1_300
    assert 320 < pool.image_tokens.mean() < 360
    assert 0.66 < pool.supervised.sum() / pool.tokens.sum() < 0.72
    assert (pool.supervised + pool.image_tokens < pool.tokens).all()


@pytest.mark.parametrize("how", ["packed", "random", "sorted", "grouped"])
def test_every_sample_is_in_one_batch(pool: Pool, how: Any) -> None:
    batches = put_into_batches(pool, how, size=16_384 if how == "packed" else 8, limit=16_384)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(pool.tokens)))
    if how == "packed":
        assert max(int(pool.tokens[batch].sum()) for batch in batches) <= 16_384
        assert pool.tokens.sum() / len(batches) / 16_384 > 0.97
    else:
        assert max(map(len, batches)) == 8
        assert max(len(batch) * int(pool.tokens[batch].max()) for batch in batches if len(batch) > 1) <= 16_384


def test_chosen_batches_stand_for_all(pool: Pool) -> None:
    batches = put_into_batches(pool, "sorted", size=8, limit=16_384)
    chosen = evenly_chosen(pool, batches, 12)
    assert len({tuple(batch) for batch in chosen}) == 12
    every = np.mean([pool.tokens[batch].sum() for batch in batches])
    assert np.mean([pool.tokens[batch].sum() for batch in chosen]) == pytest.approx(every, rel=0.1)


def test_rows_are_what_the_numbers_say() -> None:
    small, model = Pool.of_lvis_shape(longest=256, samples=64, scale=24), bench_model(TINY)
    batches = put_into_batches(small, "packed", size=512)
    made = MadeRows(small, batches, model.config, torch.float32)
    batch = PackCollator(contract_for({"model_type": "qwen3_vl"}), pad_id=0)([made[0]])
    load = small.load(batches[:1], padded=False)
    assert batch["input_ids"].numel() == batch.info.tokens == load.tokens
    assert int((batch["labels"] != IGNORED).sum()) == batch.info.supervised_tokens == load.supervised_tokens
    assert len(batch["pixel_values"]) == int(batch["image_grid_thw"].prod(1).sum()) == load.patches
    assert int((batch["input_ids"] == model.config["image_token_id"]).sum()) == load.vision_tokens
    assert load.squared_patches == int((batch["image_grid_thw"].prod(1) ** 2).sum())


def test_all_ways_are_there() -> None:
    model = MODELS["qwen3-vl-2b"]
    rows = bench_rows(model)
    assert {BASELINE, YARDSTICK} <= {row.name for row in rows}
    assert len({row.name for row in rows}) == len(rows)
    packed = {(row.size, row.method, row.checkpointing) for row in rows if row.is_packed}
    wanted = {
        (size, way, kept) for size in (8_192, 16_384, 20_000) for way in ("full", "lora") for kept in (True, False)
    }
    assert packed == wanted
    (rounded,) = (row for row in rows if row.is_packed and not row.masters)
    plain = {row.name for row in rows if not row.tuned}
    assert {row.name for row in rows if not row.masters} == plain | {rounded.name}, "as others train"
    assert not rounded.setup(64).has_masters
    assert model.shape.parameters.total == pytest.approx(2.13e9, rel=0.01)


FEW = (BASELINE, YARDSTICK, "packed 512", "packed 512, lora, checkpointing")


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, True])
def test_one_run_of_rows_makes_one_table(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    every = bench_rows(bench_model(TINY))
    if not compiled:
        every = tuple(replace(row, compiled=False) for row in every if row.name in FEW)
    monkeypatch.setattr(bench, "bench_rows", lambda _: every)
    shown: list[str] = []
    seen: list[int] = []
    result = bench_train(
        model=TINY, settings=QUICK, progress=shown.append, done=lambda found: seen.append(len(found["rows"]))
    )
    rows = {row["name"]: row for row in result["rows"]}
    assert seen == list(range(1, len(rows) + 1))
    assert set(FEW) <= rows.keys() <= set(shown)
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(row["load"]["tokens"] / row["batch_seconds"] / row["batches"])
        assert row["to_baseline"] == pytest.approx(row["tokens_per_second"] / rows[BASELINE]["tokens_per_second"])
        assert row["to_yardstick"] == pytest.approx(row["tokens_per_second"] / rows[YARDSTICK]["tokens_per_second"])
        assert 0 <= row["padding_share"] < 1
        assert 1 <= row["optimizer_steps"] <= row["batches"]
        assert row["compiled_while_timed"] == 0
    assert rows[BASELINE]["padding_share"] > rows["packed 512"]["padding_share"]
    json.dumps(result)


@pytest.mark.parametrize("method", ADAPTERS)
def test_adapters_of_one_kind_are_compared_with_their_own_padded_rows(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    chosen = [with_method(name, method) for name in (YARDSTICK, "packed 384")]
    every = {row.name: replace(row, compiled=False) for row in bench_rows(bench_model(TINY_TEXT))}
    before = replace(every[with_method(YARDSTICK, "lora")], name="before", method="lora")
    monkeypatch.setattr(bench, "bench_rows", lambda _: [before, *(every[name] for name in chosen)])
    seen: list[str] = []

    def one(bench_of: Any, model: Any, row: Any, *others: Any) -> dict[str, Any]:
        kinds = {type(module).__name__ for module in model.modules()}
        seen.append(row.method)
        assert {"lora"} == set(model.peft_config["default"].peft_type.lower().split("_")), "adapters are there"
        assert model.peft_config["default"].use_dora == (row.method == "dora")
        assert ("Linear4bit" in kinds) == (row.method == "qlora")
        return measure_row(bench_of, model, row, *others)

    monkeypatch.setattr(bench, "measure_row", one)
    rows = bench_train(model=TINY_TEXT, settings=QUICK)["rows"]
    assert seen == ["lora", method, method]
    yardstick, packed = rows[1:]
    assert packed["to_yardstick"] == pytest.approx(packed["tokens_per_second"] / yardstick["tokens_per_second"])
    assert yardstick["load"]["patches"] == yardstick["load"]["images"] == 0
    assert yardstick["padding_share"] > 0


def test_what_memory_is_predicted_belongs_to_the_row() -> None:
    model, pool = bench_model(TINY_TEXT), Pool.of_lvis_shape(longest=256, samples=64, scale=24, images=False)
    trained = model.build(torch.device("cpu"), torch.float32)
    rows = {row.name: replace(row, compiled=False) for row in bench_rows(model)}

    def predicted(name: str, **changed: Any) -> float:
        trainer = BenchTrainer(model, trained, replace(rows[name], **changed), pool, QUICK)
        found = float(trainer._predicted())
        trainer.close()
        return found

    kept = predicted("packed 384, lora")
    weights = 4 * model.shape.parameters.total
    assert predicted("packed 384, lora, checkpointing") < kept
    assert predicted("packed 384, lora", size=768) - weights > 1.5 * (kept - weights), "rows are filled to their length"
    assert predicted("packed 384, dora") > kept
    assert predicted("packed 384, qlora") < kept


def test_training_changes_the_weights_and_adapters_only_theirs() -> None:
    model, pool = bench_model(TINY), Pool.of_lvis_shape(longest=256, samples=64, scale=24)
    trained = model.build(torch.device("cpu"), torch.float32)
    rows = {row.name: replace(row, compiled=False) for row in bench_rows(model)}
    for name, changes in (
        ("packed 512", "model.visual.blocks.0.mlp.linear_fc1.weight"),
        ("packed 512, lora", "lora_A"),
    ):
        if "lora" in name:
            trained = with_adapters(with_adapters(trained, "lora"), "lora")
        before = {key: value.clone() for key, value in trained.state_dict().items()}
        trainer = BenchTrainer(model, trained, rows[name], pool, QUICK)
        trainer.run()
        trainer.close()
        moved = {key for key, value in trained.state_dict().items() if not torch.equal(value, before[key])}
        assert any(changes in key for key in moved)
        assert "lora" not in name or all("lora_" in key for key in moved)
        assert all(parameter.grad is None for parameter in trained.parameters())


def test_adapters_are_those_of_training() -> None:
    """In the precision of the weights, as rows with masters are estimated, on the matrices of the decoder."""
    model = bench_model(TINY)
    rows = [row for row in bench_rows(model) if row.method == "lora"]
    assert rows
    for dtype in (torch.bfloat16, torch.float32):
        trained = with_adapters(model.build(torch.device("cpu"), dtype), "lora")
        learning = {name: weight for name, weight in trained.named_parameters() if weight.requires_grad}
        assert {weight.dtype for weight in learning.values()} == {dtype}
        assert all("lora_" in name and "language_model.layers" in name for name in learning)
        counted = count(model.shape, rows[0].setup(64))
        assert sum(weight.numel() for weight in learning.values()) == counted.adapters == counted.trainable
    assert all(row.setup(64).half_adapters for row in rows)


def test_too_little_memory_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(BenchTrainer, "run", full)
    result = bench_train(model=TINY, only=("padded, 2",), settings=QUICK)
    assert result["rows"][0] == {"name": BASELINE, "error": "out of memory"}
    assert all(row["error"] == "out of memory" for row in result["rows"])


def test_the_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(commands.train)
    out = tmp_path / "speed.json"
    arguments = ["--model", TINY, "--rows", "padded, 2", "--tokens", "300", "-w", "0", "--out", str(out), "--json"]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["rows"] == json.loads(out.read_text())["rows"] != []
    shown = CliRunner().invoke(app, arguments[:-1])
    assert "tiny on" in shown.stdout
    assert "padded" in shown.stdout


def test_unknown_models_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        bench_train(model="tiny2")
    assert bench.bench_model(TINY).name == TINY
