"""Files of cached tokens: made once, made again with the reason, gone on with; damage is noticed."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_tokens import (
    SAMPLES,
    Folder,
    assert_same,
    built,
    config,
    folder_of,
    no_tokenizing,
    packed,
    told,
    turn,
    write_data,
)

from packtrain import DatasetConfig
from packtrain.core.errors import ArtifactError
from packtrain.delivery.encode import token_cache
from packtrain.delivery.encode.sample_tokens import SampleTokens
from packtrain.delivery.encode.token_cache import TOKENS, TokenTable, part_batch, part_name

# ---- made once


def test_made_once_and_anew_with_the_reason(data: Path, model: Folder, tmp_path: Path) -> None:
    folder = shutil.copytree(model("qwen3_vl"), tmp_path / "model")
    given = config(data, folder)
    first = told(given)
    assert [(one.rows, one.total) for one in first] == [(0, SAMPLES), (SAMPLES, SAMPLES)]
    assert {(one.resumed, one.changed) for one in first} == {(0, ())}
    assert told(given) == []
    assert told(replace(given, **packed(cache_tokens=True))) == [], "both modes have the same tokens"
    with data.open("a") as lines:
        lines.write(json.dumps({"messages": [turn("user", "one"), turn("assistant", "more")]}) + "\n")
    found = told(given)
    assert found[-1].rows == SAMPLES + 1
    assert any("data.jsonl.size" in why for why in found[0].changed)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace("<|im_end|>", "<|im_end|> "))
    assert any("chat_template" in why for why in told(given)[0].changed)
    assert told(given) == []


@pytest.mark.parametrize("other", [{"loss_on": "all"}, {"processor_config": {"max_pixels": 4096}}, {"max_samples": 5}])
def test_settings_that_change_tokens_have_their_own(data: Path, model: Folder, other: dict[str, Any]) -> None:
    given = config(data, model("qwen3_vl"))
    changed = replace(given, **other)
    assert folder_of(built(given)) != folder_of(built(changed))
    assert told(given) == told(changed) == []


def test_rows_that_come_or_go_with_their_media_are_noticed(data: Path, model: Folder) -> None:
    given = config(data, model("qwen3_vl"), workers=1, check=0, max_failure_rate=1.0)
    (data.parent / "large.png").rename(data.parent / "away.png")
    table = built(given).plan.summary.cost_table
    (data.parent / "away.png").rename(data.parent / "large.png")
    shutil.rmtree(table)
    found = told(given)
    assert {name.split(":")[0] for name in found[0].changed} == {"measured.content", "rows"}
    assert found[-1].rows == SAMPLES


def test_an_interrupted_run_goes_on(data: Path, model: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "PART_ROWS", 4)
    given = config(data, model("qwen3_vl"))
    whole = folder_of(built(given))
    wanted = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert len(wanted) == 5
    shutil.rmtree(whole)
    write = token_cache._write_part

    def interrupted(task: Any, span: Any) -> Any:
        if span.number == 2:
            (task.folder / ".part-00002.arrow.77.tmp").write_text("half")
            raise KeyboardInterrupt
        return write(task, span)

    monkeypatch.setattr(token_cache, "_write_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        built(given)
    with pytest.raises(ArtifactError, match="incomplete"):
        TokenTable.load(whole)
    monkeypatch.setattr(token_cache, "_write_part", write)
    (whole / part_name(1)).write_bytes(b"damaged meanwhile")
    found = told(given)
    assert [one.rows for one in found] == [4, 8, 12, SAMPLES]
    assert {one.resumed for one in found} == {4}
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == wanted


@pytest.mark.full
def test_several_processes_write_the_same(data: Path, model: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "PART_TOKENS", 150)
    given = config(data, model("qwen3_vl"))
    alone = folder_of(built(given))
    wanted = {path.name: path.read_bytes() for path in alone.iterdir()}
    assert len(wanted) > 3
    shutil.rmtree(alone)
    started: list[int] = []
    real = token_cache.in_processes
    monkeypatch.setattr(
        token_cache, "in_processes", lambda count, *args, **more: started.append(count) or real(count, *args, **more)
    )
    again = folder_of(built(replace(given, workers=2, check=0)))
    assert started == [2]
    assert {path.name: path.read_bytes() for path in again.iterdir() if path.suffix == ".arrow"} == {
        name: content for name, content in wanted.items() if name.endswith(".arrow")
    }


def _rank(given: DatasetConfig, out: Any) -> None:
    try:
        out.put(len(told(given)))
    except Exception as error:
        out.put(repr(error))


def test_of_several_ranks_one_makes_them(data: Path, model: Folder) -> None:
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    ranks = [context.Process(target=_rank, args=(config(data, model("llama")), out)) for _ in range(2)]
    write_data(data, "llama")
    for rank in ranks:
        rank.start()
    found = sorted(out.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join(30)
    assert found == [0, 2]


def test_other_processes_wait_for_the_one_that_writes(
    data: Path, model: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose measuring has other settings that change no token, and so another lock of its own."""
    monkeypatch.setattr(token_cache, "PART_ROWS", 8)
    write_data(data, "llama")
    monkeypatch.setenv("PACKTRAIN_CACHE", str(data.parent / "cache"))
    given = replace(config(data, model("llama")), cache_dir=None)
    other = replace(given, workers=2, check=0)
    folder = folder_of(built(given))
    assert folder_of(built(other)) == folder
    shutil.rmtree(folder)
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    started: list[Any] = []
    write = token_cache._write_part

    def slow(task: Any, span: Any) -> Any:
        if not started:
            started.append(context.Process(target=_rank, args=(other, out)))
            started[0].start()
            started[0].join(1.5)  # without a lock it would be through, and have removed what is being written
            assert started[0].is_alive()
        return write(task, span)

    monkeypatch.setattr(token_cache, "_write_part", slow)
    assert [one.rows for one in told(given)] == [0, 8, SAMPLES]
    assert out.get(timeout=60) == 0
    started[0].join(30)


# ---- damage


def test_missing_and_truncated_parts_are_made_again(data: Path, model: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those alone, and those whose content is not as listed; a copy in another process fails with a way out."""
    monkeypatch.setattr(token_cache, "PART_ROWS", 4)
    given = config(data, model("qwen3_vl"))
    dataset = built(given)
    folder = folder_of(dataset)
    wanted = {path.name: path.read_bytes() for path in folder.iterdir()}
    part, flipped = folder / part_name(1), folder / part_name(2)
    ids = dataset.tokens.tokens(9).ids.tobytes()
    assert wanted[flipped.name].count(ids) == 1
    for damage, said in ((lambda: part.write_bytes(wanted[part.name][:-100]), "bytes"), (part.unlink, "no such file")):
        part.unlink()  # and another one: what is open here stays as it was
        flipped.unlink()
        part.write_bytes(wanted[part.name])
        flipped.write_bytes(wanted[flipped.name].replace(ids, bytes(len(ids))))
        damage()
        with pytest.raises(ArtifactError, match=said) as caught:
            list(pickle.loads(pickle.dumps(dataset)).loader())
        assert str(part) in str(caught.value)
        assert "packtrain cache clear --kind tokens" in str(caught.value)
        found = told(given)
        assert [one.resumed for one in found] == [SAMPLES - 8] * 3
        assert [why.split(":")[0] for why in found[0].changed] == [part.name]
        assert said in found[0].changed[0]
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted


def test_a_running_training_outlives_the_folder(data: Path, model: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "PART_ROWS", 3)
    given = config(data, model("qwen3_vl"))
    files = len(os.listdir("/proc/self/fd"))
    dataset = built(given)
    wanted = list(built(replace(given, cache_tokens=False)).loader())
    assert len(dataset.tokens.parts) == 5
    opened = len(os.listdir("/proc/self/fd"))
    batches = iter(dataset.loader())
    first = next(batches)
    shutil.rmtree(folder_of(dataset))
    no_tokenizing(monkeypatch)
    assert_same([first, *batches], wanted)
    assert opened - files < 5, "a mapped part needs no open file"


def test_tokens_of_another_format_are_made_anew(data: Path, model: Folder) -> None:
    given = config(data, model("llama"))
    write_data(data, "llama")
    listed = folder_of(built(given)) / TOKENS
    listed.write_text(json.dumps({**json.loads(listed.read_text()), "version": 1}))
    assert "format version 1" in told(given)[0].changed[0]
    assert told(given) == []


def _is_noticed(table: TokenTable, wanted: list[SampleTokens]) -> bool:
    """Does reading refuse these tokens? If not, they are the ones that were written."""
    for row, expected in enumerate(wanted):
        try:
            found = table.tokens(row)
        except ArtifactError:
            return True
        assert found is not None
        for one, other in zip(found.expand(), expected.expand(), strict=True):
            assert np.array_equal(one, other)
    return False


def test_any_flipped_byte_is_found(data: Path, model: Folder) -> None:
    """By verifying always; by reading wherever it would change a sample."""
    dataset = built(replace(config(data, model("qwen3_vl")), cache_tokens=True))
    folder = folder_of(dataset)
    part = folder / part_name(0)
    content = bytearray(part.read_bytes())
    wanted = [dataset.tokens.tokens(row) for row in range(SAMPLES)]
    assert list(TokenTable.load(folder).faults()) == []
    noticed = 0
    for at in np.random.default_rng(0).choice(len(content), 60, replace=False).tolist():
        content[at] ^= 0x10
        part.write_bytes(content)
        table = TokenTable.load(folder)
        assert list(table.faults()) == [f"{part.name}: its content is not what was written"]
        noticed += _is_noticed(table, wanted)
        content[at] ^= 0x10
    assert noticed > 20


def test_tokens_made_anew_under_a_running_training(data: Path, model: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other data are not taken for those that were there."""
    given = config(data, model("qwen3_vl"))
    running = pickle.loads(pickle.dumps(built(given)))
    content = json.loads((folder_of(running) / TOKENS).read_text())
    content["inputs"]["tokenizers"] = "0.0.1"
    (folder_of(running) / TOKENS).write_text(json.dumps(content))
    table = running.tokens
    assert any("tokenizers: 0.0.1 ->" in why for why in told(given)[0].changed)
    stale = TokenTable(table.folder, "another", table.parts)
    with pytest.raises(ArtifactError, match="rebuilt in the meantime"):
        stale.tokens(0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOENT])
def test_a_disk_that_is_full_or_fails(data: Path, model: Folder, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    given = config(data, model("qwen3_vl"))

    def full(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(token_cache, "part_batch", full)
    with pytest.raises(ArtifactError) as caught:
        built(given)
    monkeypatch.undo()
    assert ("No space left" in str(caught.value)) == ("make room" in str(caught.value)) == (number == errno.ENOSPC)
    assert "data.cache_tokens: false" in str(caught.value)
    assert told(given)[-1].rows == SAMPLES


# ---- the file format


def test_any_tokens_survive_their_file(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    samples: list[SampleTokens | None] = [None]
    for number in range(40):
        size = int(draw.integers(1, 50)) if number else 1
        marked = np.sort(draw.choice(size + 1, 2 * int(draw.integers(0, (size + 1) // 2 + 1)), replace=False))
        at = np.sort(draw.choice(size, int(draw.integers(0, min(4, size) + 1)), replace=False))
        runs = np.stack([at, draw.integers(1, 900, len(at)), draw.integers(1, 3, len(at))], axis=1)
        samples.append(
            SampleTokens(
                ids=draw.integers(0, 2**31 - 1, size).astype(np.int32),
                supervised=marked.astype(np.int32).reshape(-1, 2),
                runs=runs.astype(np.int32),
                key=int(draw.integers(-(2**63), 2**63 - 1)),
            )
        )
    batch = part_batch(samples)
    assert batch.num_rows == 41
    task: Any = type("Task", (), {"folder": tmp_path, "fingerprint": "f"})
    tools = type("Tools", (), {"tokens": lambda _, number: samples[number]})()
    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(token_cache, "_tools", lambda _: tools)
        _, part = token_cache._write_part(task, token_cache._Span(number=0, start=0, stop=41))
    table = TokenTable(tmp_path, "f", (part,))
    assert (part.rows, part.not_kept, table.tokens(0)) == (41, 1, None)
    for row, expected in enumerate(samples[1:], start=1):
        found = table.tokens(row)
        assert found is not None
        assert expected is not None
        assert (found.check, found.key) == (expected.check, expected.key)
        assert found.run_kinds == expected.run_kinds
        for one, other in zip(found.expand(), expected.expand(), strict=True):
            assert one.dtype == np.int64
            assert np.array_equal(one, other)
            one[:] = 0  # its own
    assert not table._columns(0).lists["ids"][1].flags.owndata, "mapped, not read"
    with pytest.raises(IndexError):
        table.tokens(41)
