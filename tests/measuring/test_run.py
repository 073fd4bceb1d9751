"""A measurement from beginning to end: the same bytes for any number of workers, and nothing lost."""

from __future__ import annotations

import gzip
import io
import json
import math
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from measuring import chats, hashes, ledger, write_image, write_lines

from packtrain.app.measure import measure_outcome
from packtrain.core.errors import ConfigError, DataError, PacktrainError
from packtrain.measuring import writer
from packtrain.measuring.journal import Journal
from packtrain.measuring.measurement import JOURNAL, MeasureProgress
from packtrain.measuring.table import CostTable

RECORDS = 400
BROKEN = 9


def records(folder: Path) -> list[Any]:
    """Chats of which some show pictures and some are broken."""
    for number in range(4):
        write_image(folder / f"{number}.png", 40 + 37 * number, 60 + 11 * number)
    made: list[Any] = chats(RECORDS - BROKEN, images=tuple(f"{number}.png" for number in range(4)))
    for number in range(BROKEN):
        made.insert(number * 40, {"id": f"bad{number}", "messages": [{"role": "narrator", "content": "x"}]})
    return made


def as_jsonl(folder: Path) -> Path:
    made = records(folder / "parts")
    for part in range(8):
        write_lines(folder / "parts" / f"{part}.jsonl", made[part * 50 : part * 50 + 50])
    return folder / "parts"


def as_gzip(folder: Path) -> Path:
    padding = "x" * 9000  # so that a file which can only be read from its beginning has several units
    lines = "".join(json.dumps({**record, "padding": padding}) + "\n" for record in records(folder))
    path = folder / "data.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode(), 1, mtime=0))
    return path


def as_parquet(folder: Path) -> Path:
    made = [{"id": r["id"], "messages": r["messages"], "images": r.get("images", [])} for r in records(folder)]
    pq.write_table(pa.Table.from_pylist(made), folder / "data.parquet", row_group_size=50)
    return folder / "data.parquet"


def as_tar(folder: Path) -> Path:
    made = records(folder)
    for shard in range(4):
        path = folder / "shards" / f"{shard}.tar"
        path.parent.mkdir(exist_ok=True)
        with tarfile.open(path, "w") as archive:
            for record in made[shard * 100 : shard * 100 + 100]:
                if name := next(iter(record.pop("images", [])), None):
                    archive.add(folder / name, f"{record['id']}.png")
                content = json.dumps(record).encode()
                member = tarfile.TarInfo(f"{record['id']}.json")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return folder / "shards"


def as_mixture(folder: Path) -> Path:
    made = records(folder)
    write_lines(folder / "one.jsonl", made[:150])
    table = [{"id": r["id"], "messages": r["messages"], "images": r.get("images", [])} for r in made[150:]]
    pq.write_table(pa.Table.from_pylist(table), folder / "two.parquet", row_group_size=60)
    path = folder / "mix.yaml"
    path.write_text("- {path: one.jsonl, name: first, repeats: 2}\n- {path: two.parquet, name: second}\n")
    return path


DATASETS: dict[str, Callable[[Path], Path]] = {
    "jsonl": as_jsonl,
    "gzip": as_gzip,
    "parquet": as_parquet,
    "tar": as_tar,
    "mixture": as_mixture,
}


def measured(data: Path, out: Path, model: Path, **options: Any) -> CostTable:
    return measure_outcome(data, **{"model": str(model), "out": out, "workers": 1, "check": 0, **options}).table


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind not in ("jsonl", "mixture"))) for kind in DATASETS]
)
def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path, qwen: Path, kind: str) -> None:
    data = DATASETS[kind](tmp_path)
    table = measured(data, tmp_path / "1", qwen)
    counts = table.summary.counts
    assert (counts.entries, counts.rows, counts.failed) == (RECORDS, RECORDS - BROKEN, BROKEN)
    assert table.column("images").sum() > 100
    again = measured(data, tmp_path / "2", qwen, workers=2)
    assert hashes(tmp_path / "2") == hashes(tmp_path / "1")
    assert again.files == table.files


@pytest.mark.full
@pytest.mark.parametrize("kind", DATASETS)
def test_three_workers_with_a_limit(tmp_path: Path, qwen: Path, kind: str) -> None:
    data = DATASETS[kind](tmp_path)
    measured(data, tmp_path / "1", qwen, max_samples=77, seed=5)
    measured(data, tmp_path / "3", qwen, max_samples=77, seed=5, workers=3)
    assert hashes(tmp_path / "3") == hashes(tmp_path / "1")


def test_the_datasets_say_the_same(tmp_path: Path, qwen: Path) -> None:
    """One set of records in five formats costs the same, record by record."""
    costs = {}
    for kind, make in DATASETS.items():
        folder = tmp_path / kind
        folder.mkdir()
        table = measured(make(folder), tmp_path / f"{kind}-out", qwen)
        names = ("id", "tokens", "image_tokens", "patches", "supervised_tokens")
        costs[kind] = list(zip(*(table.column(name).tolist() for name in names), strict=True))
    assert len(costs["jsonl"]) == RECORDS - BROKEN
    for kind, found in costs.items():
        assert found == costs["jsonl"], kind


@pytest.mark.parametrize("kind", DATASETS)
def test_limit_draws_exactly_so_many(tmp_path: Path, qwen: Path, kind: str) -> None:
    data = DATASETS[kind](tmp_path)
    everything = measured(data, tmp_path / "all", qwen)
    known = dict(zip(everything.column("index").tolist(), everything.column("tokens").tolist(), strict=True))
    for limit in (1, 60, RECORDS, RECORDS + 5):
        out = tmp_path / f"out-{limit}"
        table = measured(data, out, qwen, max_samples=limit, max_failure_rate=0.9)
        lines = ledger(out)
        not_drawn = [line for line in lines if line["reason"] == "not drawn by max_samples"]
        assert all(line["filtered"] for line in not_drawn)
        drawn = min(limit, RECORDS)
        assert len(not_drawn) == RECORDS - drawn
        assert len(table) + len(lines) == table.summary.counts.entries == RECORDS
        assert len(table) + sum(not line["filtered"] for line in lines) == drawn
        chosen = dict(zip(table.column("index").tolist(), table.column("tokens").tolist(), strict=True))
        assert chosen.items() <= known.items(), "a drawn record costs something else than in the whole"


def test_limit_depends_on_the_seed_alone(tmp_path: Path, qwen: Path) -> None:
    data = as_jsonl(tmp_path)
    drawn = [
        measured(data, tmp_path / str(at), qwen, max_samples=50, seed=seed, max_failure_rate=0.5).column("id").tolist()
        for at, seed in enumerate((0, 0, 1))
    ]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(("size", "limit", "held"), [(0.1, None, 0.1), (7, None, 7), (0.25, 40, 10)])
def test_what_is_held_out_is_in_no_other_part(
    tmp_path: Path, qwen: Path, size: float, limit: int | None, held: float
) -> None:
    """Both parts together are all that is drawn; they are the same for the same seed."""
    data = as_jsonl(tmp_path)
    given = {"eval_size": size, "max_samples": limit, "max_failure_rate": 0.9}

    def part(name: str, *, seed: int = 0) -> tuple[set[int], list[dict[str, object]]]:
        table = measured(data, tmp_path / f"{name}-{seed}", qwen, part=name, seed=seed, **given)
        assert table.summary.user_config["data"]["eval_size"] == size
        assert "part" not in table.summary.user_config["data"]
        return set(table.column("index").tolist()), ledger(tmp_path / f"{name}-{seed}")

    (train, of_train), (evaluated, of_eval) = part("train"), part("eval")
    unusable = [line for line in (*of_train, *of_eval) if not line["filtered"]]
    assert not train & evaluated
    assert len(train) + len(evaluated) + len(unusable) == (limit or RECORDS)
    other = sum(line["reason"] == "in the other part of eval_size" for line in of_train)
    assert other == (math.ceil(held * RECORDS) if held < 1 else held)
    assert part("train", seed=1)[0] != train, "drawn by the seed"


def test_held_out_records_leave_some_to_train_on(tmp_path: Path, qwen: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval_size"):
        measured(as_jsonl(tmp_path), tmp_path / "out", qwen, eval_size=RECORDS)


def test_a_number_of_samples_of_one_source(tmp_path: Path, qwen: Path) -> None:
    data = as_jsonl(tmp_path)
    mixture = tmp_path / "mix.yaml"
    mixture.write_text(f"- {data.name}#30\n- {{path: {data.name}, name: whole}}\n")
    table = measured(mixture, tmp_path / "out", qwen, max_failure_rate=0.9)
    assert table.summary.counts.reasons["filter: not drawn by max_samples"] == RECORDS - 30
    again = measured(mixture, tmp_path / "again", qwen, max_failure_rate=0.9, seed=1)
    assert again.column("id").tolist() != table.column("id").tolist(), "drawn by the seed"
    mixture.write_text(f"- {data.name}#{RECORDS + 5}\n")
    with pytest.raises(ConfigError, match=r"repeats: 1\.\d+ uses records more than once"):
        measured(mixture, tmp_path / "more", qwen)


def test_a_stopped_run_continues_where_it_was(tmp_path: Path, qwen: Path) -> None:
    data = as_jsonl(tmp_path)
    measured(data, tmp_path / "whole", qwen)

    class Stop(Exception):
        pass

    def stop(progress: MeasureProgress) -> None:
        if progress.units == 5:
            raise Stop

    for extra in range(3):
        with pytest.raises(Stop):
            measured(data, tmp_path / "out", qwen, progress=stop)
        assert not (tmp_path / "out" / "measure.json").exists(), f"stop {extra} left a table that looks complete"
    seen: list[tuple[int, int | None]] = []
    outcome = measure_outcome(
        data,
        model=str(qwen),
        out=tmp_path / "out",
        workers=1,
        check=0,
        progress=lambda p: seen.append((p.units, p.total_units)),
    )
    assert outcome.resumed_units == 5
    assert seen[-1] == (8, 8)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in (tmp_path / "whole").iterdir()
    )


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path, qwen: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", chats(5))
    out = tmp_path / "out"
    out.mkdir()
    (out / ".costs.parquet.4711.tmp").write_bytes(b"half a table")
    measured(data, out, qwen)
    assert {path.name for path in out.iterdir()} == {"costs.parquet", "media.parquet", "ledger.jsonl", "measure.json"}


def test_too_many_failures_keep_the_ledger_and_the_work(tmp_path: Path, qwen: Path) -> None:
    bad = [{"id": f"bad{n}", "messages": []} for n in range(4)]
    data = write_lines(tmp_path / "data.jsonl", [*chats(10), *bad])
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"4 of the first 14 records.*\n.*4 x schema: no messages"):
        measured(data, out, qwen)
    assert [line["id"] for line in ledger(out)] == [record["id"] for record in bad]
    assert not (out / "measure.json").exists()
    again = measure_outcome(data, model=str(qwen), out=out, workers=1, check=0, max_failure_rate=0.3)
    assert again.resumed_units == 1
    assert len(again.table) == 10


def test_media_that_failed_are_tried_again(tmp_path: Path, qwen: Path) -> None:
    data = tmp_path / "data"
    for number in range(2):  # the second file, and unit, needs no media
        records = chats(3, seed=number, images=("a.png",) if number == 0 else ())
        write_lines(data / f"{number}.jsonl", records)
    with pytest.raises(DataError, match=r"media: file not found \(first 0\.jsonl:1: a\.png") as caught:
        measured(data, tmp_path / "out", qwen)
    assert "--media-root" in caught.value.fix
    write_image(data / "a.png")
    again = measure_outcome(data, model=str(qwen), out=tmp_path / "out", workers=1, check=0)
    assert (len(again.table), again.resumed_units) == (6, 1)
    assert hashes(tmp_path / "out") == hashes(measured(data, tmp_path / "new", qwen).folder)


def test_nothing_usable_is_an_error(tmp_path: Path, qwen: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    for options in ({}, {"max_samples": 3}):
        with pytest.raises(DataError, match="an empty dataset"):
            measured(empty, tmp_path / "out", qwen, **options)
    broken = write_lines(tmp_path / "broken.jsonl", [{"messages": []}] * 3)
    with pytest.raises(DataError, match=r"no usable record\n.*3 x schema: no messages[^;]*ledger\.jsonl"):
        measured(broken, tmp_path / "out2", qwen, max_failure_rate=1.0)
    filtered = write_lines(tmp_path / "long.jsonl", chats(3))
    with pytest.raises(DataError, match="longer than max_sample_length"):
        measured(filtered, tmp_path / "out3", qwen, max_sample_length=1)


def test_a_second_run_beside_the_first_is_refused(tmp_path: Path, qwen: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", chats(5))
    refused: list[str] = []

    def second(_: MeasureProgress) -> None:
        if not refused:
            with pytest.raises(PacktrainError, match="another run") as caught:
                measured(data, tmp_path / "out", qwen, seed=1)
            refused.append(str(caught.value))

    table = measured(data, tmp_path / "out", qwen, progress=second)
    assert refused
    assert len(table) == 5


def test_an_unreadable_journal_is_said_and_replaced(tmp_path: Path, qwen: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", chats(5))
    out = tmp_path / "out"
    out.mkdir()
    (out / JOURNAL).write_bytes(b"\x00\x01 no journal")
    outcome = measure_outcome(data, model=str(qwen), out=out, workers=1, check=0)
    assert outcome.changed == ["the journal is not readable"]
    assert len(outcome.table) == 5
    assert not (out / JOURNAL).exists()


def test_journal_units_are_checked_against_the_sum(tmp_path: Path, qwen: Path) -> None:
    """A unit that lost a ledger line is noticed, not written."""
    from dataclasses import replace

    from packtrain.core.errors import ArtifactError
    from packtrain.measuring.writer import write_table

    data = write_lines(tmp_path / "data.jsonl", [*chats(30), "{broken"])

    def stop(progress: MeasureProgress) -> None:
        if progress.units:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(data, tmp_path / "out", qwen, progress=stop)
    path = tmp_path / "out" / JOURNAL
    inputs = json.loads(path.read_bytes().split(b"\n", 1)[0])["inputs"]
    journal, stale = Journal.open(path, inputs)
    assert (stale, len(journal)) == ([], 1)
    assert write_table(tmp_path / "good", journal).counts.ledger == 1
    journal.append(replace(journal.read(0), ledger=b""))
    with pytest.raises(ArtifactError, match="31 entries read"):
        write_table(tmp_path / "bad", journal)
    assert list((tmp_path / "bad").iterdir()) == []
    journal.close()


@pytest.mark.parametrize("options", [{"check": -1}, {"workers": 0}, {"limit": 0}, {"max_failure_rate": 2.0}])
def test_wrong_options_are_refused_before_anything_is_written(tmp_path: Path, qwen: Path, options: dict) -> None:
    data = write_lines(tmp_path / "data.jsonl", chats(2))
    with pytest.raises(ConfigError):
        measured(data, tmp_path / "out", qwen, **options)
    assert not (tmp_path / "out").exists()


def test_pieces_are_joined_while_they_wait(tmp_path: Path, qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table for each of very many small files would take gigabytes; joining them leaves no trace in the result."""
    for number, record in enumerate(chats(12)):
        write_lines(tmp_path / "data" / f"{number:02}.jsonl", [record])
    options: dict[str, Any] = {"model": str(qwen), "workers": 1, "check": 0}
    measure_outcome(tmp_path / "data", out=tmp_path / "whole", **options)
    held: list[int] = []
    real = writer._Groups.write
    monkeypatch.setattr(writer, "_PIECES", 3)
    monkeypatch.setattr(writer._Groups, "write", lambda self, table: (real(self, table), held.append(len(self._held))))
    measure_outcome(tmp_path / "data", out=tmp_path / "joined", **options)
    assert max(held) < 3 < len(held)
    assert hashes(tmp_path / "joined") == hashes(tmp_path / "whole")
