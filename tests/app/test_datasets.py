"""One config, two ways of access: the same packs bit by bit, in any process, resumed anywhere, from any files."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import multiprocessing
import pickle
import shutil
import sys
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset

from packtrain import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from packtrain.config.dataset_config import LONGEST_DEFAULT
from packtrain.core.errors import ConfigError, DataError, DriftError
from packtrain.delivery.encode.encoded_sample import PackKey
from packtrain.packing.schedule import EMPTY_PACK

SAMPLES, SHARDS = 36, 6
QUICK = {"workers": 1, "check": 0}


def picture(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((40 + 8 * (number % 4), 36), 90).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def record(number: int, image: str | None) -> dict[str, Any]:
    text = " ".join(f"word{number * 7 + place}" for place in range(1 + number % 9))
    question = [{"type": "image", "image": image}] if image else []
    return {
        "id": f"r{number}",
        "messages": [
            {"role": "user", "content": [*question, {"type": "text", "text": text}]},
            {"role": "assistant", "content": [{"type": "text", "text": text[::-1]}]},
        ],
    }


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats as JSON Lines, every third with a picture beside the file."""
    folder = tmp_path_factory.mktemp("lines")
    names = []
    for number in range(SAMPLES):
        names.append(f"{number}.png" if number % 3 == 0 else None)
        if names[-1]:
            (folder / names[-1]).write_bytes(picture(number))
    texts = [json.dumps(record(number, name)) for number, name in enumerate(names)]
    (folder / "data.jsonl").write_text("\n".join(texts) + "\n")
    return folder / "data.jsonl"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in compressed tar shards."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for number in range(shard, SAMPLES, SHARDS):
                parts = {"json": json.dumps(record(number, "png" if number % 3 == 0 else None)).encode()}
                if number % 3 == 0:
                    parts = {"png": picture(number), **parts}
                for ending, data in parts.items():
                    info = tarfile.TarInfo(f"{number:03d}.{ending}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
        (folder / f"shard-{shard:03d}.tar.gz").write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def config(path: Path, cache: Path, **settings: Any) -> DatasetConfig:
    usual: dict[str, Any] = {
        "dataset_path": str(path),
        "model": "tiny:qwen3_vl",
        "packing_length": 192,
        "packs_per_step": 4,
        "epochs": 2,
        "seed": 5,
        **QUICK,
        "cache_dir": str(cache),
    }
    return DatasetConfig(**{**usual, **settings})


def built(kind: type[Any], given: DatasetConfig) -> Any:
    dataset = kind(given)
    dataset.build()
    return dataset


def content(batch: Any) -> tuple[Any, ...]:
    return batch.info.keys, [(name, value) for name, value in batch.items()]


def assert_same(left: Iterable[Any], right: Iterable[Any]) -> int:
    """Two streams of batches that hold the same bits."""
    count = 0
    for one, other in zip(left, right, strict=True):
        assert one.info == other.info
        assert list(one) == list(other)
        for name, value in one.items():
            same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            assert same, f"{name} of {one.info.keys}"
        count += 1
    assert count, "nothing was compared"
    return count


@pytest.fixture(scope="module")
def mapped(lines: Path, cache: Path) -> MultiModalDataset:
    return built(MultiModalDataset, config(lines, cache))


@pytest.fixture(scope="module")
def streamed(lines: Path, cache: Path, mapped: MultiModalDataset) -> MultiModalIterableDataset:
    return built(MultiModalIterableDataset, config(lines, cache))


# ---- what is delivered


def test_every_sample_is_delivered_once_in_each_epoch(mapped: MultiModalDataset) -> None:
    loader = mapped.loader()
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == mapped.plan.epoch(batches[0].info.keys[0].epoch).num_packs
        assert Counter(row for batch in batches for row in batch.info.rows) == Counter(range(SAMPLES))
        assert all(batch.info.tokens <= 192 for batch in batches)
        assert sum(batch.info.images for batch in batches) == SAMPLES / 3
        assert max(batch.info.samples for batch in batches) > 1, "packing really happened"


def test_packs_are_the_same_by_number_and_by_key(mapped: MultiModalDataset) -> None:
    for number in (0, len(mapped) - 1, -1):
        row = mapped[number]
        pack = mapped.plan.epoch(0).pack(number % len(mapped))
        assert [sample.row for sample in row.samples] == pack.rows.tolist()
    assert mapped[PackKey(0, 1)].samples[0].row == mapped[1].samples[0].row
    assert mapped[PackKey(1, EMPTY_PACK)].samples == ()
    for number in (len(mapped), -len(mapped) - 1):
        with pytest.raises(IndexError):
            mapped[number]


@pytest.mark.parametrize("workers", [0, 2])
def test_both_ways_deliver_the_same_bits(
    mapped: MultiModalDataset, streamed: MultiModalIterableDataset, workers: int
) -> None:
    collator = streamed.get_collator()
    assert isinstance(streamed, IterableDataset)
    assert not isinstance(mapped, IterableDataset)
    for epoch in range(2):
        ours, loader = mapped.loader(), streamed.loader(num_workers=workers)
        for one in (ours, loader, streamed):
            one.set_epoch(epoch)
        whole = list(ours)
        assert_same(whole, loader)
        stream = DataLoader(streamed, batch_size=1, collate_fn=collator, num_workers=workers)
        assert assert_same(whole, stream) == len(streamed)


@pytest.mark.parametrize("window", [None, 9])
def test_compressed_shards_deliver_what_lines_deliver(
    lines: Path, shards: Path, cache: Path, window: int | None
) -> None:
    options = {"packing_window": window, "shuffle": window is None}
    ways = [
        built(kind, config(path, cache, **options))
        for kind, path in (
            (MultiModalDataset, shards),
            (MultiModalIterableDataset, shards),
            (MultiModalIterableDataset, lines),
        )
    ]
    tar, stream, text = (list(way.loader()) for way in ways)
    assert_same(tar, stream)
    for way in ways[:2]:  # their files are open here already; a worker must not read through the same ones
        assert_same(tar, way.loader(num_workers=2))
    by_id = {one: (len_, image) for batch in text for one, len_, image in _samples(batch)}
    assert {one: (len_, image) for batch in tar for one, len_, image in _samples(batch)} == by_id
    assert len(by_id) == SAMPLES


def _samples(batch: Any) -> list[tuple[str, int, int]]:
    """Id, length and a sum of ids of each sample of a batch."""
    found, start = [], 0
    for one, length in zip(batch.info.ids, batch.info.lengths, strict=True):
        found.append((one, length, int(batch["input_ids"][0, start : start + length].sum())))
        start += length
    return found


def test_samples_are_as_long_as_they_were_measured(mapped: MultiModalDataset) -> None:
    for number in range(len(mapped)):
        planned = int(mapped.plan.epoch(0).load("tokens")[number])
        assert sum(len(sample) for sample in mapped[number].samples) == planned


# ---- the cache of data files


def test_streaming_declares_the_window_of_the_step_and_the_next(shards: Path, cache: Path) -> None:
    given = config(shards, cache, packing_window=6, packs_per_step=1, epochs=1, shuffle=False)
    dataset = built(MultiModalIterableDataset, given)
    declared: list[list[str]] = []
    read: list[str] = []
    source, files = dataset.source, dataset.source._files
    real_want, real_plain = files.want, files.plain
    files.want = lambda wanted: (declared.append([Path(name).name for name in wanted]), real_want(wanted))[1]

    def plain(file: str) -> Any:
        assert Path(file).name in declared[-1], "read before it was declared"
        read.append(Path(file).name)
        return real_plain(file)

    files.plain = plain
    assert source is not None
    assert len(list(dataset)) == len(dataset)
    names = sorted(path.name for path in shards.glob("*.tar.gz"))
    assert sorted(set(read)) == names
    assert declared[0] == names[:2]
    assert declared[-1] == []
    assert all(len(wanted) <= 3 for wanted in declared), "two windows, and what is left over of the one before"
    assert len(declared) > SHARDS / 2


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder, from which files may vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def test_the_budget_of_the_cache_is_kept(shards: Path, tmp_path: Path) -> None:
    budget = 64 << 10
    given = config(shards, tmp_path, cache_bytes=budget, epochs=1, packing_window=6)
    stream, held = [], []
    for batch in built(MultiModalIterableDataset, given).loader():
        stream.append(batch)
        held.append(size_of(tmp_path / "shards"))
    assert 0 < max(held) <= budget + (64 << 10), "beside files of its own of a few kilobytes"
    whole = built(MultiModalDataset, replace(given, cache_bytes=1 << 30))
    assert_same(stream, whole.loader())


# ---- resuming


def test_resumes_exactly_at_every_step(streamed: MultiModalIterableDataset, mapped: MultiModalDataset) -> None:
    collator = mapped.get_collator()
    streamed.set_epoch(0)
    whole, states, it = [], [], iter(streamed)
    while True:
        states.append(json.loads(json.dumps(streamed.state_dict())))
        try:
            whole.append(collator([next(it)]))
        except StopIteration:
            break
    assert len(whole) > 8
    for step in range(0, len(states), 3):
        streamed.load_state_dict(states[step])
        rest = [collator([row]) for row in streamed]
        assert len(rest) == len(whole) - step
        loader = mapped.loader()
        loader.load_state_dict(states[step])
        if rest:
            assert_same(rest, whole[step:])
            assert_same(rest, loader)


# ---- building


def test_what_is_there_is_used(mapped: MultiModalDataset, lines: Path, cache: Path) -> None:
    seen: list[Any] = []
    again = MultiModalDataset(config(lines, cache))
    again.build(progress=seen.append)
    assert again.plan.folder == mapped.plan.folder
    assert again.schedule.hash == mapped.schedule.hash
    other = built(MultiModalDataset, config(lines, cache, packing_length=256))
    assert other.plan.folder != mapped.plan.folder


def test_a_dataset_that_is_not_built_says_so(lines: Path, cache: Path) -> None:
    for kind in (MultiModalDataset, MultiModalIterableDataset):
        with pytest.raises(ConfigError, match=r"call \.build\(\) first"):
            len(kind(config(lines, cache)))


def _build(given: DatasetConfig, out: Any) -> None:
    try:
        out.put(str(built(MultiModalDataset, given).plan.folder))
    except Exception as error:
        out.put(repr(error))


def test_ranks_of_a_machine_build_once(lines: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    given = config(lines, tmp_path)
    ranks = [context.Process(target=_build, args=(given, out)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    found = {out.get(timeout=120) for _ in ranks}
    for rank in ranks:
        rank.join(30)
    assert len(found) == 1
    assert Path(found.pop()).is_dir()


def test_datasets_survive_pickling(mapped: MultiModalDataset, streamed: MultiModalIterableDataset) -> None:
    for dataset in (mapped, streamed):
        again = pickle.loads(pickle.dumps(dataset))
        assert_same(again.loader(), mapped.loader())
    assert len(pickle.dumps(mapped)) < 100_000, "a plan travels as its path"


@pytest.mark.full
def test_a_worker_knows_its_rank_and_where_to_begin(
    lines: Path, cache: Path, mapped: MultiModalDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "packtrain.delivery.loader.pack_loader.rank_and_world", lambda: (1, 2)
    )  # as a process group says
    dataset = built(MultiModalIterableDataset, config(lines, cache))
    dataset.load_state_dict({**dataset.state_dict(), "epoch": 1, "next_pack": 6})
    ours = mapped.loader(rank=1, world_size=2)
    ours.load_state_dict(dataset.state_dict())
    spawned = DataLoader(
        dataset, batch_size=1, collate_fn=dataset.get_collator(), num_workers=1, multiprocessing_context="spawn"
    )
    assert_same(ours, spawned)


def test_nothing_is_printed(lines: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    built(MultiModalDataset, config(lines, tmp_path))
    assert capfd.readouterr() == ("", "")


# ---- without packing


def test_without_packing_each_row_is_one_padded_sample(lines: Path, cache: Path) -> None:
    dataset = built(MultiModalDataset, config(lines, cache, packing=False))
    batches = list(dataset.loader())
    assert len(dataset) == SAMPLES == sum(batch.info.samples for batch in batches)
    assert all("attention_mask" in batch for batch in batches)
    pair = dataset.get_collator()([dataset[0], dataset[1]])
    assert pair["input_ids"].shape[0] == 2


# ---- what goes wrong later


@pytest.fixture
def own(lines: Path, tmp_path: Path) -> Path:
    """A copy of the data that may be harmed."""
    shutil.copytree(lines.parent, tmp_path / "data")
    return tmp_path / "data" / "data.jsonl"


def test_a_picture_that_is_broken_since_is_left_out_and_said(own: Path, tmp_path: Path) -> None:
    dataset = built(MultiModalDataset, config(own, tmp_path / "cache"))
    (own.parent / "3.png").write_bytes((own.parent / "3.png").read_bytes()[:60])
    batches = list(dataset.loader())
    assert [entry.id for batch in batches for entry in batch.info.failures] == ["r3"]
    assert sum(batch.info.samples for batch in batches) == SAMPLES - 1


def test_a_picture_of_another_size_stops_the_run(own: Path, tmp_path: Path) -> None:
    dataset = built(MultiModalDataset, config(own, tmp_path / "cache"))
    Image.new("RGB", (200, 200)).save(own.parent / "3.png")
    with pytest.raises(DriftError, match=r"3\.png"):
        list(dataset.loader())


def test_changed_lines_stop_the_run(own: Path, tmp_path: Path) -> None:
    dataset = built(MultiModalDataset, config(own, tmp_path / "cache"))
    own.write_text(own.read_text().replace("word7 ", "WORD7 "))
    with pytest.raises(DataError, match="has changed since it was measured"):
        list(dataset.loader())
    again = built(MultiModalDataset, config(own, tmp_path / "cache"))
    assert sum(batch.info.samples for batch in again.loader()) == SAMPLES


@pytest.mark.parametrize("kind", [MultiModalDataset, MultiModalIterableDataset])
def test_building_again_takes_in_what_is_new(own: Path, tmp_path: Path, kind: type[Any]) -> None:
    dataset = built(kind, config(own, tmp_path / "cache"))
    assert len(list(dataset.loader())) == len(dataset)
    with own.open("a") as lines:
        lines.writelines(json.dumps(record(number, None)) + "\n" for number in range(SAMPLES, SAMPLES + 20))
    dataset.build()
    assert Counter(row for batch in dataset.loader() for row in batch.info.rows) == Counter(range(SAMPLES + 20))
    assert len(dataset) == dataset.plan.epoch(0).num_packs


# ---- the config


@pytest.mark.parametrize("value", ["max_pixels", [5]])
def test_settings_that_are_not_by_name_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"processor_config: .* instead of a section") as caught:
        DatasetConfig(dataset_path="x", model="m", processor_config=value, balance="sort")
    assert "did you mean 'sorted'" in str(caught.value), "other problems are said with it"


def test_all_problems_of_a_config_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DatasetConfig(
            dataset_path="",
            dataset_type="visions",
            dataset_format="jsonlines",
            processor_config={"max_pixel": 5, "fps": -1},
            packing="yes",  # type: ignore[arg-type]
            packing_length=0,
            packing_strategy="bestfit",
            packing_window=0,
            overlong="cut",
            workers=0,
            balance="sort",
            epochs=0,
            cache_bytes=0,
        )
    said = str(caught.value)
    for words in (
        *("dataset_path: ''", "did you mean 'vision'", "did you mean 'jsonl'", "did you mean 'max_pixels'", "fps"),
        *("packing: 'yes'", "packing_length: 0", "did you mean 'best_fit'", "packing_window: 0", "overlong: cut"),
        *("workers: 0", "did you mean 'sorted'"),
        *("epochs: 0", "cache_bytes: 0", "model: none"),
    ):
        assert words in said, f"{words} is not in\n{said}"
    assert caught.value.exit_code == 2


def test_the_model_may_stand_with_the_processor() -> None:
    for given in ({"processor_name": "some/model"}, {"model": "some/model", "max_pixels": 9}):
        found = DatasetConfig(dataset_path="x", processor_config=given)
        assert found.model_name == "some/model"
        assert "model" not in found.media_limits().given()
    with pytest.raises(ConfigError, match="differ"):
        DatasetConfig(dataset_path="x", model="a", processor_config={"model": "b"})


def test_packing_follows_from_the_config() -> None:
    given = DatasetConfig(dataset_path="x", model="m", packing_window=50, max_images_per_pack=7)
    packing = given.packing_config(128_000)
    assert (packing.packing_length, packing.overlong, packing.packing_window) == (LONGEST_DEFAULT, "drop", 50)
    assert packing.max_images_per_pack == 7
    assert replace(given, filter_overlong=False).packing_config(4_096).overlong == "error"
    assert given.packing_config(4_096).packing_length == 4_096
    assert replace(given, packing=False).packing_config(99).packing_strategy == "none"


def test_packs_stay_in_the_order_of_the_dataset_where_nothing_is_shuffled() -> None:
    given = DatasetConfig(dataset_path="x", model="m", shuffle=False)
    assert (given.order, replace(given, shuffle=True).order) == ("random", "sorted")
    assert (replace(given, balance="sorted").order, replace(given, group_by_length=True).order) == ("sorted", "strict")


def test_importing_datasets_loads_no_torch() -> None:
    import subprocess

    code = "import sys, packtrain; packtrain.MultiModalDataset; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_media_whose_folder_is_gone_stop_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.png").write_bytes(picture(number))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record(n, f"{n}.png")) + "\n" for n in range(4)))
    given = config(tmp_path / "data.jsonl", tmp_path / "cache", media_root=str(folder), epochs=1)
    dataset = built(MultiModalDataset, given)
    (folder / "1.png").unlink()
    batches = list(dataset.loader())
    assert sum(len(batch.info.failures) for batch in batches) == 1, "one file that is gone is left out"
    again = built(MultiModalDataset, given)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="pictures, is not there"):
        list(again.loader())


def test_a_stream_that_would_fetch_again_and_again_is_warned_of(shards: Path, cache: Path) -> None:
    with pytest.warns(UserWarning, match="packing_window"):
        built(MultiModalIterableDataset, config(shards, cache, cache_bytes=4096))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built(MultiModalIterableDataset, config(shards, cache, cache_bytes=4096, packing_window=6))
        built(MultiModalIterableDataset, config(shards, cache))


def test_a_stream_is_packed_without_measuring_it(lines: Path, shards: Path, tmp_path: Path) -> None:
    """Through a mixture of its own, a loader with a state, and nothing in the cache."""
    stream = built(MultiModalIterableDataset, config(lines, tmp_path / "none", online=True, max_steps=3, epochs=1))
    whole = [batch.info for batch in stream.loader()]
    assert len(whole) == 3 * stream.config.packs_per_step
    assert sum(info.images for info in whole)
    assert not (tmp_path / "none" / "measure").exists()
    loader = stream.loader()
    half = len(whole) // 2
    assert [next(batches).info.ids for batches in [iter(loader)] for _ in range(half)] == [i.ids for i in whole[:half]]
    again = built(MultiModalIterableDataset, stream.config).loader()
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [batch.info.ids for batch in again] == [info.ids for info in whole[half:]]
    with pytest.raises(ConfigError, match="MultiModalIterableDataset"):
        MultiModalDataset(stream.config).build()
    with pytest.raises(ConfigError, match="not measured"):
        stream.describe()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("max_samples", 3), ("cutoff_len", 9), ("overlong", "split"), ("packing_window", 4), ("max_packs", 3)),
        *(("packing_drop_last", True), ("pack_alignment", 2), ("packing_strategy", "wrapped"), ("costs", "costs")),
        *(("packing", False), ("max_steps", None), ("shuffle", True), ("eval_size", 0.1)),
    ],
)
def test_what_needs_all_samples_is_refused_of_a_stream(lines: Path, cache: Path, setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting}: .* with online: true"):
        config(lines, cache, **{"online": True, "max_steps": 3, setting: value})
