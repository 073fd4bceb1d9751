"""What a measurement must not do with odd data: stop, lose, repeat itself, or hold everything at once."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import packtrain
from packtrain.app.measure import measure_outcome
from packtrain.cli.measure import show_measured
from packtrain.cli.terminal import Terminal
from packtrain.core.errors import RecordError
from packtrain.core.values import LedgerEntry, MediaRef
from packtrain.families.tiny import write
from packtrain.families.tokenizer import LightTokenizer
from packtrain.measuring.measure_summary import DriftCheck
from packtrain.measuring.measurer import Measurer, _characters
from packtrain.measuring.request import Filters, Request
from packtrain.measuring.work import work_items
from packtrain.records.open import iter_units, open_sources, read_unit
from packtrain.records.source import Entry


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


def lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}], **more}


def test_a_medium_damaged_where_no_header_shows_it_does_not_end_the_check(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for number in range(4):
        Image.effect_noise((64, 48), 50 + number).convert("RGB").save(tmp_path / f"{number}.png")
    whole = bytearray((tmp_path / "0.png").read_bytes())
    whole[200:260] = bytes(60)
    (tmp_path / "0.png").write_bytes(whole)
    data = lines(tmp_path / "d.jsonl", *(chat("<image>what?", images=[f"{n}.png"]) for n in range(4)))
    said: list[int] = []
    outcome = measure_outcome(
        data, model="tiny:qwen2_5_vl", out=tmp_path / "o", workers=1, progress=lambda now: said.append(now.checking)
    )
    assert said[-2:] == [0, 4], "what is done after the last record"
    assert outcome.table.summary.check == DriftCheck(records=3, note="1 more could not be decoded")
    page = io.StringIO()
    show_measured(outcome, Terminal(file=page, width=200))
    assert "3 random records match the real processor exactly (1 more could not be decoded)" in page.getvalue()


def test_entries_of_a_source_that_is_not_wanted_are_never_failures(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", *(chat(f"a{n}") for n in range(8)))
    lines(tmp_path / "b.jsonl", *["{broken\n"] * 20)
    (tmp_path / "mix.yaml").write_text("datasets: [{path: a.jsonl}, {path: b.jsonl}]")
    options: dict[str, Any] = {"model": "tiny:llama", "workers": 1, "check": 0, "sources": ["a"]}
    table = packtrain.measure(tmp_path / "mix.yaml", out=tmp_path / "o", **options)
    assert (len(table), table.summary.counts.failed, table.summary.counts.filtered) == (8, 0, 20)
    drawn = packtrain.measure(tmp_path / "mix.yaml", out=tmp_path / "p", max_samples=5, **options)
    assert len(drawn) == 5, "the sample is drawn from the sources that are wanted"


def test_shares_of_a_mixture_change_nothing_that_was_measured(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", chat("one"), chat("two"))
    mixture = tmp_path / "mix.yaml"
    reused = []
    for weight in (0.5, 0.6):
        mixture.write_text(f"datasets: [{{path: a.jsonl, weight: {weight}}}]")
        outcome = measure_outcome(mixture, model="tiny:llama", out=tmp_path / "o", workers=1, check=0)
        reused.append(outcome.reused)
        assert outcome.table.summary.mixture == {"a": {"repeats": None, "weight": weight}}
    assert reused == [False, True]


def test_every_setting_of_the_model_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """nanoVLM keeps its processor's settings at the top of config.json."""
    model = write("nanovlm", tmp_path / "m")
    Image.new("RGB", (640, 480)).save(tmp_path / "a.png")
    data = lines(tmp_path / "d.jsonl", chat("<image>what?", images=["a.png"]))
    before = packtrain.measure(data, model=str(model), out=tmp_path / "o", workers=1, check=0).column("tokens")[0]
    config = json.loads((model / "config.json").read_text())
    config["mp_image_token_length"] *= 2
    (model / "config.json").write_text(json.dumps(config))
    outcome = measure_outcome(data, model=str(model), out=tmp_path / "o", workers=1, check=0)
    assert not outcome.reused
    assert outcome.table.column("tokens")[0] > before * 1.5


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """Workers must not run the user's script again."""
    data = lines(tmp_path / "d.jsonl", *(chat(str(n)) for n in range(20)))
    packtrain.measure(data, model="tiny:llama", out=tmp_path / "here", workers=1, check=0)  # keeps the model's config
    script = tmp_path / "script.py"
    script.write_text(
        "import packtrain\nprint('once')\n"
        f"options = dict(model='tiny:llama', out={str(tmp_path / 'o')!r}, workers=2, check=0)\n"
        f"table = packtrain.measure({str(data)!r}, **options)\n"
        "print(len(table))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["once", "20"]


def test_results_inside_the_data_folder_are_not_data(tmp_path: Path) -> None:
    lines(tmp_path / "data" / "a.jsonl", chat("one"), "{broken\n", *(chat(str(n)) for n in range(30)))
    for _ in range(2):
        table = packtrain.measure(
            tmp_path / "data", model="tiny:llama", out=tmp_path / "data" / "costs", workers=1, check=0
        )
        assert table.summary.counts.entries == 32


def test_a_file_that_ends_early_is_said_to_lose_more(tmp_path: Path) -> None:
    records = json.dumps([chat(str(n)) for n in range(100)])
    (tmp_path / "d.json").write_text(records[: len(records) // 2])
    table = packtrain.measure(tmp_path / "d.json", model="tiny:llama", out=tmp_path / "o", workers=1, check=0)
    assert table.summary.counts.cut_short == 1
    assert 40 < len(table) < 60


def test_compressed_members_of_a_mixture_are_not_held(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", chat("plain"))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as stream:
        stream.writelines(json.dumps(chat("x" * 1000)) + "\n" for _ in range(6000))
    (tmp_path / "mix.yaml").write_text("datasets: [{path: a.jsonl}, {path: b.jsonl.gz}]")
    request = Request(specs=tuple(open_sources(str(tmp_path / "mix.yaml"))), model="unused", filters=Filters())
    items, total = work_items(request)
    assert total is None, "the number is not known before the last unit has been read"
    assert sum(1 for _ in items) > 4


def test_batches_are_bounded_by_what_they_hold(tmp_path: Path) -> None:
    """Media that travel with their records are not collected by the hundred."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    blob = (tmp_path / "a.png").read_bytes() + bytes(1 << 20)  # padding behind the end mark is harmless
    sizes: list[int] = []

    class Rule:
        def compute_costs(self, batch: Any, store: Any) -> list[Any]:
            sizes.append(len(batch))
            return [RecordError("test", "not counted") for _ in batch]

    data = lines(tmp_path / "d.jsonl", chat("x"))
    measurer = Measurer(Request(specs=tuple(open_sources(str(data))), model="unused"), Rule())
    value = {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}]}
    ref = MediaRef(name="a.png", data=blob)
    entries = (Entry(origin=f"d:{n}", value=value, media={"png": ref}) for n in range(100))
    assert len(list(measurer.measure(entries, 0))) == 100
    assert max(sizes) <= 33


def test_batches_are_bounded_by_their_texts(tmp_path: Path) -> None:
    """A few bytes of a table may stand for the same long text in every row."""
    sizes: list[int] = []

    class Rule:
        def compute_costs(self, batch: Any, store: Any) -> list[Any]:
            sizes.append(sum(_characters(sized.record) for sized in batch))
            return [RecordError("test", "not counted") for _ in batch]

    text = "x" * 300_000
    pq.write_table(pa.Table.from_pylist([chat(text)] * 40), tmp_path / "d.parquet", compression="zstd")
    assert (tmp_path / "d.parquet").stat().st_size < 20_000
    request = Request(specs=tuple(open_sources(str(tmp_path / "d.parquet"))), model="unused")
    measurer = Measurer(request, Rule())
    entries = (entry for unit in iter_units(request.specs) for entry in read_unit(request.specs, unit))
    assert len(list(measurer.measure(entries, 0))) == 40
    assert max(sizes) < Measurer.batch_characters + 400_000
    measurer.most_characters = 200_000
    found = next(measurer.measure(read_unit(request.specs, next(iter_units(request.specs))), 0))
    assert isinstance(found, LedgerEntry)
    assert (found.reason, found.filtered) == ("text is too long", False)


@pytest.mark.parametrize("text", ["word " * 60_000, "x" * 300_000, "é" * 300_000], ids=["words", "a word", "accents"])
def test_a_text_that_cannot_fit_is_not_tokenized(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    for name in ("encode", "encode_batch"):
        real = getattr(LightTokenizer, name)

        def seen(self: Any, texts: Any, real: Any = real, **options: Any) -> Any:
            nonlocal longest
            longest = max(longest, *map(len, [texts] if isinstance(texts, str) else texts or [""]))
            return real(self, texts, **options)

        monkeypatch.setattr(LightTokenizer, name, seen)
    data = lines(tmp_path / "d.jsonl", chat("short"), chat(text), chat("short again"))
    options: dict[str, Any] = {"model": "tiny:llama", "workers": 1, "check": 0}
    table = packtrain.measure(data, out=tmp_path / "o", max_sample_length=1000, **options)
    (line,) = [json.loads(line) for line in (tmp_path / "o" / "ledger.jsonl").read_text().splitlines()]
    assert (len(table), line["reason"], line["filtered"]) == (2, "longer than max_sample_length", True)
    assert longest < 70_000
    whole = packtrain.measure(data, out=tmp_path / "p", **options)
    assert whole.column("tokens").max() > 2 * 1000
    assert longest > 250_000
    most = int(whole.column("tokens").max())
    assert len(packtrain.measure(data, out=tmp_path / "q", max_sample_length=most, **options)) == 3


def test_an_error_nobody_thought_of_is_one_ledger_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: Any, **__: Any) -> None:
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr("packtrain.measuring.measurer.to_record", explode)
    data = lines(tmp_path / "d.jsonl", chat("x", sample_id="S1"))
    measurer = Measurer(Request(specs=tuple(open_sources(str(data))), model="unused"), None)  # type: ignore[arg-type]
    entry = measurer._size(Entry(origin="d:1", value={"sample_id": "S1"}), 0)
    assert isinstance(entry, LedgerEntry)
    assert (entry.id, entry.stage, entry.reason) == ("S1", "internal", "unexpected error")
