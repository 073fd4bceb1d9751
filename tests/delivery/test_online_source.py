"""Packs from a stream that was not measured: each sample once in a pass, the same for all, resumed anywhere."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from packtrain.core.errors import ArtifactError, DataError, RecordError
from packtrain.core.values import Cost, LedgerEntry, Record
from packtrain.delivery.collate.collators import PackCollator
from packtrain.delivery.encode.encoded_sample import EncodedSample, PackedRow, PackKey
from packtrain.delivery.encode.synthetic_samples import synthetic_sample
from packtrain.delivery.loader.pack_loader import PackLoader
from packtrain.delivery.online_source import Arrival, EntryPlace, OnlineSource, SourceStream
from packtrain.families import tiny
from packtrain.families.contracts import contract_for
from packtrain.measuring.request import Request, stream_inputs
from packtrain.packing.online import OnlineSchedule
from packtrain.packing.packing_config import PackingConfig
from packtrain.records.open import open_sources
from packtrain.records.source import Entry, SourceSpec

LONG, UNUSABLE, BROKEN, LONGER = 100, -1, 11, 13  # sizes of samples with which something is wrong


class Stream:
    """Entries whose text is their size. Counts what is read."""

    def __init__(self, sizes: Sequence[int], per_unit: int = 7) -> None:
        self.sizes, self.per_unit = list(sizes), per_unit
        self.reads: list[int] = []

    def read(self, start: EntryPlace) -> Iterator[Arrival]:
        for number in range(start.unit * self.per_unit + start.entry, len(self.sizes)):
            self.reads.append(number)
            size = self.sizes[number]
            value = {"id": f"s{number}", "text": "x" * size} if size != UNUSABLE else {"odd": 1}
            place = EntryPlace(*divmod(number, self.per_unit))
            yield Arrival(place=place, source=number // 5 % 2, entry=Entry(origin=f"stream:{number}", value=value))


class Rule:
    """A token for each letter."""

    def compute_costs(self, batch: Sequence[Any], store: Any) -> list[Any]:
        sizes = [len(sized.record.messages[0].parts[0].text) for sized in batch]
        return [(Cost(tokens=n, text_tokens=n, supervised_tokens=n - 1), ()) for n in sizes]


class Encoder:
    """Ids that say which sample they are of. Remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, record: Record, store: Any) -> EncodedSample:
        self.asked.append(record.id)
        tokens = len(record.messages[0].parts[0].text)
        if tokens == BROKEN:
            raise RecordError("decode", "image is damaged", "at byte 7")
        tokens += 2 * (tokens == LONGER)
        return synthetic_sample(record.id, torch.full((tokens,), int(record.id[1:]) + 10), supervised=tokens - 1)


def request(**more: Any) -> Request:
    specs = tuple(SourceSpec(name=name, path="data", format="jsonl", media_root=".") for name in ("a", "b"))
    return Request(specs=specs, model="none", **more)


def make(sizes: Sequence[int], buffer: int = 4, limits: Any = None, **more: Any) -> OnlineSource:
    config = PackingConfig(packing_length=20, packing_buffer=buffer, **(limits or {}))
    made = {"stream": Stream(sizes), "rule": Rule(), "encoder": Encoder(), "read_ahead": 3, "num_packs": 400, **more}
    return OnlineSource(request(), config, **made)


def shown(row: PackedRow) -> tuple[Any, ...]:
    return row.key, [(s.id, s.input_ids.tolist()) for s in row.samples], row.failures


def pack(source: OnlineSource, number: int) -> PackedRow:
    return source[PackKey(epoch=0, pack=number)]


def state_of(source: OnlineSource) -> dict[str, Any]:
    """As it is read back from a checkpoint."""
    return json.loads(json.dumps(source.state_dict()))


def rows(source: OnlineSource, first: int = 0) -> list[tuple[Any, ...]]:
    """The packs up to the end of the pass."""
    found: list[tuple[Any, ...]] = []
    source.lengths(first)
    epoch = source.state_dict()["epoch"]
    while True:
        source.lengths(first + len(found))
        if source.state_dict()["epoch"] > epoch:  # the next one is of the next pass
            return found
        found.append(shown(pack(source, first + len(found))))


def accounted(found: Sequence[tuple[Any, ...]]) -> Counter[str]:
    """How often each entry was delivered or written off."""
    delivered = Counter(name for _, samples, _ in found for name, _ in samples)
    return delivered + Counter("s" + entry.origin.split(":")[1] for _, _, left_out in found for entry in left_out)


SIZES = [6, 5, LONG, 4, 11, UNUSABLE, 3, 20, 1, 7, 13, 2, 2, UNUSABLE, 9, 9, 16, 12, 8, 1, 1, 5, UNUSABLE, LONG]
kinds = st.sampled_from([2, 3, 5, 8, 13, 20, BROKEN, LONG, UNUSABLE])
streams = st.lists(kinds, min_size=1, max_size=10) | st.lists(kinds, min_size=20, max_size=60)


def once(num: int) -> dict[str, int]:
    return {f"s{number}": 1 for number in range(num)}


# ---- the contract


@settings(max_examples=25, deadline=None)
@given(sizes=streams, world_size=st.integers(1, 4), buffer=st.integers(1, 9))
def test_every_entry_is_delivered_or_written_off_exactly_once(sizes: list[int], world_size: int, buffer: int) -> None:
    whole = rows(make(sizes, buffer))
    assert accounted(whole) == once(len(sizes))
    assert all(sum(len(ids) for _, ids in samples) <= 20 for _, samples, _ in whole)
    for rank in range(world_size):  # whoever asks for some of them gets the same ones
        source = make(sizes, buffer)
        own = range(rank, len(whole), world_size)
        assert [shown(pack(source, number)) for number in own] == [whole[number] for number in own]


@pytest.mark.parametrize("buffer", [1, 5, 100])
def test_resumes_exactly_at_every_step(buffer: int) -> None:
    source = make(SIZES, buffer)
    whole, states = [], [state_of(source)]
    for number in range(18):
        row = pack(source, number)
        whole.append(shown(row))
        states.append(state_of(source))
        assert row.stream == source.state_dict()
    assert states[-1]["epoch"] >= 1, "else no pass has ended"
    for step, state in enumerate(states):
        again = make(SIZES, buffer)
        again.load_state_dict(state)
        assert state_of(again) == state
        rest = [shown(pack(again, number)) for number in range(step, 18)]
        assert rest == whole[step:], f"resume at step {step} diverges"


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(kinds, min_size=20, max_size=60),
    saved=st.integers(0, 12),
    asked=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    buffer=st.integers(1, 9),
)
def test_a_pack_is_the_same_wherever_one_comes_from(
    sizes: list[int], saved: int, asked: list[int], buffer: int
) -> None:
    """From a state before it or behind it, after a later one, or again."""
    fresh = [shown(pack(make(sizes, buffer), number)) for number in asked]
    source, before = make(sizes, buffer), make(sizes, buffer)
    source.lengths(saved)
    before.load_state_dict(state_of(source))
    for number, expected in zip(asked, fresh, strict=True):
        assert shown(pack(before, number)) == expected


def test_only_what_is_asked_for_is_encoded() -> None:
    encoders = [Encoder() for _ in range(3)]
    for rank, encoder in enumerate(encoders):
        source = make([5] * 40, encoder=encoder)
        for number in range(rank, 10, 3):
            pack(source, number)
    asked = [name for encoder in encoders for name in encoder.asked]
    assert sorted(asked) == sorted(once(40))
    assert all(encoder.asked for encoder in encoders)


def test_resuming_reads_from_the_first_that_waits_and_encodes_nothing_before() -> None:
    sizes = [5, 6, 7, 8] * 50
    whole = make(sizes)
    pack(whole, 39)
    state, stream, encoder = state_of(whole), Stream(sizes), Encoder()
    first = min(EntryPlace.of_key(key) for key, *_ in state["packer"]["waiting"])
    again = make(sizes, stream=stream, encoder=encoder)
    again.load_state_dict(state)
    assert not stream.reads, "nothing before it is asked for"
    row = pack(again, 40)
    assert min(stream.reads) == first.unit * stream.per_unit + first.entry > 80
    assert encoder.asked == [sample.id for sample in row.samples]


def test_the_buffer_lets_packs_be_fuller() -> None:
    sizes = [12, 9, 3, 11, 8, 7, 13, 1] * 20
    packs = [len(rows(make(sizes, buffer))) for buffer in (1, 30)]
    assert packs[1] < packs[0]
    assert packs[1] <= 1.06 * sum(sizes) / 20


# ---- what cannot be used


def test_what_is_left_out_says_why() -> None:
    found = [entry for _, _, failures in rows(make([5, LONG, UNUSABLE, BROKEN, 3])) for entry in failures]
    by_id = {entry.origin: entry for entry in found}
    assert by_id["stream:1"].reason == "fits no pack"
    assert by_id["stream:1"].filtered, "dropping it is what the user chose"
    assert "packing_length 20" in by_id["stream:1"].detail
    assert by_id["stream:2"].stage == "schema"
    assert not by_id["stream:2"].filtered
    assert by_id["stream:3"] == LedgerEntry(
        id="s3", origin="stream:3", stage="deliver", reason="image is damaged", detail="decode: at byte 7"
    )


def test_a_stream_of_rubbish_is_told_of_and_does_not_run_on_in_silence() -> None:
    found = rows(make([UNUSABLE] * 25, report_after=10))
    assert [len(failures) for *_, failures in found] == [10, 10, 5]
    assert accounted(found) == once(25)
    stream = Stream([UNUSABLE] * 1000)
    pack(make([], stream=stream, report_after=10), 0)
    assert len(stream.reads) < 15
    with pytest.raises(DataError, match="no entries"):
        pack(make([]), 0)


def test_samples_that_turn_out_longer_never_overfill_a_pack() -> None:
    found = rows(make([LONGER, 7, 5, LONGER, 4], buffer=9))
    assert accounted(found) == once(5)
    (late,) = [entry for *_, failures in found for entry in failures]
    assert late.reason == "longer than estimated"


def test_overlong_samples_may_be_an_error() -> None:
    with pytest.raises(DataError, match="100 tokens, packing_length 20"):
        rows(make([5, LONG], limits={"overlong": "error"}))


def test_reading_faults_are_tried_again_and_then_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flaky(Encoder):
        faults = 2

        def encode(self, record: Record, store: Any) -> EncodedSample:
            self.faults -= 1
            if self.faults >= 0:
                raise OSError("stale handle")
            return super().encode(record, store)

    pauses: list[float] = []
    monkeypatch.setattr("packtrain.core.retries.sleep", pauses.append)
    assert len(rows(make([5, 5], encoder=Flaky()))) == 1
    assert len(pauses) == 2
    gone = Flaky()
    gone.faults = 99
    source = make([5, 5], encoder=gone)
    with pytest.raises(DataError, match="stale handle"):
        pack(source, 0)
    assert source.state_dict()["packs"] == 0
    again = make([5, 5])
    again.load_state_dict(state_of(source))
    assert accounted(rows(again)) == once(2), "a pack that was not handed out is not lost"


# ---- states


@pytest.mark.parametrize(
    "change", [{"version": 1}, {"inputs": "x"}, {"packer": {}}, {"place": None}, {"tokens": {"a": 1}}, {"ready": [1]}]
)
def test_foreign_states_are_refused(change: dict[str, Any]) -> None:
    source = make(SIZES)
    pack(source, 0)
    with pytest.raises(ArtifactError):
        make(SIZES).load_state_dict({**state_of(source), **change})
    with pytest.raises(ArtifactError, match="other limits"):
        make(SIZES, limits={"max_images_per_pack": 3}).load_state_dict(state_of(source))


def test_a_stream_that_lost_what_waits_is_refused() -> None:
    source = make([5] * 30)
    pack(source, 2)
    again = make([5] * 9)
    again.load_state_dict(state_of(source))
    with pytest.raises(DataError, match="1 entry of the saved state missing"):
        pack(again, 3)


def test_a_state_saved_after_a_reading_fault_has_lost_nothing() -> None:
    class Faulty(Stream):
        mended = False

        def read(self, start: EntryPlace) -> Iterator[Arrival]:
            for arrival in super().read(start):
                if arrival.entry.origin == "stream:9" and not self.mended:
                    raise OSError("the disk is gone")
                yield arrival

    sizes = [5, 5, LONG, UNUSABLE, 5, UNUSABLE, LONG, 5, 5, 5, 5, 5]
    stream = Faulty(sizes)
    source = make(sizes, buffer=20, stream=stream)
    with pytest.raises(OSError, match="the disk is gone"):
        pack(source, 0)
    assert state_of(source)["left_out"], "else nothing was tested"
    again = make(sizes, buffer=20)
    again.load_state_dict(state_of(source))
    assert accounted(rows(again)) == once(len(sizes))
    with pytest.raises(OSError, match="the disk is gone"):  # not the end of the stream
        pack(source, 0)
    stream.mended = True
    assert accounted(rows(source)) == once(len(sizes))


def test_passes_follow_each_other() -> None:
    source = make(SIZES)
    first = rows(source)
    second = rows(source, first=len(first))
    assert [row[0].pack for row in first + second] == list(range(2 * len(first)))
    assert [row[1:] for row in first] == [row[1:] for row in second]


# ---- in a loader


def only(batch: list[PackedRow]) -> PackedRow:
    (row,) = batch
    return row


def loader(source: OnlineSource, **more: Any) -> PackLoader:
    schedule = OnlineSchedule(source.plan, packs_per_step=2)
    return PackLoader(source, schedule, only, span="run", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_order_does_not_depend_on_workers_or_ranks(workers: int) -> None:
    source = make(SIZES * 3)
    whole = [shown(pack(source, number))[1:] for number in range(20)]
    for world_size in (1, 2):
        found: dict[int, Any] = {}
        for rank in range(world_size):
            mine = loader(make(SIZES * 3, num_packs=20), rank=rank, world_size=world_size, num_workers=workers)
            found |= {row.key.pack: shown(row)[1:] for row in mine}
        assert [found[number] for number in range(20)] == whole


class FileStream(Stream):
    """Reads its sizes from an open file, whose position forked processes would share."""

    def __init__(self, path: Path, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self.path = path
        path.write_bytes(b"".join(b"%8d" % size for size in sizes))

    def read(self, start: EntryPlace) -> Iterator[Arrival]:
        file = os.open(self.path, os.O_RDONLY)
        os.lseek(file, 8 * (start.unit * self.per_unit + start.entry), os.SEEK_SET)
        try:
            for arrival in super().read(start):
                assert int(os.read(file, 8)) == self.sizes[int(arrival.entry.origin.split(":")[1])]
                yield arrival
        finally:
            os.close(file)


def test_workers_do_not_share_an_open_file(tmp_path: Path) -> None:
    sizes = list(range(1, 20)) * 5
    whole = rows(make(sizes))
    source = make(sizes, stream=FileStream(tmp_path / "sizes", sizes), num_packs=len(whole) // 2 * 2)
    assert [shown(pack(source, number)) for number in range(5)] == whole[:5]
    found = [(row.key.pack, *shown(row)[1:]) for row in loader(source, rank=0, world_size=1, num_workers=2)]
    assert found == [(row[0].pack, *row[1:]) for row in whole[: len(found)]] != []


def test_it_pickles_in_the_middle() -> None:
    source = make(SIZES)
    pack(source, 0)
    again = pickle.loads(pickle.dumps(source))
    assert rows(again, first=1) == rows(source, first=1)


# ---- real data and a real tokenizer


def write_records(folder: Path, with_images: bool) -> None:
    """Two files of conversations; every second one shows an image where they are asked for."""
    for number, size in enumerate([(60, 40), (90, 120), (32, 200)]):
        Image.new("RGB", size, (80 * number, 9, 9)).save(folder / f"{number}.png")
    for part in range(2):
        lines = []
        for n in range(30):
            question: Any = [{"type": "text", "text": "why? " * (n % 7)}]
            if with_images and n % 2:
                question.insert(0, {"type": "image", "image": f"{n % 3}.png"})
            answer = [{"type": "text", "text": "because " * (1 + n % 5)}]
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"id": f"{part}-{n}", "messages": messages}) + "\n")
        (folder / f"{part}.jsonl").write_text("".join(lines))


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen3_vl", marks=pytest.mark.full)])
def test_real_files_through_the_collator(tmp_path: Path, family: str) -> None:
    model = tiny.write(family, tmp_path / "model")
    write_records(tmp_path, with_images=family == "qwen3_vl")
    specs = tuple(open_sources(str(tmp_path / "*.jsonl")))
    asked = Request(specs=specs, model=str(model))
    config = PackingConfig(packing_length=512, packing_buffer=16)
    source = OnlineSource(asked, config, num_packs=100)
    collate = PackCollator(contract_for(asked.settings()), pad_id=0, capacity=512)
    whole = rows(source)
    found = [collate([pack(source, number)]) for number in range(len(whole))]
    assert Counter(name for batch in found for name in batch.info.ids) == Counter(
        f"{part}-{n}" for part in range(2) for n in range(30)
    )
    assert not any(batch.info.failures for batch in found), "the rule is exact"
    assert sum(batch.info.tokens for batch in found[:-1]) / (512 * (len(found) - 1)) > 0.85
    assert sum(batch.info.images for batch in found) == (30 if family == "qwen3_vl" else 0)
    for step in (0, len(found) // 2):
        again = OnlineSource(asked, config, num_packs=100)
        state = found[step].info.stream
        assert state is not None
        again.load_state_dict(state)
        for number, other in enumerate(found[step + 1 :], step + 1):
            one = collate([pack(again, number)])
            assert all(torch.equal(one[name], other[name]) for name in other if name != "use_cache")
            assert one.info == other.info


def test_a_stream_of_sources_begins_anywhere(tmp_path: Path) -> None:
    for part in range(2):
        (tmp_path / f"{part}.jsonl").write_text("".join(f'{{"text": "{part} {n}"}}\n' for n in range(4)))
    stream = SourceStream(open_sources(str(tmp_path / "*.jsonl")))
    whole = list(stream.read(EntryPlace()))
    assert [a.entry.value["text"] for a in whole] == [f"{part} {n}" for part in range(2) for n in range(4)]
    for number, arrival in enumerate(whole):
        assert [a.place for a in stream.read(arrival.place)] == [a.place for a in whole[number:]]
    behind = EntryPlace(whole[3].place.unit, whole[3].place.entry + 1)
    assert [a.place for a in stream.read(behind)] == [a.place for a in whole[4:]]


def test_a_state_goes_on_where_data_and_model_were_moved_to(tmp_path: Path) -> None:
    def online(folder: Path) -> OnlineSource:
        asked = Request(specs=tuple(open_sources(str(folder / "*.jsonl"))), model=str(folder / "model"))
        return OnlineSource(asked, PackingConfig(packing_length=256, packing_buffer=8), num_packs=100)

    home = tmp_path / "home"
    tiny.write("qwen2", home / "model")
    write_records(home, with_images=False)
    source = online(home)
    pack(source, 0)
    state = state_of(source)
    rest = rows(source, first=1)
    there = home.rename(tmp_path / "there")
    again = online(there)
    again.load_state_dict(state)
    assert rows(again, first=1) == rest != []
    with (there / "0.jsonl").open("a") as lines:
        lines.write('{"text": "more"}\n')
    online(there).load_state_dict(state)  # a stream may grow
    for changed in ("0.jsonl", "model/chat_template.jinja"):
        path, text = there / changed, (there / changed).read_text()
        path.write_text(" " + text)
        with pytest.raises(ArtifactError, match="other data, another model"):
            online(there).load_state_dict(state)
        path.write_text(text)


def test_streams_that_begin_with_the_same_words_are_others(tmp_path: Path) -> None:
    """As all of one kind do that have the same system prompt."""
    states = []
    for number, folder in enumerate((tmp_path / "one", tmp_path / "two")):
        folder.mkdir()
        (folder / "train.jsonl").write_text(json.dumps({"text": "You are helpful. " * 40 + f"Number {number}"}) + "\n")
        asked = Request(specs=tuple(open_sources(str(folder / "train.jsonl"))), model="none")
        states.append(stream_inputs(asked))
    assert states[0]["begins"] != states[1]["begins"]
    assert states[0]["request"] == states[1]["request"], "nothing else would tell"
