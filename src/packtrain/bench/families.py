"""Which image-text types of the installed transformers can be trained here, packed and padded, on tiny models.

Every type gets a folder with random weights, `verify` with images and with text alone, and two padded steps of `train`:
what a user would run on the real model, and nothing else. Types run in processes of their own, with an empty cache.
"""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import json
import multiprocessing
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.bench.printing import FAMILY_COLUMNS, column
from packtrain.bench.unlisted_models import LISTED, CannotBuild, write_unlisted
from packtrain.core.errors import ConfigError, DataError, PacktrainError, in_one_line, nearest
from packtrain.core.numbers import counted
from packtrain.core.seeds import stream
from packtrain.families.model_folder import PREFIX
from packtrain.records.synthetic import noise_pixels, sentence

LISTED_TYPE, PROVEN, TRAINS, REFUSED, FAILS, NOT_TRIED = "listed", "proven", "trains", "refused", "fails", "not tried"
INCONCLUSIVE, NO_TEXT = "inconclusive", "no text-only chats"
FIRST_CHECK = "the check before the first step"  # that `train` makes
_PACKAGES = ("transformers", "torch")
_REASON = 220  # characters
_LONG = 1_200  # words of the longest text
_IMAGES = ((96, 64), (64, 160), (120, 80), (100, 100))  # width, height
_RECORDS, _STEPS = 24, 2
# The beginning of what is said about every refused model.
_PREAMBLE = re.compile(r"model type '[^']*',? (?:which cannot be (?:packed|trained here): |with (?=positions|tensors))")


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRow:
    """What became of one type."""

    model_type: str = column("type", "{}")
    images: str = column(FAMILY_COLUMNS["images"], "{}")
    text: str = column(FAMILY_COLUMNS["text"], "{}")
    padded: str = column(FAMILY_COLUMNS["padded"], "{}")
    reason: str = column("reason", "{}", default="")


@dataclass(frozen=True, kw_only=True, slots=True)
class FamiliesResult:
    """The types that were asked for, and the versions that they were tried with."""

    versions: dict[str, str]
    rows: tuple[FamilyRow, ...]

    def totals(self, name: str) -> dict[str, int]:
        """How many types had each outcome in one column."""
        return dict(Counter(getattr(row, name) for row in self.rows))


def image_text_types() -> tuple[str, ...]:
    """Every image-text type of the installed transformers, listed ones among them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    return tuple(sorted(NAMES))


def bench_families(
    types: Sequence[str] = (), *, workers: int = 1, progress: Callable[[str], None] = lambda _: None
) -> FamiliesResult:
    """Try these types, or all of them, `workers` at a time."""
    known = image_text_types()
    for name in types:
        if name not in known:
            hint = nearest(name, known) or "leave --types out for all of them"
            raise ConfigError("--types", got=name, expected="image-text types of transformers", fix=hint)
    chosen = tuple(types) or known
    done: dict[str, FamilyRow] = {}
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        concurrent.futures.ProcessPoolExecutor(
            workers, mp_context=context, initializer=_alone, initargs=(cache,)
        ) as pool,
    ):
        futures = {pool.submit(try_type, name): name for name in chosen}
        for future in concurrent.futures.as_completed(futures):
            name = futures[future]
            try:
                done[name] = future.result()
            except concurrent.futures.process.BrokenProcessPool:
                done[name] = _row(name, FAILS, reason="the process that tried it, or one beside it, died")
            progress(f"{len(done)} of {len(chosen)} types, the last {name}")
    return FamiliesResult(
        versions={name: importlib.metadata.version(name) for name in _PACKAGES},
        rows=tuple(done[name] for name in chosen),
    )


def try_type(model_type: str) -> FamilyRow:
    """Verify one type with images and with text alone, and train it on padded rows; never raises."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            model = f"{PREFIX}{model_type}" if model_type in LISTED else _model(model_type, folder / model_type)
        except CannotBuild as error:
            return _row(model_type, NOT_TRIED, reason=str(error))
        except Exception as error:  # of transformers, of any kind
            return _row(model_type, NOT_TRIED, reason=f"no tiny model: {in_one_line(error)}")
        found = {
            "images": _verified(model),
            "text": _verified(model, data=text_records(folder)),
            "padded": _trained(model, mixed_records(folder), folder / "run"),
        }
    if model_type in LISTED and found["images"][0] == PROVEN:
        found["images"] = (LISTED_TYPE, "")
    return FamilyRow(model_type=model_type, **{name: word for name, (word, _) in found.items()}, reason=_reasons(found))


def _row(model_type: str, word: str, *, reason: str) -> FamilyRow:
    return FamilyRow(model_type=model_type, images=word, text=word, padded=word, reason=reason)


def _alone(cache: str) -> None:
    """Keep a process to itself: nothing kept by other runs, no network, one thread, no words of libraries."""
    os.environ |= {
        "PACKTRAIN_CACHE": cache,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream_of in (1, 2):
        os.dup2(nowhere, stream_of)


def _model(model_type: str, folder: Path) -> str:
    from packtrain.modeling.load import build_model

    write_unlisted(model_type, folder)
    build_model(str(folder)).save_pretrained(folder)
    return str(folder)


# ---- what a user would run


def _verified(model: str, data: Path | None = None) -> tuple[str, str]:
    """The outcome of `verify`, in fp32 on the CPU, and the reason where it did not pass."""
    from packtrain.app.verify import verify

    try:
        report = verify(model, data=data, dtype="fp32", device="cpu")
    except DataError as error:
        return (NO_TEXT, "") if data is not None and error.where == "--data" else (FAILS, _said(error))
    except PacktrainError as error:
        return REFUSED, _said(error)
    except Exception as error:  # of a model or a processor, of any kind
        return FAILS, in_one_line(error)
    if report.failures:
        first = report.failures[0]
        return FAILS, f"{first.check}" + (f", {first.where}" if first.where else "")
    if report.inconclusive:
        return INCONCLUSIVE, report.inconclusive[0].check
    # What `train` wants of an unlisted model as well.
    missing = [note for note in report.left_out if note.startswith(("gradients", "training mode"))]
    return (FAILS, f"not checked: {missing[0]}") if missing else (PROVEN, "")


def _trained(model: str, data: Path, out: Path) -> tuple[str, str]:
    """The outcome of two optimizer steps on padded rows, with the check before them."""
    settings = [
        *(f"model={model}", f"data.dataset_path={data}", f"training.output_dir={out}", "data.packing=false"),
        *("data.check=0", "data.workers=1", "data.max_failure_rate=0.5"),
        *("training.use_cpu=true", f"training.max_steps={_STEPS}", "training.learning_rate=1e-3"),
        *("training.effective_batch_size=6", "training.per_device_train_batch_size=3"),
    ]
    from packtrain.app.train.train import train

    try:
        train(None, settings)
    except PacktrainError as error:
        return FAILS if error.where == FIRST_CHECK else REFUSED, _said(error)
    except Exception as error:  # of a model or a processor, of any kind
        return FAILS, in_one_line(error)
    lines = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    losses = [float(line["loss"]) for line in lines if line.get("loss") is not None]
    if len(losses) < _STEPS or not np.isfinite(losses).all():
        return FAILS, f"losses {', '.join(f'{loss:g}' for loss in losses)}"
    return TRAINS, ""


def _said(error: PacktrainError) -> str:
    """What was found first, without what the table says already."""
    found = error.problems[0].partition("; ")[0] if error.problems else str(error.got).splitlines()[0]
    return _PREAMBLE.sub("", " ".join(found.split()))


def _reasons(found: dict[str, tuple[str, str]]) -> str:
    """The reasons of the three columns, each once, with the columns that it is about."""
    titles = {"images": "with images", "text": "text only", "padded": "padded"}
    about: dict[str, list[str]] = {}
    for name, (_, reason) in found.items():
        if reason:
            about.setdefault(reason, []).append(titles[name])
    if len(about) == 1 and len(found) == len(next(iter(about.values()))):
        return next(iter(about))[:_REASON]
    return "; ".join(f"{' and '.join(names)}: {reason[:_REASON]}" for reason, names in about.items())


# ---- data


def text_records(folder: Path) -> Path:
    """Chats without images, one of them longer than a thousand tokens."""
    draw = stream(0, "families", "text")
    lengths = [*((4 + number, 6 + 3 * number) for number in range(8)), (_LONG, 12)]
    records = [
        _chat(f"text-{at}", sentence(draw, asked), sentence(draw, said)) for at, (asked, said) in enumerate(lengths)
    ]
    return _written(folder / "text.jsonl", records)


def mixed_records(folder: Path) -> Path:
    """Chats with no, one and two images."""
    draw = stream(0, "families", "mixed")
    records = []
    for number in range(_RECORDS):
        names = [f"{number}-{at}.png" for at in range((0, 1, 1, 2)[number % 4])]
        for at, name in enumerate(names):
            _save_image(folder / name, noise_pixels(draw, *_IMAGES[(number + at) % len(_IMAGES)][::-1], 3))
        records.append(_chat(str(number), sentence(draw, 5), sentence(draw, int(draw.integers(3, 30))), names))
    return _written(folder / "mixed.jsonl", records)


def _chat(name: str, question: str, answer: str, images: Sequence[str] = ()) -> dict[str, Any]:
    shown = [{"type": "image", "image": image} for image in images]
    asked = [*shown, {"type": "text", "text": question}]
    return {
        "id": name,
        "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}],
    }


def _save_image(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    Image.fromarray(pixels).save(path)


def _written(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


# ---- the page

_WORDS = {
    LISTED_TYPE: "packed by a rule and a contract of its own; the check passes on the tiny model",
    PROVEN: "every check of `packtrain verify` passes on the tiny model, in rows with images or in rows of text alone. "
    "Packed training is possible where the same check passes on your own model and data",
    TRAINS: "two optimizer steps with finite losses, after the check that each sample of a padded batch comes out as "
    "it does alone",
    FAILS: "a check fails, or the model or its processor does; `packtrain train` would end there too",
    INCONCLUSIVE: "nothing failed, but a check could not have",
    REFUSED: "packtrain says no, with the reason, before the model runs",
    NO_TEXT: "its processor takes no chat without an image",
    NOT_TRIED: "there is no tiny model to try it on, for the reason given; the real one may work",
}


def families_page(result: FamiliesResult, command: str) -> str:
    """The page, in Markdown."""
    return "\n".join(_page(result, command)) + "\n"


def _page(result: FamiliesResult, command: str) -> Iterator[str]:
    versions = " and ".join(f"{name} {version}" for name, version in result.versions.items())
    yield from ("# Image-text models of transformers", "")
    yield f"Written by `{command}` with {versions}: {counted(len(result.rows), 'type')}."
    yield from (
        "",
        "Each type is tried as a tiny model with random weights, in fp32, on sdpa, on a CPU.",
        "",
    )
    yield from ("| word | meaning |", "|---|---|")
    words = {getattr(row, name) for row in result.rows for name in FAMILY_COLUMNS}
    yield from (f"| {word} | {meaning} |" for word, meaning in _WORDS.items() if word in words)
    yield from ("", "## Totals", "", f"| | {' | '.join(FAMILY_COLUMNS.values())} |", "|---|---:|---:|---:|")
    totals = {name: result.totals(name) for name in FAMILY_COLUMNS}
    for word in (word for word in _WORDS if word in words):
        yield f"| {word} | {' | '.join(str(totals[name].get(word, '')) for name in FAMILY_COLUMNS)} |"
    yield from (
        "",
        "## Types",
        "",
        f"| type | {' | '.join(FAMILY_COLUMNS.values())} | reason |",
        "|---|---|---|---|---|",
    )
    for row in result.rows:
        outcomes = " | ".join(getattr(row, name) for name in FAMILY_COLUMNS)
        yield f"| `{row.model_type}` | {outcomes} | {_cell(row.reason)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
