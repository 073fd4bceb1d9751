"""Chat templates that write the date of today: one date for a run, whenever it is measured, encoded or resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Run
from made_runs_data import write_chats, write_config
from test_moved_runs import known_by, losses, stop_at
from tokenizers import Tokenizer

from packtrain.app.datasets import MultiModalDataset
from packtrain.app.measure import measure_outcome
from packtrain.app.train.prepare import Prepared, prepare
from packtrain.app.train.resolve import resolve_run, resolved_sections, with_template_date
from packtrain.app.train.resume import require_same
from packtrain.config.dataset_config import DatasetConfig
from packtrain.config.run_config import load_config
from packtrain.core.errors import ArtifactError, ConfigError, DataError
from packtrain.core.values import Message, Record, Text
from packtrain.delivery.encode.encode import SampleEncoder
from packtrain.delivery.encode.encoded_sample import PackKey
from packtrain.delivery.encode.processor import RealProcessor
from packtrain.delivery.encode.token_cache import TokenTable
from packtrain.delivery.online_source import OnlineSource
from packtrain.families import tiny
from packtrain.families.chat_template import ChatTemplate, with_date
from packtrain.families.settings import read_settings
from packtrain.measuring.request import Request, measure_inputs
from packtrain.modeling.export import _put_template as put_template
from packtrain.modeling.load import build_model
from packtrain.packing.packing_config import PackingConfig
from packtrain.records.media import MediaStore
from packtrain.records.open import open_sources

ONE_DAY, NEXT_DAY, LONG_AGO = "2026-09-30", "2026-10-01", "2001-02-03"
# As text, and as a number of words: another day has another number of tokens.
ASKING = "{{- 'Today is ' + strftime_now('%A %d %B %Y, %H:%M, 100%%') + '.' + ' day' * (strftime_now('%d') | int) }}"
Clock = Callable[[str], None]


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets the clock of this process, a minute before midnight."""

    def set_to(day: str) -> None:
        moment = datetime.fromisoformat(f"{day}T23:59:00")
        monkeypatch.setattr("packtrain.families.chat_template.now", lambda: moment)

    return set_to


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def dated_model(folder: Path, family: str = "llama", *, weights: bool = False) -> Path:
    """A tiny model whose template writes the date."""
    model = tiny.write(family, folder / "model")
    template = model / "chat_template.jinja"
    template.write_text(ASKING + template.read_text())
    if weights:
        build_model(model).save_pretrained(model)
    return model


def dated_config(folder: Path, *, weights: bool = False, **training: Any) -> Path:
    path = write_config(folder, **training)
    content = yaml.safe_load(path.read_text())
    content["model"]["model_name_or_path"] = str(dated_model(folder, weights=weights))
    path.write_text(yaml.safe_dump(content))
    return path


def prepared(config: Path, *overrides: str) -> Prepared:
    run = resolve_run(load_config(config), overrides=("data.cache_tokens=true", *overrides))
    return prepare(with_template_date(run))


def texts(dataset: MultiModalDataset) -> list[str]:
    """The samples of the first pack, as the model gets them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(dataset.config.model_name) / "tokenizer.json"))
    return [tokenizer.decode(sample.input_ids.tolist(), skip_special_tokens=False) for sample in dataset[0].samples]


# ---- the template


def test_a_template_writes_midnight_of_its_date(day: Clock) -> None:
    day(NEXT_DAY)
    source = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"
    assert ChatTemplate(source, {}, ONE_DAY).render([]).text == f"{ONE_DAY} 00:00:00"
    assert ChatTemplate(source, {}).render([]).text == f"{NEXT_DAY} 23:59:00"


@pytest.mark.contract
@pytest.mark.parametrize("source", ["  {% if true %}\n", "\n", "{# said #}\n x", "{%- set a = 1 %} ", ""])
def test_transformers_renders_the_same_date(source: str) -> None:
    """White space before the template's own text stays as it is."""
    from transformers.utils.chat_template_utils import render_jinja_template

    ending = "{% endif %}" if "{% if" in source else ""
    forms = "%d %b %Y|%-d %B|%A, %H:%M|%%d %%|%j|%q"
    source += f"{{% macro day(f) %}}{{{{ strftime_now(f) }}}}{{% endmacro %}}{{{{ day('{forms}') }}}}\n{ending}"
    for date in (ONE_DAY, LONG_AGO):
        (found,), _ = render_jinja_template(conversations=[[]], chat_template=with_date(source, date))
        assert found == ChatTemplate(source, {}, date).render([]).text
        assert date[:4] in found


@pytest.mark.contract
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_the_real_processor_is_compared_on_the_same_date(home: Path, family: str) -> None:
    request = Request(specs=(), model=str(dated_model(home, family)), template_date=LONG_AGO)
    turns = (Message(role="user", parts=(Text("why"),)), Message(role="assistant", parts=(Text("so"),)))
    record, store = Record(id="r", origin="r", source="s", messages=turns), MediaStore(str(home))
    real = RealProcessor(request, request.settings()).outputs(record, store)["input_ids"]
    assert real == SampleEncoder(request).encode(record, store).input_ids.tolist()


# ---- what is known by a date


def test_a_run_with_a_date_is_the_same_on_another_day(home: Path, day: Clock) -> None:
    config = dated_config(home, max_steps=3)
    day(ONE_DAY)
    first = prepared(config)
    kept = home / "kept.yaml"
    kept.write_text(yaml.safe_dump(resolved_sections(first.run, packing_length=192)))
    assert load_config(kept).data.template_date == ONE_DAY
    assert any(f"template_date {ONE_DAY}" in note for note in first.run.notes), first.run.notes
    evaluated = resolve_run(load_config(config), overrides=[f"data.eval_path={home / 'train.jsonl'}"])
    assert with_template_date(evaluated).evaluation.template_date == ONE_DAY  # type: ignore[union-attr]
    day(NEXT_DAY)
    again = prepared(kept)
    assert known_by(again) == known_by(first)
    assert all("reused" in line for line in again.done), again.done
    assert all(text.count("Wednesday 30 September 2026, 00:00, 100%.") == 1 for text in texts(again.dataset))


def test_a_run_without_one_has_the_day_of_its_start(home: Path, day: Clock) -> None:
    config, found = dated_config(home, max_steps=3), {}
    for today in (ONE_DAY, NEXT_DAY):
        day(today)
        run = prepared(config)
        assert any(f"template_date {today}" in note for note in run.run.notes)
        found[today] = known_by(run)
    assert all(found[ONE_DAY][name] != found[NEXT_DAY][name] for name in ("table", "plan", "tokens"))


def test_a_table_of_another_day_is_measured_again_for_its_date(home: Path, day: Clock) -> None:
    data, model = write_chats(home / "data.jsonl", 5), str(dated_model(home))

    def measure(**options: Any) -> Any:
        return measure_outcome(data, model=model, out=home / "out", check=0, **options)

    day(ONE_DAY)
    before = measure().table
    tokens = before.column("tokens")
    others = measure_outcome(data, model=model, out=home / "others", check=0, workers=2).table
    assert (others.column("tokens") == tokens).all(), "processes have the real clock"
    day(NEXT_DAY)
    assert before.request().template_date == ONE_DAY
    assert before.user_config["data"]["template_date"] == ONE_DAY, "a config that is planned on it follows it"
    assert measure(template_date=ONE_DAY).reused
    again = measure()
    assert (again.reused, again.changed) == (False, [f"request.template_date: {ONE_DAY} -> {NEXT_DAY}"])
    assert (again.table.column("tokens") < tokens).all(), "the other day has fewer words"


def test_other_templates_are_known_by_no_date(home: Path, day: Clock) -> None:
    data, model = write_chats(home / "data.jsonl", 5), str(tiny.write("llama", home / "plain"))
    request = Request(specs=tuple(open_sources(str(data))), model=model)
    day(ONE_DAY)
    inputs = measure_inputs(request)
    assert (inputs["date"], "template_date" in inputs["request"]) == (None, False)
    day(NEXT_DAY)
    assert (
        measure_inputs(request)
        == measure_inputs(Request(specs=request.specs, model=model, template_date=LONG_AGO))
        == inputs
    )
    config = write_config(home)
    plain = with_template_date(resolve_run(load_config(config)))
    given = with_template_date(resolve_run(load_config(config), overrides=[f"data.template_date={LONG_AGO}"]))
    assert (given.config.data, given.data) == (plain.config.data, plain.data)
    assert [note for note in given.notes if note not in plain.notes] == [
        f"data.template_date {LONG_AGO} changes nothing: the model's chat template has no date"
    ]


# ---- wherever it is rendered


@pytest.mark.full
def test_processes_render_the_date_of_the_run(home: Path) -> None:
    """They have clocks of their own, which nobody has set."""
    dataset = MultiModalDataset(
        DatasetConfig(
            dataset_path=str(write_chats(home / "data.jsonl", 12)),
            model=str(dated_model(home)),
            packing_length=192,
            cache_tokens=True,
            workers=2,
            check=0,
            template_date=LONG_AGO,
        )
    )
    dataset.build()
    assert isinstance(dataset.tokens, TokenTable)
    kept = texts(dataset)
    dataset.encoder.cached = None
    assert kept == texts(dataset)
    assert all("Saturday 03 February 2001, 00:00" in text for text in kept)
    batches = [
        next(iter(dataset.loader(num_workers=workers, **more)))
        for workers, more in ((0, {}), (1, {"multiprocessing_context": "forkserver"}))
    ]
    assert batches[0]["input_ids"].tolist() == batches[1]["input_ids"].tolist()


def test_a_stream_goes_on_with_its_date(home: Path, day: Clock) -> None:
    specs = tuple(open_sources(str(write_chats(home / "data.jsonl", 12))))
    request, config = Request(specs=specs, model=str(dated_model(home))), PackingConfig(packing_length=192)
    day(ONE_DAY)
    before = OnlineSource(request, config, num_packs=9)
    state = json.loads(json.dumps(before[PackKey(epoch=0, pack=0)].stream))
    day(NEXT_DAY)
    with pytest.raises(ArtifactError, match=f"template_date: {ONE_DAY}"):
        OnlineSource(request, config, num_packs=9).load_state_dict(state)
    again = OnlineSource(Request(specs=specs, model=request.model, template_date=ONE_DAY), config, num_packs=9)
    again.load_state_dict(state)
    ids = [[sample.input_ids.tolist() for sample in one[PackKey(epoch=0, pack=1)].samples] for one in (before, again)]
    assert ids[0] == ids[1]


@pytest.mark.full
def test_a_run_of_yesterday_goes_on(home: Path, run: Run, monkeypatch: pytest.MonkeyPatch, day: Clock) -> None:
    config = dated_config(home, weights=True, max_steps=6)
    day(ONE_DAY)
    whole = home / "whole"
    assert run("train", config, f"training.output_dir={whole}")[0] == 0
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        assert run("train", config)[0] == 130
    day(NEXT_DAY)
    for resumed in (config, home / "out" / "run.yaml"):  # complete, the second does nothing more
        code, _, err = run("train", resumed, "--resume", "--json")
        assert code == 0, err
    assert losses(home / "out") == losses(whole)
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in (home / "out", whole)]
    assert weights[0] == weights[1]
    assert yaml.safe_load((home / "out" / "run.yaml").read_text())["data"]["template_date"] == ONE_DAY
    options = (f"data.template_date={NEXT_DAY}", "training.max_steps=7")
    code, _, err = run("train", config, *options, "--resume")
    assert (code, f"template_date: {ONE_DAY} -> {NEXT_DAY}" in err) == (1, True), err


# ---- what is refused


@pytest.mark.parametrize("wrong", ["2026-02-30", "20260131", "31.01.2026", "today", "2026-01-31T10:00:00", "7"])
def test_a_bad_date_is_refused(home: Path, run: Run, wrong: str) -> None:
    config = write_config(home)
    with pytest.raises(ConfigError, match=r"data\.template_date.* instead of a day as YYYY-MM-DD"):
        load_config(config, [f"data.template_date={wrong}"])
    with pytest.raises(ConfigError, match=r"template_date: .* a day as YYYY-MM-DD"):
        DatasetConfig(dataset_path="data", model="tiny:llama", template_date=wrong)
    measure = ("measure", home / "train.jsonl", "-m", "tiny:llama", "-o", home / "costs", "--template-date", wrong)
    code, _, err = run(*measure)
    assert (code, "YYYY-MM-DD" in err) == (2, True), err


def test_an_unused_date_is_noted(home: Path, run: Run) -> None:
    write_config(home)
    measure = ("measure", home / "train.jsonl", "-m", "tiny:llama", "-o", home / "costs", "-w", 1, "--check", 0)
    code, out, err = run(*measure, "--template-date", LONG_AGO, "--json")
    assert (code, json.loads(out)["notes"]) == (
        0,
        [f"template_date {LONG_AGO} changes nothing: the model's chat template has no date"],
    ), err


def test_processes_of_two_days_are_told_so() -> None:
    with pytest.raises(DataError, match=r"set data\.template_date") as raised:
        require_same([{"template_date": ONE_DAY, "schedule": "a"}, {"template_date": NEXT_DAY, "schedule": "b"}])
    assert f"template_date {NEXT_DAY} instead of {ONE_DAY}" in str(raised.value)


MINE = (
    "{% for m in messages %}@{{ m.role }}: {% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}@assistant: {% endif %}"
)


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_a_template_of_ones_own(home: Path, family: str) -> None:
    """Measured, compared with the processor, encoded and known by its content; the model needs none."""
    model = tiny.write(family, home / "model")
    (model / "chat_template.jinja").unlink()
    template, data = home / "mine.jinja", write_chats(home / "data.jsonl", 6)
    template.write_text(MINE)
    settings: dict[str, Any] = {"model": str(model), "out": home / "costs", "workers": 1}
    outcome = measure_outcome(data, chat_template=str(template), check=3, **settings)
    table = outcome.table
    assert (len(table), table.summary.check.records) == (6, 3)
    config = DatasetConfig(dataset_path=str(data), model=str(model), chat_template=str(template), packing_length=512)
    dataset = MultiModalDataset(config)
    dataset.build()
    sample = dataset[0].samples[0]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    written = tokenizer.decode(sample.input_ids.tolist(), skip_special_tokens=False)
    assert "@user: " in written
    assert "@assistant: " in written
    template.write_text(MINE.replace("@", "#"))
    again = measure_outcome(data, chat_template=str(template), check=0, **settings)
    assert any("chat_template" in change for change in again.changed)


def test_what_is_no_template(home: Path) -> None:
    data, settings = write_chats(home / "data.jsonl", 2), {"model": "tiny:llama", "out": home / "costs"}
    for name in ("nowhere.jinja", "empty.jinja"):
        (home / "empty.jinja").write_text(" ")
        with pytest.raises(ConfigError, match=rf"chat_template.*{name}|{name}"):
            measure_outcome(data, chat_template=str(home / name), **settings)


def test_the_template_that_was_trained_with_is_saved(home: Path) -> None:
    folder = tiny.write("qwen2_5_vl", home / "final")
    for name in ("processor_config.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "the model's"}))
    (folder / "chat_template.json").write_text('{"chat_template": "the model\'s"}')
    put_template(folder, MINE)
    assert read_settings(folder).chat_template == MINE
