"""How runs were set up, in the lines that readers look for first; run.json and run.yaml have the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packtrain.core.numbers import count, counted, large, percent, rate, shown
from packtrain.reports.run_words import start_of
from packtrain.reports.study_content import LONGEST, Content
from packtrain.runs.run_values import Scalar, TrainingRun

PLANNED = "Planned in"  # the page of packtrain plan: its value is a link
_PARTS = ("language", "vision", "projector")
_VERSIONS = ("packtrain", "torch", "transformers", "python")
Derived = Mapping[str, Scalar]


def setup_rows(runs: Sequence[TrainingRun]) -> list[Content]:
    """One line for each thing that at least one run says, with the words of all of them."""
    said = [dict(_lines(run)) for run in runs]
    names = dict.fromkeys(name for one in said for name in one)
    rows = [(name, [one.get(name, "–") for one in said]) for name in names]
    return [{"name": name, "values": row, "differ": len({*row}) > 1} for name, row in rows]


def _lines(run: TrainingRun) -> Iterator[tuple[str, str]]:
    about, derived = run.about, run.about.derived
    if about.model:
        yield "Model", shown(about.model, LONGEST)
    if "origin.run" in about.other:
        yield "Began from", start_of(run)
    if (method := _text(derived.get("method"))) is not None:
        yield "Method", _method(method, derived)
    if (trained := _trained(derived)) is not None:
        yield "Trained weights", trained
    if (data := _data(derived)) is not None:
        yield "Data", data
    if (rates := _rates(derived)) is not None:
        yield "Learning rate", rates
    if (optimizer := _optimizer(derived)) is not None:
        yield "Optimizer", optimizer
    if (step := _step(run)) is not None:
        yield "Step", step
    kernels = [_text(derived.get("attn_implementation")), "compiled layers" if derived.get("compiled") else None]
    kernels += [f"weights in {dtype}"] if (dtype := _text(derived.get("dtype"))) is not None else []
    if any(kernels):
        yield "Computed with", ", ".join(kernel for kernel in kernels if kernel)
    yield from _circumstances(run)


def _method(method: str, derived: Derived) -> str:
    if (rank := derived.get("lora.rank")) is None:
        return "full fine-tuning" if method == "full" else method
    targets = _text(derived.get("lora.targets")) or "every linear layer of the decoder"
    return f"{method}: rank {shown(rank, 20)}, alpha {shown(derived.get('lora.alpha'), 20)}, {targets}"


def _trained(derived: Derived) -> str | None:
    found = []
    for part in _PARTS:
        trained, whole = (derived.get(f"{name}.{part}") for name in ("learns", "weights"))
        if not isinstance(trained, int):
            continue
        share = ""
        if isinstance(whole, int) and whole > trained:
            share = f" of {large(whole)} ({percent(trained / whole)})"
        found.append(f"{part} {large(trained)}{share}" if trained else f"{part} frozen")
    return ", ".join(found) or None


def _data(derived: Derived) -> str | None:
    samples = derived.get("samples")
    if not isinstance(samples, int):
        return None
    found = [f"{count(samples)} samples"]
    for name in ("images", "videos", "frames", "tokens", "supervised_tokens"):
        if isinstance(number := derived.get(name), int) and number:
            found.append(f"{count(number)} {name.replace('_', ' ')}")
    epochs = derived.get("epochs")
    passes = (
        f", each seen {epochs:,.4g} times" if isinstance(epochs, int | float) and epochs != 1 else ", each seen once"
    )
    return ", ".join(found) + (passes if epochs is not None else "")


def _rates(derived: Derived) -> str | None:
    parts: dict[float, list[str]] = {}
    for part in _PARTS:
        if isinstance(value := derived.get(f"course.rates.{part}"), int | float):
            parts.setdefault(float(value), []).append(part)
    if not parts:
        return None
    found = (
        rate(next(iter(parts)))
        if len(parts) == 1
        else ", ".join(f"{rate(value)} ({', '.join(names)})" for value, names in parts.items())
    )
    warmup = derived.get("course.warmup_steps")
    ramp = f"{count(warmup)} steps of warm-up" if isinstance(warmup, int) and warmup else "no warm-up"
    return f"{found}; {_text(derived.get('course.schedule'))} schedule, {ramp}"


def _optimizer(derived: Derived) -> str | None:
    if (name := _text(derived.get("course.optimizer"))) is None:
        return None
    decay, clip = (derived.get(f"course.{key}") for key in ("weight_decay", "max_grad_norm"))
    clipped = f"gradients clipped at {clip:g}" if isinstance(clip, int | float) and clip else "gradients not clipped"
    return f"{name}, weight decay {decay or 0:g}, {clipped}, in {_text(derived.get('course.precision'))}"


def _step(run: TrainingRun) -> str | None:
    derived, mode = run.about.derived, run.about.mode
    samples, length = derived.get("samples_per_step"), derived.get("packing_length")
    if not isinstance(samples, int | float):
        return None
    packs = run.about.packs_per_step
    if mode == "packed" and packs is not None and isinstance(length, int):
        return f"{counted(packs, 'pack')} of up to {count(length)} tokens, about {count(samples)} samples"
    return f"{count(samples)} samples, padded"


def _circumstances(run: TrainingRun) -> Iterator[tuple[str, str]]:
    other = run.about.other
    when = [_text(other.get(name)) for name in ("began", "ended")]
    if when[0]:
        yield "When", " to ".join(time.replace("T", " ").replace("Z", " UTC") for time in when if time)
    machine = [_text(other.get("host")), _text(run.about.derived.get("expected.gpu"))]
    machine += [f"{run.about.world} process{'' if run.about.world == 1 else 'es'}"]
    yield "Where", ", ".join(part for part in machine if part)
    planned = other.get("planned_in")
    if isinstance(planned, str) and Path(planned).is_absolute() and len(planned) <= LONGEST:
        yield PLANNED, Path(planned).as_uri()
    if (command := _text(other.get("command"))) is not None:
        yield "Command", command
    if (commit := _text(other.get("commit"))) is not None:
        yield "Git commit", commit
    versions = [f"{name} {shown(other[f'versions.{name}'], 40)}" for name in _VERSIONS if f"versions.{name}" in other]
    if versions:
        yield "Versions", ", ".join(versions)


def _text(value: object) -> str | None:
    return shown(value, LONGEST) if isinstance(value, str) and value else None
