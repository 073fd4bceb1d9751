"""`inspect --batch` shows the batch that training gets, token by token, and nothing in the data steers the terminal."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run
from PIL import Image

from packtrain.app.inspect_batch import inspect_batch
from packtrain.app.inspect_plan import open_plan
from packtrain.app.measure import measure
from packtrain.app.pack import pack
from packtrain.cli.inspect import quote, show_batch
from packtrain.cli.terminal import Terminal
from packtrain.delivery.batch_contents import BatchToken, InspectedBatch
from packtrain.packing.packing_config import PackingConfig

SIZES = {"a.png": (300, 200), "b.png": (64, 160)}
HOSTILE = 'say [red]"hi"[/red] \\n\n\x1b[31m\u202e\x9b2J :smile: 🦜 end'
FAMILIES = ("qwen3_vl", "idefics3", "llava", "gemma3", "internvl")


def chat(name: str, question: str, answer: str, images: tuple[str, ...] = ()) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"id": name, "messages": messages, **({"images": list(images)} if images else {})}


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, size) in enumerate(SIZES.items()):
        noise = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / name)
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "data.jsonl"


MEDIA = [
    chat("one", "<image>What?", "A picture.", ("a.png",)),
    chat("other", "<image>What?", "A picture.", ("b.png",)),
    chat("both", "<image><image>Compare.", "They differ.", ("a.png", "b.png")),
    chat("text", "Hello", "Bye"),
]
TEXT = [chat("plain", "Hello", "Bye"), chat("hostile", HOSTILE, HOSTILE), chat("a" * 300 + "\x1b[2J", "one", "two")]


def planned(folder: Path, model: str, records: list[dict[str, Any]], **config: Any) -> Path:
    """A plan of these records."""
    data = write(folder, records)
    table = measure(data, model=model, out=folder / "costs", workers=1, check=0)
    pack(table, PackingConfig(**{"packing_length": 16_384, "shuffle": False, **config}), folder / "plan")
    return folder / "plan"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def at_hand(cache: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """All tests share the tiny models; after `run`, which has a cache of its own."""
    monkeypatch.setenv("PACKTRAIN_CACHE", str(cache))


def seen_of(plan: Path, number: int = 0, **options: Any) -> InspectedBatch:
    return inspect_batch(*open_plan(plan), number, cache=plan.parent / "rows", **options)


def text_of(tokens: list[BatchToken]) -> str:
    """What the tokens spell together."""
    raw = [token.text.encode() if token.text is not None else bytes.fromhex(token.bytes or "") for token in tokens]
    return b"".join(raw).decode()


def terminal(seen: InspectedBatch, **options: Any) -> str:
    console = Terminal(width=100, force_terminal=False, highlight=False, emoji=False)
    with console.capture() as captured:
        show_batch(seen, console, **options)
    return captured.get()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_every_medium_and_the_loss(family: str, tmp_path: Path) -> None:
    plan = planned(tmp_path, f"tiny:{family}", MEDIA)
    seen, table = seen_of(plan), open_plan(plan)[1]
    costs = {name: table.column(name) for name in ("tokens", "image_tokens", "supervised_tokens", "id", "patches")}
    assert {sample.id for sample in seen.samples} == set(costs["id"])
    by_medium: dict[str, Counter[int | None]] = {}
    for sample in seen.samples:
        own = [token for token in seen.tokens if token.sample == sample.number]
        assert [token.at for token in own] == list(range(sample.first, sample.first + sample.tokens))
        assert [token.positions[0] for token in own] == list(range(sample.tokens)), "positions restart"
        assert len({len(token.positions) for token in own} ^ {4 if family == "qwen3_vl" else 1}) == 0
        assert sample.tokens == costs["tokens"][sample.row]
        assert sum(token.loss for token in own) == sample.supervised_tokens == costs["supervised_tokens"][sample.row]
        assert all((token.label == token.id) == token.loss for token in own)
        media = [token for token in own if token.kind == "image"]
        assert len(media) == costs["image_tokens"][sample.row]
        assert not any(token.loss for token in media)
        by_medium[sample.id] = Counter(token.medium for token in media)
        record = next(record for record in MEDIA if record["id"] == sample.id)
        question, answer = (message["content"] for message in record["messages"])
        assert question.replace("<image>", "") in text_of([token for token in own if token.kind == "text"])
        assert text_of([token for token in own if token.loss]).strip().startswith(answer)
    assert by_medium["both"] == {1: by_medium["one"][1], 2: by_medium["other"][1]}, "each image has its own tokens"
    assert all(by_medium["both"].values())
    assert not by_medium["text"]
    assert seen.boundaries == (*(sample.first for sample in seen.samples), seen.num_tokens)
    assert seen.patches == costs["patches"].sum()
    shapes = {one.name: one.shape for one in seen.arguments}
    assert shapes["input_ids"] == (1, len(seen.tokens))
    assert "attention_mask" not in shapes


def test_images_that_touch_are_folded_apart(tmp_path: Path) -> None:
    """A template may write nothing between two images."""
    seen = seen_of(planned(tmp_path, "tiny:llava", MEDIA[2:3]))
    (both,) = seen.samples
    seen = replace(seen, tokens=tuple(token for token in seen.tokens if token.kind == "image"))
    media = [token for token in seen.tokens if token.sample == both.number and token.kind == "image"]
    assert {token.medium for token in media} == {1, 2}
    lines = [line for line in terminal(seen).splitlines() if f"of sample {both.number} (" in line]
    assert ["image 1" in line for line in lines] == [True, False]
    for line, medium in zip(lines, both.media, strict=True):
        assert f"({medium.name}, {medium.width}x{medium.height}): {medium.tokens:,} tokens" in line
    every = terminal(seen, all_tokens=True)
    assert len([line for line in every.splitlines() if f"of sample {both.number} (" in line]) == len(media)
    assert "--all-tokens" not in every
    assert "--all-tokens" in terminal(seen)


class TestTextOfData:
    @pytest.fixture(scope="class")
    def plan(self, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PACKTRAIN_CACHE", str(cache))
            return planned(tmp_path_factory.mktemp("text"), "tiny:llama", TEXT)

    def test_every_character_is_there(self, plan: Path) -> None:
        seen = seen_of(plan)
        (sample,) = [sample for sample in seen.samples if sample.id == "hostile"]
        own = [token for token in seen.tokens if token.sample == sample.number]
        assert text_of(own).count(HOSTILE) == 2
        assert text_of([token for token in own if token.loss]).startswith(HOSTILE)
        assert any(token.bytes for token in own), "a character of several tokens was shown"

    def test_nothing_steers_the_terminal(self, run: Run, plan: Path) -> None:
        code, out, err = run("inspect", plan, "--pack", 0, "--batch")
        assert (code, err) == (0, "")
        assert not any(bad in out for bad in ("\x1b", "\u202e", "\x9b", "😄"))
        assert r'"\x1b' in out
        assert re.search(r"  bytes [0-9a-f]+, part of a character\n", out)
        assert max(map(len, out.splitlines())) < 500

    def test_machines_get_it_as_it_is(self, run: Run, plan: Path) -> None:
        code, out, err = run("inspect", plan, "--pack", 0, "--batch", "--json")
        assert (code, err) == (0, "")
        said = json.loads(out)
        tokens = [BatchToken(**{**token, "positions": tuple(token["positions"])}) for token in said["tokens"]]
        assert tuple(tokens) == seen_of(plan).tokens
        assert said["samples"][2]["id"] == TEXT[2]["id"]

    def test_quoting_can_be_read_back(self) -> None:
        for text in (HOSTILE, "\\x1b", '"', " a ", "\U000e0001", "\ud800"):
            line = quote(text)
            assert line.isprintable()
            assert line[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape") == text

    def test_a_backend_that_takes_boundaries(self, plan: Path) -> None:
        without, given = seen_of(plan), seen_of(plan, attn_implementation="varlen")
        more = {one.name: one for one in given.arguments if one not in without.arguments}
        assert more["cu_seq_lens_q"].shape == (len(given.boundaries),)
        assert int(more["max_length_q"].value or 0) == max(sample.tokens for sample in given.samples)
        assert given.tokens == without.tokens


def test_pieces_of_a_sample(tmp_path: Path) -> None:
    plan = planned(tmp_path, "tiny:llama", [chat("long", "word", "answer " * 60)], packing_length=64, overlong="split")
    whole: list[BatchToken] = []
    for number in range(open_plan(plan)[0].num_packs):
        seen = seen_of(plan, number)
        (sample,) = seen.samples
        assert sample.start == len(whole)
        assert (f"from its token {sample.start:,}" in terminal(seen)) == (number > 0)
        assert not seen.tokens[0].loss, "nothing predicts the first token of a piece"
        whole += seen.tokens
    assert len({token.at for token in whole}) < len(whole), "it was split"
    assert "answer answer" in text_of(whole)


class TestBrokenData:
    @pytest.fixture
    def plan(self, tmp_path: Path) -> Path:
        return planned(tmp_path, "tiny:qwen3_vl", MEDIA)

    def test_a_medium_that_is_gone(self, run: Run, plan: Path) -> None:
        (plan.parent / "b.png").unlink()
        code, out, err = run("inspect", plan, "--pack", 0, "--batch")
        assert (code, err) == (0, "")
        for name in ("other (data.jsonl:2)", "both (data.jsonl:3)"):
            assert f"not in the batch: {name}: file not found: media: b.png" in out
        assert "2 samples" in out.splitlines()[0]
        (plan.parent / "a.png").write_bytes(b"no image")
        said = json.loads(run("inspect", plan, "--pack", 0, "--batch", "--json")[1])
        assert [sample["id"] for sample in said["samples"]] == ["text"]
        assert len(said["failures"]) == 3

    def test_nothing_is_left_of_a_pack(self, tmp_path: Path) -> None:
        plan = planned(tmp_path, "tiny:qwen3_vl", MEDIA[:1])
        (tmp_path / "a.png").unlink()
        seen = seen_of(plan)
        assert (seen.samples, len(seen.failures), len(seen.tokens)) == ((), 1, seen.padding)
        assert {token.kind for token in seen.tokens} == {"padding"}
        assert f"padding: {seen.padding} tokens" in terminal(seen)

    def test_a_medium_of_another_size(self, run: Run, plan: Path) -> None:
        Image.new("RGB", (700, 90)).save(plan.parent / "b.png")
        code, out, err = run("inspect", plan, "--pack", 0, "--batch")
        assert (code, out) == (1, "")
        assert "b.png 700x90, was 64x160" in err

    def test_data_and_tables_that_changed_or_moved(self, run: Run, plan: Path) -> None:
        data = plan.parent / "data.jsonl"
        text = data.read_text()
        data.write_text(text.replace("Compare", "compare"))
        code, out, err = run("inspect", plan, "--pack", 0, "--batch")
        assert (code, out) == (1, "")
        assert "has changed since it was measured" in err
        data.unlink()
        code, out, err = run("inspect", plan, "--pack", 0, "--batch")
        assert (code, "restore the file" in err) == (1, True)
        data.write_text(text)
        (plan.parent / "costs").rename(plan.parent / "moved")
        code, _, err = run("inspect", plan, "--pack", 0, "--batch")
        assert (code, "--costs" in err) == (1, True)
        assert run("inspect", plan, "--pack", 0, "--batch", "--costs", plan.parent / "moved")[0] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch",), ["--batch", "--pack"]),
        (("--pack", 0, "--all-tokens"), ["--all-tokens", "--batch"]),
        (("--pack", 0, "--attn-implementation", "sdpa"), ["--attn-implementation", "--batch"]),
        (("--pack", 0, "--batch", "--attn-implementation", "varlne"), ["did you mean 'varlen'?"]),
        (("--pack", 0, "--batch", "--attn-implementation", "varlen"), ["gemma3", "bidirectional"]),
        (("--pack", 9, "--batch"), ["--pack", "from 0 to 0"]),
        (("--pack", 0, "--epoch", 3, "--batch"), ["--epoch", "from 0 to 0"]),
    ],
)
def test_wrong_options(run: Run, tmp_path: Path, options: tuple[Any, ...], words: list[str]) -> None:
    plan = planned(tmp_path, "tiny:gemma3", MEDIA[3:])
    code, out, err = run("inspect", plan, *options)
    assert (code, out) == (2, "")
    for word in words:
        assert word in err


def test_without_torch(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, "tiny:llama", TEXT)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err = run("inspect", plan, "--pack", 0, "--batch")
    assert (code, out) == (2, "")
    assert "pip install 'packtrain[train]'" in err
