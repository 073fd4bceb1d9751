"""Packs from a stream that was not measured: each sample once, on any number of ranks, resumed anywhere."""

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
from torch.utils.data import DataLoader

from packtrain.core.errors import ArtifactError, ConfigError, DataError, RecordError
from packtrain.core.values import Cost, LedgerEntry, Record
from packtrain.delivery.collate.packed import PackCollator
from packtrain.delivery.encode.encoded_sample import EMPTY_PACK, EncodedSample, PackedRow
from packtrain.delivery.encode.synthetic_samples import made_sample
from packtrain.delivery.online.entry_stream import Arrival, EntryPlace, SourceStream
from packtrain.delivery.online.online_dataset import OnlineDataset
from packtrain.families import tiny
from packtrain.families.contracts import contract_for
from packtrain.measuring.inputs import stream_inputs
from packtrain.measuring.request import Filters, Request
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

    def price(self, batch: Sequence[Any], store: Any) -> list[Any]:
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
        return made_sample(record.id, torch.full((tokens,), int(record.id[1:]) + 10), supervised=tokens - 1)


def request(**more: Any) -> Request:
    specs = tuple(SourceSpec(name=name, path="data", format="jsonl", media_root=".") for name in ("a", "b"))
    return Request(specs=specs, model="none", **more)


def make(
    sizes: Sequence[int], rank: int = 0, world: int = 1, buffer: int = 4, limits: Any = None, **more: Any
) -> OnlineDataset:
    config = PackingConfig(packing_length=20, packing_buffer=buffer, **(limits or {}))
    made = {"stream": Stream(sizes), "rule": Rule(), "encoder": Encoder(), "read_ahead": 3, **more}
    return OnlineDataset(request(), config, rank=rank, world=world, **made)


def shown(row: PackedRow) -> tuple[Any, ...]:
    return row.key, [(s.id, s.input_ids.tolist()) for s in row.samples], row.failures


def rows(dataset: OnlineDataset) -> list[tuple[Any, ...]]:
    return [shown(row) for row in dataset]


def saved(dataset: OnlineDataset) -> dict[str, Any]:
    return json.loads(json.dumps(dataset.state_dict()))


def accounted(found: Sequence[tuple[Any, ...]]) -> Counter[str]:
    """How often each entry was delivered or written off."""
    delivered = Counter(name for _, samples, _ in found for name, _ in samples)
    return delivered + Counter("s" + entry.origin.split(":")[1] for _, _, left_out in found for entry in left_out)


SIZES = [6, 5, LONG, 4, 11, UNUSABLE, 3, 20, 1, 7, 13, 2, 2, UNUSABLE, 9, 9, 16, 12, 8, 1, 1, 5, UNUSABLE, LONG]
kinds = st.sampled_from([2, 3, 5, 8, 13, 20, BROKEN, LONG, UNUSABLE])
streams = st.lists(kinds, max_size=10) | st.lists(kinds, min_size=20, max_size=60)


def once(num: int) -> dict[str, int]:
    return {f"s{number}": 1 for number in range(num)}


# ---- the contract


@settings(max_examples=60, deadline=None)
@given(sizes=streams, world=st.integers(1, 4), buffer=st.integers(1, 9))
def test_every_entry_is_delivered_or_written_off_exactly_once(sizes: list[int], world: int, buffer: int) -> None:
    ranks = [rows(make(sizes, rank, world, buffer)) for rank in range(world)]
    assert len({len(found) for found in ranks}) == 1, "all ranks get equally many rows"
    together = [row for found in ranks for row in found]
    assert accounted(together) == once(len(sizes))
    assert all(sum(len(ids) for _, ids in samples) <= 20 for _, samples, _ in together)
    numbers = [row[0].pack for turn in zip(*ranks, strict=True) for row in turn]
    assert [n for n in numbers if n != EMPTY_PACK] == list(range(sum(n != EMPTY_PACK for n in numbers)))


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 3)])
@pytest.mark.parametrize("buffer", [1, 5, 100])
def test_resumes_exactly_at_every_step(rank: int, world: int, buffer: int) -> None:
    whole, states, it = [], [], make(SIZES, rank, world, buffer)
    while True:
        states.append(saved(it))
        try:
            whole.append(shown(next(it)))
        except StopIteration:
            break
    assert whole, "nothing was produced, so nothing was tested"
    for step, state in enumerate(states):
        again = make(SIZES, rank, world, buffer)
        again.load_state_dict(state)
        assert saved(again) == state
        assert rows(again) == whole[step:], f"resume at step {step} diverges"


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(kinds, min_size=20, max_size=60),
    world=st.integers(1, 4),
    other=st.integers(1, 5),
    share=st.floats(0, 1),
    buffer=st.integers(1, 9),
)
def test_goes_on_with_another_number_of_ranks(
    sizes: list[int], world: int, other: int, share: float, buffer: int
) -> None:
    step = round(share * len(rows(make(sizes, 0, world, buffer))))
    before, states = [], []
    for rank in range(world):
        dataset = make(sizes, rank, world, buffer)
        before += [shown(next(dataset)) for _ in range(step)]
        states.append(saved(dataset))
    assert all(state == states[0] for state in states), "a state is the same on every rank"
    after = []
    for rank in range(other):
        dataset = make(sizes, rank, other, buffer)
        dataset.load_state_dict(states[0])
        after += rows(dataset)
    assert accounted(before + after) == once(len(sizes))


def test_only_the_own_packs_are_encoded() -> None:
    encoders = [Encoder() for _ in range(3)]
    for rank, encoder in enumerate(encoders):
        rows(make([5] * 40, rank, 3, encoder=encoder))
    asked = [name for encoder in encoders for name in encoder.asked]
    assert sorted(asked) == sorted(once(40))
    assert all(encoder.asked for encoder in encoders)


def test_resuming_reads_from_the_first_that_waits_and_encodes_nothing_before() -> None:
    sizes = [5, 6, 7, 8] * 50
    whole = make(sizes)
    for _ in range(40):
        next(whole)
    state, stream, encoder = saved(whole), Stream(sizes), Encoder()
    first = min(EntryPlace.of_key(key) for key, *_ in state["packer"]["waiting"])
    again = make(sizes, stream=stream, encoder=encoder)
    again.load_state_dict(state)
    assert not stream.reads, "nothing before it is asked for"
    row = next(again)
    assert min(stream.reads) == first.unit * stream.per_unit + first.entry > 80
    assert encoder.asked == [sample.id for sample in row.samples]


def test_the_buffer_lets_packs_be_fuller() -> None:
    sizes = [12, 9, 3, 11, 8, 7, 13, 1] * 20
    packs = [len(rows(make(sizes, buffer=buffer))) for buffer in (1, 30)]
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
    for world in (1, 2):
        ranks = [rows(make([UNUSABLE] * 25, rank, world, report_after=10)) for rank in range(world)]
        together = [row for found in ranks for row in found]
        assert sorted(len(failures) for *_, failures in together if failures) == [5, 10, 10]
        assert accounted(together) == once(25)
    stream = Stream([UNUSABLE] * 1000)
    next(make([], stream=stream, report_after=10))
    assert len(stream.reads) < 15


def test_samples_that_turn_out_longer_are_measured_and_never_overfill_a_pack() -> None:
    dataset = make([LONGER, 7, 5, LONGER, 4], buffer=9)
    found = rows(dataset)
    assert accounted(found) == once(5)
    (late,) = [entry for *_, failures in found for entry in failures]
    assert late.reason == "longer than estimated"
    assert (dataset.error.samples, dataset.error.differing, dataset.error.largest) == (5, 2, 2)
    assert dataset.error.relative == pytest.approx(4 / 42)
    assert str(dataset.error) == "2 of 5 samples differ from their estimate, by at most 2 tokens (+9.52% of all)"


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
    dataset = make([5, 5], encoder=gone)
    before = saved(dataset)
    with pytest.raises(DataError, match="stale handle"):
        next(dataset)
    again = make([5, 5])
    again.load_state_dict(saved(dataset))
    assert accounted(rows(again)) == once(2), "a row that was not handed out is not lost"
    assert before["packs"] == saved(dataset)["packs"] == 0


@pytest.mark.parametrize(
    "limits",
    [
        {"overlong": "truncate"},
        {"overlong": "split"},
        {"packing_drop_last": True},
        {"max_packs": 3},
        {"pack_alignment": 2},
        {"packing_strategy": "wrapped"},
        {"packing_strategy": "my_packer:pack"},
    ],
    ids=str,
)
def test_what_needs_all_samples_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="measure the data first"):
        make([5], limits=limits)


def test_mixtures_limits_and_odd_ranks_are_refused() -> None:
    config = PackingConfig(packing_length=20)
    spec = SourceSpec(name="a", path="data", format="jsonl", media_root=".", repeats=2.0)
    with pytest.raises(ConfigError, match="repeats or weights of a"):
        OnlineDataset(Request(specs=(spec,), model="none"), config, encoder=Encoder())
    with pytest.raises(ConfigError, match="limit"):
        OnlineDataset(request(filters=Filters(limit=3)), config, encoder=Encoder())
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        make([5], rank=2, world=2)


# ---- states


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"inputs": "x"}, {"packer": {}}, {"place": None}, {"tokens": {"a": 1}}, {"ready": [1]}]
)
def test_foreign_states_are_refused(change: dict[str, Any]) -> None:
    dataset = make(SIZES)
    next(dataset)
    with pytest.raises(ArtifactError):
        make(SIZES).load_state_dict({**saved(dataset), **change})
    with pytest.raises(ArtifactError, match="other limits"):
        make(SIZES, limits={"max_images_per_pack": 3}).load_state_dict(saved(dataset))


def test_a_stream_that_lost_what_waits_is_refused() -> None:
    dataset = make([5] * 30)
    for _ in range(3):
        next(dataset)
    again = make([5] * 9)
    again.load_state_dict(saved(dataset))
    with pytest.raises(DataError, match="that waited when the state was saved are not there"):
        next(again)


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
    dataset = make(sizes, buffer=20, stream=stream)
    with pytest.raises(OSError, match="the disk is gone"):
        next(dataset)
    assert saved(dataset)["left_out"], "else nothing was tested"
    again = make(sizes, buffer=20)
    again.load_state_dict(saved(dataset))
    assert accounted(rows(again)) == once(len(sizes))
    with pytest.raises(OSError, match="the disk is gone"):  # not the end of the stream
        next(dataset)
    stream.mended = True
    assert accounted([shown(next(dataset)) for _ in range(2)]) == once(len(sizes))


def test_epochs_follow_each_other_and_a_state_between_them_leads_into_the_next() -> None:
    dataset = make(SIZES)
    first, between, second = rows(dataset), saved(dataset), rows(dataset)
    assert [row[0].epoch for row in first + second] == [0] * len(first) + [1] * len(first)
    assert [row[1:] for row in first] == [row[1:] for row in second]
    again = make(SIZES)
    again.load_state_dict(between)
    assert rows(again) == second


# ---- in a loader


def only(batch: list[PackedRow]) -> PackedRow:
    (row,) = batch
    return row


@pytest.mark.parametrize("start", [0, 3])
def test_the_order_does_not_depend_on_workers(start: int) -> None:
    whole = rows(make(SIZES * 3, 1, 2))
    for workers in (0, 1, 2):
        dataset = make(SIZES * 3, 1, 2)
        dataset.skip(start)
        loader = DataLoader(dataset, batch_size=1, collate_fn=only, num_workers=workers)
        assert [shown(row) for row in loader] == whole[start:], f"{workers} workers"


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
    dataset = make(sizes, stream=FileStream(tmp_path / "sizes", sizes))
    assert [shown(next(dataset)) for _ in range(5)] == whole[:5]
    loader = DataLoader(dataset, batch_size=1, collate_fn=only, num_workers=2)
    assert [shown(row) for row in loader] == whole[5:]


def test_skipping_gives_the_state_that_workers_cannot() -> None:
    taken = make(SIZES)
    for _ in range(3):
        next(taken)
    encoder = Encoder()
    skipped = make(SIZES, encoder=encoder)
    skipped.skip(3)
    assert saved(skipped) == saved(taken)
    assert not encoder.asked
    with pytest.raises(DataError, match="end of the stream"):
        skipped.skip(1000)


def test_it_pickles_in_the_middle() -> None:
    dataset = make(SIZES)
    next(dataset)
    again = pickle.loads(pickle.dumps(dataset))
    assert rows(again) == rows(dataset)


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
    dataset = OnlineDataset(asked, config)
    collate = PackCollator(contract_for(asked.settings()), pad_id=0, capacity=512)
    found, states = [], []
    for row in dataset:
        found.append(collate([row]))
        states.append(saved(dataset))
    assert Counter(name for batch in found for name in batch.info.ids) == Counter(
        f"{part}-{n}" for part in range(2) for n in range(30)
    )
    assert dataset.error.samples == 60
    assert dataset.error.differing == 0, "the rule is exact"
    assert sum(batch.info.tokens for batch in found[:-1]) / (512 * (len(found) - 1)) > 0.85
    assert sum(batch.info.images for batch in found) == (30 if family == "qwen3_vl" else 0)
    for step in (0, len(found) // 2):
        again = OnlineDataset(asked, config)
        again.load_state_dict(states[step])
        rest = [collate([row]) for row in again]
        assert len(rest) == len(found) - step - 1
        for one, other in zip(rest, found[step + 1 :], strict=True):
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
    def online(folder: Path) -> OnlineDataset:
        asked = Request(specs=tuple(open_sources(str(folder / "*.jsonl"))), model=str(folder / "model"))
        return OnlineDataset(asked, PackingConfig(packing_length=256, packing_buffer=8))

    home = tmp_path / "home"
    tiny.write("qwen2", home / "model")
    write_records(home, with_images=False)
    dataset = online(home)
    next(dataset)
    state = saved(dataset)
    rest = rows(dataset)
    there = home.rename(tmp_path / "there")
    again = online(there)
    again.load_state_dict(state)
    assert rows(again) == rest != []
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
