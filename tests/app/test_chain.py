"""measure -> plan -> train: what one stage was told, the next one uses; nothing is lost on the way."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Run
from made_runs_data import write_chats

from packtrain.app.measure import measure_outcome
from packtrain.app.plan import plan
from packtrain.app.train.prepare import prepare
from packtrain.app.train.resolve import resolve_run
from packtrain.config.data_section import DataSection
from packtrain.config.dataset_config import DatasetConfig
from packtrain.config.run_config import load_config
from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.measuring.table import CostTable

# What measuring can be told, with a value that is not the default, by the dataset that takes it.
LINES: dict[str, Any] = {
    "dataset_format": "jsonl",
    "media_root": ".",
    "schema": "messages",
    "columns": {"turns": "messages"},
    "strict_columns": True,
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
MIXTURE: dict[str, Any] = {"sources": ["few"], "formatting_func": "chain_formatting:to_chat"}
# What a config says about packs, delivery and evaluation beside that: `plan` keeps it, and `train` does it.
SAID: dict[str, Any] = {
    "packing_strategy": "first_fit",
    "effort": "best",
    "max_images_per_pack": 40,
    "max_patches_per_pack": 5_000,
    "max_vision_tokens_per_pack": 900,
    "max_videos_per_pack": 20,
    "max_frames_per_pack": 640,
    "max_samples_per_pack": 90,
    "max_attention_per_pack": 10**6,
    "pack_alignment": 8,
    "max_packs": 1_000,
    "cutoff_len": 50,
    "truncate_side": "left",
    "overlong": "truncate",
    "packing_window": 1_000,
    "packing_min_fill_ratio": 0.25,
    "packing_buffer": 77,
    "packing_drop_last": True,
    "repack_each_epoch": False,
    "shuffle": False,
    "balance": "strict",
    "cache_dir": "kept",
    "cache_bytes": 1 << 30,
    "cache_tokens": True,
    "workers": 1,
    "check": 3,
    "coord_tokens": False,
    "eval_path": "data.jsonl",
    "eval_packing": False,
    "max_eval_samples": 5,
    "streaming": True,
}
OF_RUN = ("eval_path", "eval_packing", "max_eval_samples", "streaming")  # and not of the dataset that is trained
ANOTHER = {  # settings that this cannot be said of, and why
    **dict.fromkeys(("split", "eval_split", "subset", "dataset_type"), "of datasets with parts, which a file is not"),
    **dict.fromkeys(("sources", "formatting_func"), "of a mixture, which has a test of its own"),
    **dict.fromkeys(("packing", "packing_length"), "what is recommended"),
    "dataset_path": "the data of the table, whatever the config says",
    **dict.fromkeys(("costs", "plan"), "found by themselves, also where they moved to"),
    "eval_size": "beside eval_path, which says it otherwise: it has a test of its own",
    "online": "of streams, which are not measured first",
    "pad_packs": "beside packing: false, which is not a run that is planned for",
}


def trained(config: Path, *overrides: str) -> tuple[DatasetConfig, Any]:
    """The dataset of a run of this config, and its numbers."""
    run = resolve_run(load_config(config), overrides=("training.use_cpu=true", *overrides))
    prepared = prepare(run)
    return prepared.run.data, prepared


def chain(
    folder: Path, data: Path, settings: dict[str, Any], config: str | None = None, length: int = 256
) -> tuple[CostTable, Path]:
    """A cost table, and the config that is recommended for it."""
    table = measure_outcome(data, model="tiny:qwen2_5_vl", out=folder / "costs", workers=1, check=0, **settings).table
    if config is not None:
        (folder / "mine.yaml").write_text(config, encoding="utf-8")
    given: dict[str, Any] = {"baseline": {"effective_batch_size": 8}}
    given = {"config": folder / "mine.yaml"} if config is not None else given
    made = plan(table, out=folder / "report", gpu="h100", lengths=(length,), **given)
    return table, made.files["recommended.yaml"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


def same_samples(table: CostTable, prepared: Any) -> None:
    """The very table is trained: its rows, its tokens, its labels."""
    assert prepared.dataset.plan.summary.cost_table == str(table.folder.resolve())
    assert any("cost table reused" in line for line in prepared.done), prepared.done
    numbers = prepared.numbers
    assert numbers.samples == len(table)
    assert numbers.supervised_tokens == table.column("supervised_tokens").sum()


def test_every_setting_is_known_here() -> None:
    """A new key of the data section is lost on the way, or has a value here that is not its default."""
    known = DataSection.known()
    assert set(known) == ({*LINES, *SAID} - {"seed"}) | set(ANOTHER)
    assert set(MIXTURE) <= set(ANOTHER)
    usual = {name for name, value in {**LINES, **SAID}.items() if name in known and known[name].default == value}
    assert usual == {"coord_tokens"}, "which has no other"


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


def test_a_mixture_with_a_formatting_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chats(tmp_path / "few.jsonl", 40)
    write_chats(tmp_path / "many.jsonl", 80, seed=1)
    (tmp_path / "chain_formatting.py").write_text("def to_chat(raw):\n    return raw['messages'][:2]\n")
    mixture = {"datasets": [{"path": "few.jsonl", "name": "few"}, {"path": "many.jsonl", "name": "many"}]}
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(mixture))
    table, recommended = chain(tmp_path, tmp_path / "mix.yaml", MIXTURE)
    assert len(table) == 40
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)  # the function is in a file of the folder where `measure` ran
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "chain_formatting")
    dataset, prepared = trained(recommended)
    function = f"{tmp_path / 'chain_formatting.py'}:to_chat"
    assert (dataset.sources, dataset.formatting_func) == (MIXTURE["sources"], function)
    same_samples(table, prepared)


def test_what_is_held_out_is_not_trained(tmp_path: Path) -> None:
    """`plan` counts the samples that `train` trains, and evaluation has the others."""
    data = write_chats(tmp_path / "data.jsonl", 100)
    table, recommended = chain(tmp_path, data, {"eval_size": 0.25, "max_samples": 80, "seed": 3})
    assert len(table) == 60
    dataset, prepared = trained(recommended)
    assert (dataset.eval_size, dataset.seed) == (0.25, 3)
    same_samples(table, prepared)
    evaluated = CostTable.load(prepared.evaluation.plan.summary.cost_table)
    assert not {*table.column("id").tolist()} & {*evaluated.column("id").tolist()}
    numbers = prepared.numbers
    assert (numbers.held_out, numbers.evaluation_samples, numbers.not_drawn, numbers.left_out) == (20, 20, 20, 0)
    for said, words in (
        ("training: {seed: 4}", "training.seed: 4, records were drawn with 3"),
        ("data: {eval_size: 0.5}", "data.eval_size: 0.5, measured with 0.25"),
    ):
        (tmp_path / "other.yaml").write_text(said)
        with pytest.raises(ConfigError, match=words):
            plan(table, config=tmp_path / "other.yaml", out=tmp_path / "no", gpu="h100", lengths=(256,))


def test_all_that_the_config_says_is_recommended(tmp_path: Path) -> None:
    """Only what is recommended changes; each changed line has the value that it had."""
    data = write_chats(tmp_path / "data.jsonl", 120)
    mine = {
        "model": {"method": "lora", "lora_alpha": 7.0, "lora_dropout": 0.1, "lora_target_modules": ["q_proj"]},
        "data": {
            **{"eval_path": str(data), "max_eval_samples": 5, "overlong": "truncate", "packing_length": 64},
            **{"balance": "strict", "max_images_per_pack": 3},
        },
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
    # Larger batches are recommended, since packs are so short, and packs have an order and limits of their own.
    kept -= {("training", "per_device_train_batch_size"), ("data", "balance"), ("data", "max_images_per_pack")}
    grouped = resolve_run(load_config(recommended), overrides=("training.group_by_length=true",))
    assert (grouped.mode, grouped.data.order) == ("padded", "length")
    assert {place for place in kept if found[place[0]].get(place[1]) != mine[place[0]][place[1]]} == set()
    assert found["training"]["effective_batch_size"] == 80, "two rows in each of forty passes"
    text = recommended.read_text()
    assert "# was 64: " in text
    assert "gradient_accumulation_steps 40" in text


def test_all_of_the_data_section_is_recommended_and_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.loads(line) for line in write_chats(tmp_path / "chats.jsonl", 120).read_text().splitlines()]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"turns": one["messages"]}) + "\n" for one in lines))
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    said = {name: value for name, value in LINES.items() if name != "seed"} | SAID
    mine = {"data": said, "training": {"seed": LINES["seed"], "effective_batch_size": 42}}
    _, recommended = chain(tmp_path, data, LINES, yaml.safe_dump(mine), length=2048)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = load_config(recommended)
    places = {*PLACES, "eval_path", "cache_dir"}
    assert {name for name, value in said.items() if found.data.given().get(name) != value} <= places
    assert {name: found.data.given()[name] for name in sorted(places)} == {
        name: str((tmp_path / said[name]).resolve()) for name in sorted(places)
    }
    run = resolve_run(found)
    assert run.data.packing, "not the padded run, which does not need all of it"
    own = {name for name in said if name not in (*places, *OF_RUN)}
    assert {name for name in own if getattr(run.data, name) != said[name]} == set()
    assert run.evaluation is not None
    assert (run.evaluation.packing, run.evaluation.max_samples) == (False, 5)


def test_filters_of_the_config_act_in_plan_and_train_alike(tmp_path: Path) -> None:
    data = write_chats(tmp_path / "data.jsonl", 120)
    whole, _ = chain(tmp_path / "whole", data, {})
    most = int(sorted(whole.column("tokens"))[60])
    said = f"data: {{max_sample_length: {most}, coord_tokens: {{enabled: false, other: 1}}}}\n"  # off, as others say it
    table, recommended = chain(tmp_path, data, {}, said)
    kept = int((table.column("tokens") <= most).sum())
    study = json.loads((tmp_path / "report" / "packing_simulations.json").read_text())["simulations"]
    assert {one["samples_packed"] for one in study} == {kept}
    assert trained(recommended)[1].numbers.samples == kept < len(table)


def test_what_the_table_cannot_follow_is_refused(tmp_path: Path) -> None:
    data = write_chats(tmp_path / "data.jsonl", 30)
    with pytest.raises(ConfigError, match=r"data\.online: true, for streams"):
        chain(tmp_path, data, {}, "data: {online: true}\n")
    with pytest.raises(ConfigError, match=r"data\.loss_on: 'all', measured with None"):
        chain(tmp_path, data, {}, "data: {loss_on: all, max_samples: 3}\n")


class TestCostsAndPlan:
    """`data.costs` and `data.plan` name what was made; it is used, or refused with what differs."""

    def test_they_are_used(self, tmp_path: Path, run: Run) -> None:
        data = write_chats(tmp_path / "data.jsonl", 60)
        table, _ = chain(tmp_path, data, {"max_failure_rate": 0.5})
        assert run("pack", tmp_path / "costs", "-n", 192, "--epochs", 2, "--no-shuffle", "-o", "plan")[0] == 0
        (tmp_path / "run.yaml").write_text(f"model: tiny:qwen2_5_vl\ndata: {{dataset_path: {data}}}\n")
        named = (f"data.costs={tmp_path / 'costs'}", f"data.plan={tmp_path / 'plan'}", "training.num_train_epochs=2")
        _, prepared = trained(tmp_path / "run.yaml", *named, f"data.cache_dir={tmp_path / 'another'}")
        same_samples(table, prepared)
        assert CostTable.load(tmp_path / "costs").user_config == table.user_config, (
            "what measure was told, whoever uses it"
        )
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
