"""`packtrain cache`: what lies there and why it is stale; clearing touches nothing else; verifying finds damage."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Run, files
from made_runs_data import write_chats

from packtrain.app.cache import Cached, clear_cache, list_cache
from packtrain.app.datasets import DatasetConfig, MultiModalDataset
from packtrain.core.errors import ConfigError


def build(data: Path, root: Path) -> None:
    """One dataset, packed and padded."""
    for packing in (True, False):
        MultiModalDataset(
            DatasetConfig(
                dataset_path=str(data),
                model="tiny:llama",
                packing=packing,
                packing_length=128,
                cache_dir=str(root),
                workers=1,
                check=0,
            )
        ).build()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one dataset, packed and padded, in a folder that holds other things too."""
    root = tmp_path / "cache"
    monkeypatch.setenv("PACKTRAIN_CACHE", str(root))
    build(write_chats(tmp_path / "train.jsonl", 12), root)
    for name in ("notes.txt", "models/my-own-model/config.json", "plans/thesis/plan.json", "measure/old.csv"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("mine")
    return root


def listed(run: Run, *more: object) -> list[dict[str, Any]]:
    code, out, err = run("cache", "ls", "--json", *more)
    assert code == 0, err
    return list(json.loads(out)["entries"])


def foreign(root: Path) -> dict[str, bytes]:
    mine = ("notes.txt", "models/my-own-model/config.json", "plans/thesis/plan.json", "measure/old.csv")
    return {name: content for name, content in files(root).items() if name in mine}


def test_what_lies_there(run: Run, root: Path, tmp_path: Path) -> None:
    found = listed(run)
    kinds = [entry["kind"] for entry in found]
    perhaps = [kind for kind in ("configs", "shards") if kind in kinds]  # configs: where no test before has loaded it
    assert sorted(kinds) == sorted(["measure", "models", "plans", "plans", "rows", "tokens", *perhaps])
    by_kind = {entry["kind"]: entry for entry in found}
    assert "12 samples of" in by_kind["measure"]["about"]
    assert "train.jsonl" in by_kind["measure"]["about"]
    about = sorted(entry["about"] for entry in found if entry["kind"] == "plans")
    assert "tokens of 12 samples of" in by_kind["tokens"]["about"]
    assert any("padded" in text for text in about)
    assert any("packs of 128" in text for text in about)
    assert not any(entry["stale"] for entry in found)
    assert all(entry["bytes"] > 0 and entry["days"] < 1 for entry in found if entry["kind"] != "shards")
    code, out, _ = run("cache", "ls")
    assert code == 0
    assert "cost tables" in out
    assert "my-own-model" not in out


def test_stale_and_why(run: Run, root: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "train.jsonl", 13)
    found = {entry["kind"]: entry for entry in listed(run)}
    assert any("train.jsonl.size" in why for why in found["measure"]["stale"])
    assert any("its cost table is stale" in why for why in found["plans"]["stale"])
    assert any("its cost table is stale" in why for why in found["tokens"]["stale"])
    os.remove(tmp_path / "train.jsonl")
    assert any("missing" in why for why in {e["kind"]: e for e in listed(run)}["measure"]["stale"])
    code, out, _ = run("cache", "clear", "--stale", "--yes", "--json")
    assert code == 0
    assert {entry["kind"] for entry in json.loads(out)["entries"]} == {"measure", "plans", "tokens"}
    assert [entry["kind"] for entry in listed(run) if entry["kind"] in ("measure", "plans", "tokens")] == []


def test_clearing_leaves_what_is_not_ours(run: Run, root: Path) -> None:
    before = foreign(root)
    assert len(before) == 4
    code, out, _ = run("cache", "clear", "--all", "--yes")
    assert code == 0
    assert " freed" in out
    assert [entry for entry in listed(run) if entry["kind"] != "shards"] == []
    assert foreign(root) == before


def test_what_was_written_with_out_stays(run: Run, root: Path, tmp_path: Path) -> None:
    """In the cache or outside, stale or not; and what the cache made of it is not stale because of where it lies."""
    outside, inside = tmp_path / "costs", root / "measure" / f"mine-{'0' * 20}"
    for number, out in enumerate((outside, inside), 1):
        data = write_chats(tmp_path / f"{number}.jsonl", 9, seed=number)
        code, _, err = run("measure", data, "--model", "tiny:llama", "--out", out)
        assert code == 0, err
    build(tmp_path / "1.jsonl", root)
    found = listed(run)
    kinds = [entry["kind"] for entry in found]
    assert (kinds.count("measure"), kinds.count("rows"), kinds.count("tokens")) == (1, 2, 2)
    assert [entry for entry in found if entry["stale"]] == []
    for number in (1, 2):
        os.remove(tmp_path / f"{number}.jsonl")
    before = files(outside), files(inside)
    code, said, _ = run("cache", "clear", "--stale", "--yes")
    assert code == 0
    assert "what you wrote with --out is kept" in " ".join(said.split())
    assert run("cache", "clear", "--all", "--yes")[0] == 0
    assert (files(outside), files(inside)) == before


def test_by_kind_and_age(run: Run, root: Path) -> None:
    assert (
        json.loads(run("cache", "clear", "--kind", "plans", "--older-than", 1, "--yes", "--json")[1])["entries"] == []
    )
    old = time.time() - 40 * 86_400
    for path in (root / "plans").rglob("*"):
        os.utime(path, (old, old))
    code, out, _ = run("cache", "clear", "--older-than", 30, "--yes", "--json")
    assert code == 0
    assert {entry["kind"] for entry in json.loads(out)["entries"]} == {"plans"}
    assert {entry["kind"] for entry in listed(run)} >= {"measure", "rows", "models"}


def test_it_asks_first(run: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(root)
    code, _, err = run("cache", "clear", "--all", "--json")
    assert code == 1
    assert "--yes" in err
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    assert run("cache", "clear", "--all")[0] == 1
    assert files(root) == before
    code, _, err = run("cache", "clear", "--yes")
    assert code == 2
    assert "--kind, --older-than, --stale or --all" in err
    code, _, err = run("cache", "ls", "--kind", "plan")
    assert code == 2
    assert "did you mean 'plans'?" in err


def test_links_lead_nowhere(run: Run, root: Path, tmp_path: Path) -> None:
    """A folder of a kind, or an entry, that is a link is not followed and not removed."""
    precious = tmp_path / "precious"
    plan = next(path for path in (root / "plans").iterdir() if (path / "entries-0000.arrow").exists())
    os.rename(plan, precious)
    plan.symlink_to(precious)
    os.rename(root / "rows", tmp_path / "elsewhere")
    (root / "rows").symlink_to(tmp_path / "elsewhere")
    before = files(precious), files(tmp_path / "elsewhere")
    assert run("cache", "clear", "--all", "--yes")[0] == 0
    assert (files(precious), files(tmp_path / "elsewhere")) == before
    synthetic = Cached(kind="plans", path=precious, bytes=0, used=0.0, about="")
    with pytest.raises(ConfigError, match="a path inside"):
        clear_cache([synthetic], root)
    assert files(precious) == before[0]


def test_whole_caches_pass(run: Run, root: Path) -> None:
    code, out, _ = run("cache", "verify", "--json")
    assert code == 0
    assert not any(entry["faults"] for entry in json.loads(out)["entries"])


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("measure/*/costs.parquet", ""),
        ("measure/*/measure.json", ""),
        ("plans/*/packs-0000.arrow", ""),
        ("plans/*/plan.json", ""),
        ("rows/rows-*.arrow", ""),
        ("tokens/*/part-00000.arrow", "its content is not what was written"),
        ("tokens/*/tokens.json", ""),
        ("models/tiny-*/config.json", "its content does not match its name"),
    ],
)
def test_broken_files_are_found(run: Run, root: Path, pattern: str, words: str) -> None:
    path = next(path for path in sorted(root.glob(pattern)) if path.read_bytes() != b"mine")
    content = bytearray(path.read_bytes())
    for at in range(len(content) // 3, len(content) // 3 + 40):
        content[at] ^= 0x15
    path.write_bytes(content)
    code, out, _ = run("cache", "verify", "--json")
    broken = [entry for entry in json.loads(out)["entries"] if entry["faults"]]
    assert code == 1
    kind = pattern.split("/")[0]
    assert kind in {entry["kind"] for entry in broken}, "the damage is found where it is"
    assert words in " ".join(fault for entry in broken for fault in entry["faults"])


def test_one_flipped_byte_of_tokens_is_found(run: Run, root: Path) -> None:
    (path,) = root.glob("tokens/*/part-*.arrow")
    content = path.read_bytes()
    for at in range(0, len(content), len(content) // 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        code, out, _ = run("cache", "verify", "--kind", "tokens", "--json")
        assert code == 1
        assert "part-00000.arrow" in json.loads(out)["entries"][0]["faults"][0]
    path.write_bytes(content)
    assert run("cache", "verify", "--kind", "tokens")[0] == 0


def test_tokens_that_are_not_complete_are_listed_and_cleared(run: Run, root: Path) -> None:
    (path,) = root.glob("tokens/*/tokens.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "parts": None}))
    (entry,) = listed(run, "--kind", "tokens")
    assert "not complete" in entry["about"]
    assert entry["stale"] == ["incomplete; the same command continues it"]
    assert run("cache", "verify", "--kind", "tokens")[0] == 0
    assert run("cache", "clear", "--kind", "tokens", "--yes")[0] == 0
    assert list((root / "tokens").iterdir()) == []


def test_an_empty_cache(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("cache", "ls", "--cache-dir", tmp_path / "none")
    assert code == 0
    assert "empty cache:" in out
    code, out, _ = run("cache", "clear", "--stale", "--cache-dir", tmp_path / "none")
    assert (code, "nothing stale" in out, "removed, 0 B" in out) == (0, True, False)
    (tmp_path / "file").write_text("")
    assert run("cache", "ls", "--cache-dir", tmp_path / "file")[0] == 2
    assert list_cache(tmp_path / "none") == []


def test_calibrations_are_removed_by_name_alone(run: Run, root: Path) -> None:
    path = root / "calibration" / "h200.json"
    path.parent.mkdir()
    path.write_text('{"kind": "calibration", "version": 0}')
    assert run("cache", "clear", "--all", "--yes")[0] == 0
    assert path.exists()
    code, out, _ = run("cache", "verify", "--kind", "calibration", "--json")
    assert code == 1
    assert "h200.json" in json.loads(out)["entries"][0]["faults"][0]
    assert run("cache", "clear", "--kind", "calibration", "--yes")[0] == 0
    assert not path.exists()
