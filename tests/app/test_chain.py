"""measure -> plan -> train: what one stage was told, the next one uses; nothing is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Run
from made_runs_data import write_chats

from packtrain.app.config.load import load_config
from packtrain.app.config.sections import DatasetSection
from packtrain.app.datasets.config import DatasetConfig
from packtrain.app.measure import measure_outcome
from packtrain.app.plan import plan
from packtrain.app.train.prepare import prepare
from packtrain.app.train.settings import resolve_run
from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.costs.table import CostTable

# What measuring can be told, with a value that is not the default, by the dataset that takes it.
LINES: dict[str, Any] = {
    "dataset_format": "jsonl",
    "media_root": ".",
    "schema": "messages",
    "columns": {"turns": "messages"},
    "object_ordering": "as_is",
    "emit_norm": "norm100",
    "object_template": "{{ objects | length }}",
    "object_prompt": "",
    "loss_on": "all",
    "add_eos": True,
    "template_date": "2026-01-31",
    "chat_template": "mine.jinja",
    "processor_config": {"max_pixels": 50_176, "fps": 1.5},
    "max_samples": 90,
    "min_seconds": 1.0,
    "max_seconds": 60.0,
    "max_images_per_sample": 3,
    "max_sample_length": 60,
    "allow_outside_root": True,
    "max_image_pixels": 10_000_000,
    "on_error": "fail",
    "max_failure_rate": 0.5,
    "content_hash": True,
    "seed": 3,
}
PLACES = ("media_root", "chat_template")  # called by their places from then on
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MIXTURE: dict[str, Any] = {"sources": ["few"], "formatting": "chain_formatting:to_chat"}
PARTS: dict[str, Any] = {"split": "held", "dataset_type": "vision", "subset": None}  # of a dataset of Hugging Face
# Of packs and delivery, or how measuring is done: no cost follows from it.
ELSEWHERE = {
    *("costs", "plan", "dataset_path", "coord_tokens", "check", "workers", "packing", "shuffle", "balance", "effort"),
    *("pad_packs", "cache_dir", "cache_bytes", "cache_tokens", "overlong", "repack_each_epoch"),
    *("cutoff_len", "truncate_side"),
}


def trained(config: Path, *overrides: str) -> tuple[DatasetConfig, Any]:
    """The dataset of a run of this config, and its numbers."""
    run = resolve_run(load_config(config), overrides=("training.use_cpu=true", *overrides))
    prepared = prepare(run)
    return prepared.run.data, prepared


def chain(folder: Path, data: Path, settings: dict[str, Any], config: str | None = None) -> tuple[CostTable, Path]:
    """A cost table, and the config that is recommended for it."""
    table = measure_outcome(data, model="tiny:qwen2_5_vl", out=folder / "costs", workers=1, check=0, **settings).table
    if config is not None:
        (folder / "mine.yaml").write_text(config, encoding="utf-8")
    given: dict[str, Any] = {"baseline": {"effective_batch_size": 8}}
    given = {"config": folder / "mine.yaml"} if config is not None else given
    made = plan(table, out=folder / "report", gpu="h100", lengths=(256,), **given)
    return table, made.files["recommended.yaml"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


def same_samples(table: CostTable, prepared: Any) -> None:
    """The very table is trained: its rows, its tokens, its labels."""
    assert prepared.dataset.plan.summary["cost_table"] == str(table.folder.resolve())
    assert any("cost table reused" in line for line in prepared.done), prepared.done
    numbers = prepared.numbers
    assert numbers.samples == len(table)
    assert numbers.supervised_tokens == table.column("supervised_tokens").sum()


def test_every_setting_of_measuring_is_known_here() -> None:
    packing = {name for name in DatasetSection.known() if name.startswith("packing_") or name.endswith("_per_pack")}
    assert set(DatasetSection.known()) == ({*LINES, *MIXTURE, *PARTS} - {"seed"}) | ELSEWHERE | packing


def test_all_that_measure_was_told_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.loads(line) for line in write_chats(tmp_path / "chats.jsonl", 120).read_text().splitlines()]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"turns": one["messages"]}) + "\n" for one in lines))
    (tmp_path / "mine.jinja").write_text("{{ strftime_now('%d') }}" + TEMPLATE)
    table, recommended = chain(tmp_path, data, LINES)
    assert 0 < len(table) < 90, "drawn and filtered"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    dataset, prepared = trained(recommended)
    lost = {name: value for name, value in LINES.items() if getattr(dataset, name) != value and name not in PLACES}
    assert not lost
    assert (dataset.media_root, dataset.chat_template) == (str(tmp_path), str(tmp_path / "mine.jinja"))
    same_samples(table, prepared)


def test_a_mixture_with_a_formatting_function(tmp_path: Path) -> None:
    write_chats(tmp_path / "few.jsonl", 40)
    write_chats(tmp_path / "many.jsonl", 80, seed=1)
    (tmp_path / "chain_formatting.py").write_text("def to_chat(raw):\n    return raw['messages'][:2]\n")
    mixture = {"datasets": [{"path": "few.jsonl", "name": "few"}, {"path": "many.jsonl", "name": "many"}]}
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(mixture))
    table, recommended = chain(tmp_path, tmp_path / "mix.yaml", MIXTURE)
    assert len(table) == 40
    dataset, prepared = trained(recommended)
    assert (dataset.sources, dataset.formatting) == (MIXTURE["sources"], MIXTURE["formatting"])
    same_samples(table, prepared)


def test_all_that_the_config_says_is_recommended(tmp_path: Path) -> None:
    """Only what is recommended changes; each changed line has the value that it had."""
    data = write_chats(tmp_path / "data.jsonl", 120)
    mine = {
        "model": {"method": "lora", "lora_alpha": 7.0, "lora_dropout": 0.1, "lora_target_modules": ["q_proj"]},
        "data": {"eval_path": str(data), "max_eval_samples": 5, "overlong": "truncate", "packing_length": 64},
        "training": {
            **{"learning_rate": 1e-4, "lr_scheduler_type": "cosine", "weight_decay": 0.1, "warmup_ratio": 0.03},
            **{"max_grad_norm": 0.5, "save_total_limit": 3, "report_to": "none", "output_dir": "somewhere"},
            **{"run_name": "mine", "optim": "adamw_torch", "seed": 5, "per_device_train_batch_size": 2},
            **{"gradient_accumulation_steps": 40, "logging_steps": 5, "dataloader_num_workers": 1},
        },
        "report": {"title": "Mine"},
    }
    secret = {"training": {**mine["training"], "hub_token": "hf_SECRET"}, "report": {"title": "http://u:SECRET@host/x"}}
    _, recommended = chain(tmp_path, data, {}, yaml.safe_dump({**mine, **secret}))
    leaked = [path.name for path in recommended.parent.rglob("*") if path.is_file() and b"SECRET" in path.read_bytes()]
    assert leaked == [], "a report is made to be passed on"
    mine["report"]["title"] = "http://host/x"
    found = load_config(recommended).sections()
    kept = {(section, name) for section in mine for name in mine[section]}
    kept -= {("data", "packing_length"), ("training", "gradient_accumulation_steps")}
    kept -= {("training", "per_device_train_batch_size")}  # larger batches are recommended, since packs are so short
    assert {place for place in kept if found[place[0]].get(place[1]) != mine[place[0]][place[1]]} == set()
    assert found["training"]["effective_batch_size"] == 80, "two rows in each of forty passes"
    text = recommended.read_text()
    assert "# was 64: " in text
    assert "gradient_accumulation_steps 40" in text


def test_filters_of_the_config_act_in_plan_and_train_alike(tmp_path: Path) -> None:
    data = write_chats(tmp_path / "data.jsonl", 120)
    whole, _ = chain(tmp_path / "whole", data, {})
    most = int(sorted(whole.column("tokens"))[60])
    table, recommended = chain(tmp_path, data, {}, f"data: {{max_sample_length: {most}}}\n")
    kept = int((table.column("tokens") <= most).sum())
    study = json.loads((tmp_path / "report" / "packing_simulations.json").read_text())["simulations"]
    assert {one["samples_packed"] for one in study} == {kept}
    assert trained(recommended)[1].numbers.samples == kept < len(table)


def test_what_the_table_cannot_follow_is_refused(tmp_path: Path) -> None:
    data = write_chats(tmp_path / "data.jsonl", 30)
    with pytest.raises(ConfigError, match=r"data\.loss_on: 'all', measured with None"):
        chain(tmp_path, data, {}, "data: {loss_on: all, max_samples: 3}\n")


class TestCostsAndPlan:
    """`data.costs` and `data.plan` name what was made; it is used, or refused with what differs."""

    def test_they_are_used(self, tmp_path: Path, run: Run) -> None:
        data = write_chats(tmp_path / "data.jsonl", 60)
        table, _ = chain(tmp_path, data, {})
        assert run("pack", tmp_path / "costs", "-n", 192, "--epochs", 2, "--no-shuffle", "-o", "plan")[0] == 0
        (tmp_path / "run.yaml").write_text(f"model: tiny:qwen2_5_vl\ndata: {{dataset_path: {data}}}\n")
        named = (f"data.costs={tmp_path / 'costs'}", f"data.plan={tmp_path / 'plan'}", "training.num_train_epochs=2")
        _, prepared = trained(tmp_path / "run.yaml", *named, f"data.cache_dir={tmp_path / 'another'}")
        same_samples(table, prepared)
        assert prepared.numbers.packing_length == 192
        assert Path(str(prepared.dataset.plan.folder)) == tmp_path / "plan"
        for asked, words in (
            (("data.packing_length=128",), "packing_length: 192 -> 128"),
            (("training.num_train_epochs=3",), "epochs: 2 -> 3"),
            (("data.shuffle=true",), "shuffle: False -> True"),  # what is the default otherwise, but was said
            (("data.packing_drop_last=true",), "packing_drop_last: False -> True"),
            ((f"data.costs={data}",), f"data.costs {data}\n.*no complete cost table"),
            (("data.loss_on=all",), "request.loss_on"),
        ):
            with pytest.raises(ArtifactError, match=words):
                trained(tmp_path / "run.yaml", *named[:2], *asked)

    def test_they_are_found(self, tmp_path: Path, run: Run) -> None:
        """By the cache, which remembers where they were made; data that changed are measured into the cache."""
        data = write_chats(tmp_path / "data.jsonl", 60)
        table, _ = chain(tmp_path, data, {})
        assert run("pack", tmp_path / "costs", "-n", 192, "-o", tmp_path / "plan")[0] == 0
        (tmp_path / "run.yaml").write_text(
            f"model: tiny:qwen2_5_vl\ndata: {{dataset_path: {data}, packing_length: 192}}\ntraining: {{seed: 0}}\n"
        )
        _, prepared = trained(tmp_path / "run.yaml", "training.packs_per_step=1")
        same_samples(table, prepared)
        assert Path(str(prepared.dataset.plan.folder)) == tmp_path / "plan"
        before = (tmp_path / "costs" / "measure.json").read_bytes()
        write_chats(data, 70)
        _, prepared = trained(tmp_path / "run.yaml", "training.packs_per_step=1")
        assert prepared.numbers.samples == 70
        assert (tmp_path / "costs" / "measure.json").read_bytes() == before, "the user's folder is left alone"
