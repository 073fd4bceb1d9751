"""Cached tokens give the same batches bit by bit, in any process; what has changed behind their back is noticed."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from encoding import IMAGE_FAMILIES, TEXT_FAMILIES, VIDEO_FAMILIES, write_image
from kept_tokens import SAMPLES, Folder, assert_same, built, config, folder_of, no_tokenizing, packed, turn, write_data

from packtrain import MultiModalIterableDataset
from packtrain.core.errors import ConfigError, DataError, DriftError, RecordError
from packtrain.core.values import Extras, Media, MediaRef, Message, Record, Text, ToolCall, Variables
from packtrain.delivery.encode.encoded_sample import PackKey
from packtrain.delivery.encode.sample_tokens import SampleTokens, sample_key
from packtrain.families.family import Expansion
from packtrain.records import open as open_records

QUICK = ("qwen3_vl", "internvl", "llama")

# ---- the same bits


@pytest.mark.parametrize(
    "family",
    [
        *QUICK,
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in (*IMAGE_FAMILIES, *TEXT_FAMILIES)
            if name not in QUICK
        ),
    ],
)
def test_batches_are_those_without_a_cache(
    family: str, media: Path, model: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_data(tmp_path / "data.jsonl", family)
    given = config(data, model(family), media_root=str(media))
    modes = (given, replace(given, **packed()))
    plain = [built(replace(mode, cache_tokens=False)) for mode in modes]
    wanted = [list(dataset.loader()) for dataset in plain]
    assert {dataset.tokens for dataset in plain} == {None}
    assert sum(batch.info.supervised_tokens for batch in wanted[0]) < sum(batch.info.tokens for batch in wanted[0])
    assert bool(sum(batch.info.images for batch in wanted[0])) == (family in IMAGE_FAMILIES)
    assert bool(sum(batch.info.videos for batch in wanted[0])) == (family in VIDEO_FAMILIES)
    cached = [built(replace(mode, cache_tokens=True)) for mode in modes]
    assert len({folder_of(dataset) for dataset in cached}) == 1, "one cost table, one set of tokens"
    assert cached[0].tokens.not_kept == 0
    no_tokenizing(monkeypatch)
    for dataset, batches in zip(cached, wanted, strict=True):
        assert assert_same(dataset.loader(), batches) >= 1
    with pytest.raises(BaseException, match="tokenized again"):
        list(plain[0].loader())


def test_padded_rows_are_cached_unless_told_otherwise(data: Path, model: Folder) -> None:
    given = config(data, model("llama"))
    kept = {
        (packing, choice): replace(given, **(packed() if packing else {}), cache_tokens=choice).caches_tokens
        for packing in (True, False)
        for choice in (None, True, False)
    }
    assert list(kept.values()) == [False, True, False, True, True, False]
    with pytest.raises(ConfigError, match="cache_tokens: 'yes' instead of true or false"):
        replace(given, cache_tokens="yes")  # type: ignore[arg-type]


def test_pieces_of_samples(data: Path, model: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(data, "llama")
    more = packed(packing_length=24, overlong="split")
    given = config(data, model("llama"), **more)
    plain = built(given)
    wanted = list(plain.loader())
    assert any(pack.starts.any() for pack in map(plain.plan.epoch(0).pack, range(plain.plan.num_packs)))
    cached = built(replace(given, cache_tokens=True))
    no_tokenizing(monkeypatch)
    assert_same(cached.loader(), wanted)


def test_any_process_any_way_and_any_place_to_go_on_from(
    data: Path, model: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(data, model("qwen3_vl"), epochs=2)
    wanted = list(built(replace(given, cache_tokens=False)).loader())
    cached, streamed = built(given), built(given, MultiModalIterableDataset)
    no_tokenizing(monkeypatch)
    for dataset in (cached, streamed, pickle.loads(pickle.dumps(cached))):
        assert_same(dataset.loader(), wanted)
    assert_same(cached.loader(num_workers=1), wanted)
    loader = cached.loader()
    batches = iter(loader)
    next(batches)
    next(batches)
    state = loader.state_dict()
    plain = built(replace(given, cache_tokens=False)).loader()
    plain.load_state_dict(state)
    again = cached.loader()
    again.load_state_dict(state)
    monkeypatch.undo()
    rest = list(plain)
    no_tokenizing(monkeypatch)
    assert assert_same(again, rest) > 0
    assert len(pickle.dumps(cached)) < 100_000, "tokens travel as their folder"


# ---- what changes behind its back


def test_a_picture_of_another_size_is_noticed_as_ever(data: Path, model: Folder) -> None:
    for family in ("qwen3_vl", "idefics3"):
        given = config(data, model(family), packing_length=8192)
        write_data(data, family)
        write_image(data.parent / "large.png", 333, 250)
        said = []
        cached, plain = built(given), built(replace(given, cache_tokens=False))
        write_image(data.parent / "large.png", 700, 250)
        for dataset in (cached, plain):
            with pytest.raises(DriftError, match=r"found, .* planned") as caught:
                list(dataset.loader())
            said.append(str(caught.value))
        assert said[0] == said[1]


def test_pictures_that_changed_places_are_tokenized_again(data: Path, model: Folder) -> None:
    """As many tokens and patches as before, so no count tells; but the runs of media tokens have other lengths."""
    given = config(data, model("qwen3_vl"))
    cached, plain = built(given), built(replace(given, cache_tokens=False))
    before = list(cached.loader())
    for old, new in (("large.png", "other.png"), ("tall.png", "large.png"), ("other.png", "tall.png")):
        (data.parent / old).rename(data.parent / new)
    after = list(cached.loader())
    assert_same(after, plain.loader())
    assert any(not torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(before, after, strict=True))


def test_a_text_that_changed_is_noticed_as_ever(data: Path, model: Folder) -> None:
    dataset = built(config(data, model("qwen3_vl")))
    data.write_text(data.read_text().replace("learned", "altered"))
    with pytest.raises(DataError, match="has changed since it was measured"):
        list(dataset.loader())


def _rewritten(data: Path, word: str) -> None:
    """Records in columns, as large and as old as before: only their content tells."""
    before = data.stat() if data.exists() else None
    rows = [{"id": f"r{n}", "messages": [turn("user", f"what {n}"), turn("assistant", word)]} for n in range(4)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, data, compression="none", use_dictionary=False)
    if before is not None:
        assert data.stat().st_size == before.st_size
        os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    open_records._reader_of_process.cache_clear()  # a later run has not read the file before


def test_a_record_that_changed_unseen_is_refused_as_without_a_cache(tmp_path: Path, model: Folder) -> None:
    data = tmp_path / "data.parquet"
    _rewritten(data, "it is two")
    given = config(data, model("llama"))
    assert list(built(given).loader())
    _rewritten(data, "it is one")
    for cached in (True, False):
        with pytest.raises(DataError, match="has changed since it was measured"):
            list(built(replace(given, cache_tokens=cached)).loader())


def test_all_that_decides_the_text_side_is_in_the_key_of_a_sample() -> None:
    def coded(*messages: Message, **more: Any) -> int:
        return sample_key(Record(id="r", origin="o", source="s", messages=messages, **more), ())

    photo, clip = (Media(kind, MediaRef(name="m", path="m")) for kind in ("image", "video"))
    said = Message(role="user", parts=(photo, Text("ab"), Text("c\ud800")))
    others = [
        coded(said),
        coded(said, plain=True),
        coded(said, said),
        coded(replace(said, role="system")),
        coded(replace(said, train=False)),
        coded(replace(said, parts=(clip, *said.parts[1:]))),
        coded(replace(said, parts=(said.parts[1], photo, said.parts[2]))),
        coded(replace(said, parts=(photo, Text("a"), Text("bc\ud800")))),
        coded(replace(said, parts=(photo, Text("ab"), Text("d\ud800")))),
        *(coded(replace(said, extras=Extras(reasoning=thought))) for thought in ("a", "b")),
        *(coded(replace(said, extras=Extras(tool_calls=(ToolCall("f", call),)))) for call in ("{}", '{"a": 1}')),
        *(coded(said, variables=Variables(tools)) for tools in ("[1]", "[2]")),
        *(coded(said, variables=Variables(kwargs=(("a", flag),))) for flag in (True, False, None)),
    ]
    assert len(set(others)) == len(others)
    elsewhere = Media("image", MediaRef(name="n", path="n"))
    assert coded(replace(said, parts=(elsewhere, *said.parts[1:]))) == coded(said), "only expansions count of media"
    record = Record(id="r", origin="o", source="s", messages=(said,))
    sizes = [(), *((Expansion(pieces=("<i>",), patches=patches, max_patches=4),) for patches in (4, 8))]
    assert len({sample_key(record, expansions) for expansions in sizes}) == 3


def test_what_cannot_be_tokenized_is_left_to_reading(
    data: Path, model: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is counted where it is without a cache."""
    real = SampleTokens.of.__func__  # type: ignore[attr-defined]

    def fails(cls: Any, layout: Any, tokenizer: Any) -> SampleTokens:
        if "what is 3?" in layout.text:
            raise RecordError("template", "planted")
        return real(cls, layout, tokenizer)  # type: ignore[no-any-return]

    monkeypatch.setattr(SampleTokens, "of", classmethod(fails))
    given = config(data, model("qwen3_vl"))
    cached, plain = built(given), built(replace(given, cache_tokens=False))
    assert (cached.tokens.not_kept, len(cached.tokens)) == (1, SAMPLES)
    rows = [[dataset.source[PackKey(0, pack)] for pack in range(SAMPLES)] for dataset in (cached, plain)]
    failures = [[row.failures for row in found if row.failures] for found in rows]
    assert failures[0] == failures[1]
    assert [one.reason for (one,) in failures[0]] == ["planted"]
