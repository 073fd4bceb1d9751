"""How fast measuring is: against the HF processor on the same records, and against what no measuring can avoid."""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from packtrain.bench.data import PICTURES, write_pictures
from packtrain.bench.host import time_work, tree_memory
from packtrain.bench.printing import column
from packtrain.core.cache_root import cache_dir
from packtrain.core.numbers import MIB
from packtrain.delivery.encode.processor import RealProcessor, load_reference
from packtrain.families.model_folder import resolve_model
from packtrain.measuring.columns import UnitRows
from packtrain.measuring.measurer import FamilyRule, Measurer
from packtrain.measuring.request import Request
from packtrain.records.open import iter_units, open_sources, read_unit
from packtrain.records.synthetic import picture_chats, write_lines

_SENTENCE = (
    "the a red green small bright circle square bar diamond stands left of near above two three objects picture "
    "shows and with one behind in front corner shadow edge middle it is there are which because however"
)
_VOCABULARY = tuple(_SENTENCE.split())
TEXT_SIZES = (1, 10, 30, 100, 300, 1000)  # words of an answer
ROUNDS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """Against the HF processor: both sides in the same processes on the same records."""

    records: int = column("records")
    processes: int
    tokens_mean: float = column("mean tokens", "{:,.0f}")
    ours_per_second: float = column("ours /s", "{:,.0f}")
    processor_per_second: float = column("processor /s", "{:,.1f}")
    ratio: float = column("ratio", "{:,.1f}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Against the tokenizer and reading headers alone, on the same texts and images."""

    answer_words: int = column("words of the answer")
    tokens_mean: float = column("mean tokens", "{:,.0f}")
    ours_microseconds: float = column("ours us", "{:,.0f}")
    floor_microseconds: float = column("floor us", "{:,.0f}")
    ratio: float = column("ratio", "{:.2f}")
    template_microseconds: float = column("template each time us", "{:,.0f}")  # without what `Skeletons` saves
    template_ratio: float = column("over ours", "{:.2f}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most memory of all processes of the real command."""

    records: int = column("records")
    peak_mib: float = column("peak MiB", "{:,.0f}")
    seconds: float = column("seconds", "{:,.1f}")
    records_per_second: float = column("records /s", "{:,.0f}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureResult:
    """All comparisons of `packtrain bench measure`."""

    model: str
    processor: Race
    floor: tuple[Floor, ...]
    memory: tuple[Peak, ...]


def bench_measure(*, records: int, workers: int, memory_sizes: list[int], model: str) -> MeasureResult:
    """All three comparisons; numbers are medians over interleaved rounds."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = str(resolve_model(model, cache_dir() / "models").absolute())
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        write_pictures(root)
        return MeasureResult(
            model=model,
            processor=_against_processor(root, folder, records, workers),
            floor=tuple(_against_floor(root, folder, words) for words in TEXT_SIZES),
            memory=tuple(_memory(root, folder, size, workers) for size in memory_sizes),
        )


def _write(path: Path, records: int, words: Callable[[int], int]) -> Path:
    return write_lines(path, picture_chats(PICTURES, map(words, range(records)), _VOCABULARY))


def _request(data: Path, folder: str) -> Request:
    return Request(specs=tuple(open_sources(str(data))), model=folder)


# ---- against the HF processor


def _against_processor(root: Path, folder: str, records: int, workers: int) -> Race:
    """One side after the other, several rounds."""
    shares = [
        _write(root / f"share-{worker}.jsonl", records // workers, lambda n: 1 + (n * 7) % 75)
        for worker in range(workers)
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        races = list(pool.map(_race, [str(share) for share in shares], [folder] * workers))
    ours = sum(median(rates) for rates, _, _ in races)
    theirs = sum(median(rates) for _, rates, _ in races)
    return Race(
        records=records,
        processes=workers,
        tokens_mean=sum(tokens for _, _, tokens in races) / workers,
        ours_per_second=ours,
        processor_per_second=theirs,
        ratio=ours / theirs,
    )


def _race(share: str, folder: str) -> tuple[list[float], list[float], float]:
    """One process: records per second of both sides, round by round, and their mean tokens."""
    import torch

    torch.set_num_threads(1)
    request = _request(Path(share), folder)
    measurer = Measurer(request, FamilyRule(request))
    real = load_reference(request)
    if isinstance(real, str):
        raise RuntimeError(real)
    lengths = _measure(request, measurer)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(3):
        ours.append(len(lengths) / _seconds(lambda: _measure(request, measurer), at_least=0.5))
        theirs.append(len(lengths) / _seconds(lambda: _process(request, measurer, real), at_least=0.0))
    return ours, theirs, sum(lengths) / len(lengths)


def _measure(request: Request, measurer: Measurer) -> list[int]:
    rows = UnitRows()
    for unit in iter_units(request.specs):
        for result in measurer.measure(rows.passing(read_unit(request.specs, unit)), unit.source):
            rows.add(result)
    return rows.costs["tokens"]  # type: ignore[return-value]


def _process(request: Request, measurer: Measurer, real: RealProcessor) -> None:
    for unit in iter_units(request.specs):
        for entry in read_unit(request.specs, unit):
            real.outputs(measurer.record(entry, unit.source), measurer.store(unit.source))


def _seconds(work: Callable[[], object], *, at_least: float) -> float:
    """Of one pass; what is short is repeated, to be measured."""
    return time_work(work, rounds=math.inf, seconds=at_least)[1]


# ---- against what cannot be avoided


def _against_floor(root: Path, folder: str, words: int) -> Floor:
    records = max(64, 20_000 // (words + 20))
    request = _request(_write(root / "floor.jsonl", records, lambda _: words), folder)
    rule, slow = FamilyRule(request), FamilyRule(request)
    slow.encoder.skeletons.patience = sys.maxsize
    measurer, rendering = Measurer(request, rule), Measurer(request, slow)
    entries = [entry for unit in iter_units(request.specs) for entry in read_unit(request.specs, unit)]
    parsed = [measurer.record(entry, 0) for entry in entries]
    layouts = [rule.encoder.layout(record, measurer.headers(record, 0)) for record in parsed]
    texts = [layout.text for layout in layouts]
    media = [medium for record in parsed for medium in record.media()]
    store, tokenizer = measurer.store(0), rule.encoder.tokenizer

    def tokenize() -> None:
        for start in range(0, len(texts), Measurer.batch):
            tokenizer.encode_batch(texts[start : start + Measurer.batch], special=layouts[0].special)

    def read_headers() -> None:
        for medium in media:
            store.header(medium.kind, medium.ref)

    ratios, ours, floor, rendered, gains = [], [], [], [], []
    for _ in range(ROUNDS):
        ours.append(_seconds(lambda: _measure(request, measurer), at_least=0.15) / records)
        unavoidable = _seconds(tokenize, at_least=0.15) + _seconds(read_headers, at_least=0.1)
        floor.append(unavoidable / records)
        ratios.append(ours[-1] / floor[-1])
        rendered.append(_seconds(lambda: _measure(request, rendering), at_least=0.15) / records)
        gains.append(rendered[-1] / ours[-1])
    return Floor(
        answer_words=words,
        tokens_mean=sum(_measure(request, measurer)) / records,
        ours_microseconds=median(ours) * 1e6,
        floor_microseconds=median(floor) * 1e6,
        ratio=median(ratios),
        template_microseconds=median(rendered) * 1e6,
        template_ratio=median(gains),
    )


# ---- memory


def _memory(root: Path, folder: str, size: int, workers: int) -> Peak:
    data = _write(root / "memory.jsonl", size, lambda _: 8)
    command = [sys.executable, "-m", "packtrain.cli", "measure", str(data), "--model", folder, "--check", "0"]
    started = time.perf_counter()
    peak = peak_of([*command, "--out", str(root / f"out-{size}"), "--workers", str(workers), "--json"])
    seconds = time.perf_counter() - started
    return Peak(records=size, peak_mib=peak / MIB, seconds=seconds, records_per_second=size / seconds)


def peak_of(command: list[str]) -> int:
    """The largest memory of a command and its children while it runs, each shared page counted once."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        memory = tree_memory(process.pid)
        peak = max(peak, memory.get("pss", memory.get("rss", 0)))
        time.sleep(0.1)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {process.stderr.read() if process.stderr else ''}")
    return peak
