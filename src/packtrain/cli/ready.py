"""The settings of a training run and everything derived from them, as shown before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from packtrain.cli.terminal import Terminal, table
from packtrain.core.numbers import counted, decimal, duration, gib, percent

if TYPE_CHECKING:
    from packtrain.app.train.outcome import ReadyRun
    from packtrain.modeling.adapters import TrainedPart
    from packtrain.predicting.values import TrainingSetup
    from packtrain.runs.derived import Course, RunNumbers


def show_ready(ready: ReadyRun, console: Terminal) -> None:
    """Every derived number, before the first step."""
    for line in ready.done:
        console.print(f"  {escape(line)}")
    for warning in ready.warnings:
        console.print(f"[bold yellow]warning: {escape(warning)}[/]")
    for note in ready.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    title, columns = f"{ready.numbers.mode} training into {escape(str(ready.run.folder))}", ("setting", "value")
    settings = table(title, columns, text=columns)
    settings.columns[0].no_wrap = True
    for name, text in _rows(ready):
        settings.add_row(name, escape(text))
    console.print(settings)
    if ready.batches:
        console.print(_batches_table(ready))
    for risk in ready.risks:
        console.print(f"[bold red]warning:[/] [red]{escape(risk)}[/]")


def _rows(ready: ReadyRun) -> Iterator[tuple[str, str]]:
    numbers, run = ready.numbers, ready.run
    masters = " with fp32 masters" if ready.masters else ""
    yield (
        "model",
        f"{run.model.name}, weights in {ready.dtype}{masters}, attention {ready.attn_implementation}{_compiler(ready)}",
    )
    yield "trainable parameters", f"{_method(ready)}: {', '.join(map(_part_text, ready.parts))}"
    tokens = counted(numbers.tokens, "token")
    if numbers.looked_at is None:
        tokens += f" ({numbers.supervised_tokens:,} supervised)"
    data = f"{counted(numbers.samples, 'sample')}, {tokens}"
    ledger = f"; {numbers.not_drawn:,} not drawn (max_samples)" if numbers.not_drawn else ""
    ledger += f"; {numbers.held_out:,} held out for evaluation (eval_size)" if numbers.held_out else ""
    ledger += _in_the_ledger(numbers.left_out)
    if numbers.too_large:
        ledger += f", {numbers.too_large:,} of them too long for a pack"
    if numbers.unlabelled:
        ledger += f", {numbers.unlabelled:,} of them pieces without supervised tokens"
    if numbers.cut:
        lost = f"{numbers.cut_tokens:,} tokens and {numbers.cut_supervised:,} supervised tokens are not trained on"
        to = f"cutoff_len {run.data.cutoff_len:,}" if run.data.cutoff_len else "packing_length"
        ledger += f"; {counted(numbers.cut, 'sample')} cut to {to}, {lost}"
    if numbers.looked_at is not None:
        data, ledger = f"about {data} in the run", f"; estimated from the first {numbers.looked_at} packs of a stream"
    if numbers.waiting:
        ledger += f"; {numbers.waiting:,} wait for later epochs (mixture weight below 1)"
    yield "data", f"{data}{_media(numbers)}; {_lengths(numbers)}{ledger}"
    if numbers.mode == "packed":
        packs = f"{numbers.packs:,} of up to {numbers.packing_length:,} tokens, {percent(numbers.fill)} full"
        mean = decimal(numbers.samples_per_pack)
        yield "packs", f"{packs}, {mean} {'sample' if mean == '1' else 'samples'} per pack"
        first = ", ".join(
            f"{counted(samples, 'sample')} ({percent(fill)} full)" for samples, fill in numbers.first_packs
        )
        yield "first packs", first
        yield "packing check", _packing_check(ready)
    else:
        padding = f"{percent(1 - numbers.fill)} of tokens are padding"
        each = f"{counted(numbers.rows_per_batch, 'sample')} each"
        if run.data.pad_packs:
            each = f"the samples of a pack each, on average {decimal(numbers.samples_per_pack)}"
        yield "batches", f"{each}, one per row, padded to the longest: {padding}"
        if ready.packing_check is not None:  # of a model that is not listed
            yield "padding check", _packing_check(ready)
    yield "step", _step(ready)
    yield "steps", _steps(numbers)
    course = ready.course
    warmup = f"{counted(course.warmup_steps, 'step')} of warm-up" if course.warmup_steps else "no warm-up"
    yield "learning rate", f"{_rates(course)}; {course.schedule} schedule, {warmup}"
    clipped = f"gradients clipped at {course.max_grad_norm:g}" if course.max_grad_norm else "gradients not clipped"
    decay = f"weight decay {course.weight_decay:g}"
    yield "optimizer", f"{course.optimizer}, {decay}, {clipped}; compute dtype {course.precision}"
    yield "gradient checkpointing", _checkpointing(run.setup)
    yield "checkpoints", course.saves
    if numbers.evaluation_samples:
        batches = counted(numbers.evaluation_batches, "batch", "batches")
        ledger = _in_the_ledger(numbers.evaluation_left_out)
        yield "evaluation", f"{course.evaluates}: {counted(numbers.evaluation_samples, 'sample')} in {batches}{ledger}"
    yield from _expectation_rows(ready)
    if ready.resumed:
        yield "resuming", f"from checkpoint-{ready.resumed}"


def _checkpointing(setup: TrainingSetup) -> str:
    language, vision = setup.gradient_checkpointing, setup.vision_checkpointing
    if language == vision:
        return "on" if language else "off"
    return "language model only" if language else "vision encoder only"


def _lengths(numbers: RunNumbers) -> str:
    """
    >>> from types import SimpleNamespace as Numbers
    >>> _lengths(Numbers(samples=3, tokens=4000, longest=2500))
    'mean length 1,333 tokens, longest 2,500'
    """
    return f"mean length {numbers.tokens / numbers.samples:,.0f} tokens, longest {numbers.longest:,}"


def _in_the_ledger(entries: int) -> str:
    return f"; {entries:,} more skipped, listed in ledger.jsonl with the reason" if entries else ""


def _steps(numbers: RunNumbers) -> str:
    """
    >>> from types import SimpleNamespace as Numbers
    >>> _steps(Numbers(steps=18, epochs=2.0, steps_per_epoch=9, looked_at=None))
    '18 (2 epochs x 9 steps)'
    >>> _steps(Numbers(steps=3, epochs=0.6, steps_per_epoch=5, looked_at=None))
    '3 (0.6 epochs of 5 steps)'
    """
    if numbers.looked_at is not None:
        return f"{numbers.steps:,} (max_steps)"
    each, epochs = counted(numbers.steps_per_epoch, "step"), numbers.epochs
    if epochs * numbers.steps_per_epoch == numbers.steps and epochs == int(epochs):
        return f"{numbers.steps:,} ({counted(int(epochs), 'epoch')} x {each})"
    return f"{numbers.steps:,} ({_passes(epochs)} epochs of {each})"


def _passes(epochs: float) -> str:
    """
    >>> _passes(0.6), _passes(3.0), _passes(1230.0)
    ('0.6', '3', '1,230')
    """
    return f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"


def _rates(course: Course) -> str:
    """Learning rates, with the parts that have each.

    >>> from types import SimpleNamespace as Course
    >>> _rates(Course(rates={"language": 1e-4, "vision": 1e-5, "projector": 1e-4}))
    '0.0001 (language, projector), 1e-05 (vision)'
    """
    parts: dict[float, list[str]] = {}
    for part, rate in course.rates.items():
        parts.setdefault(rate, []).append(part)
    return ", ".join(f"{rate:g} ({', '.join(names)})" for rate, names in parts.items())


def _media(numbers: RunNumbers) -> str:
    """The media of a run.

    >>> from types import SimpleNamespace as Numbers
    >>> _media(Numbers(images=0, videos=1, frames=16)), _media(Numbers(images=2, videos=0, frames=0))
    (', 1 video (16 frames)', ', 2 images')
    """
    text = f", {counted(numbers.images, 'image')}" if numbers.images else ""
    if numbers.videos:
        text += f", {counted(numbers.videos, 'video')} ({counted(numbers.frames, 'frame')})"
    return text


def _method(ready: ReadyRun) -> str:
    model = ready.run.model
    if not model.has_adapters:
        return model.method
    targets = ", ".join(model.lora_target_modules or ("every linear layer of the decoder",))
    return f"{model.method} (rank {model.lora_rank}, alpha {model.scale:g}, {targets})"


def _step(ready: ReadyRun) -> str:
    numbers = ready.numbers
    processes = counted(numbers.world_size, "process", "processes")
    passes = f"gradient_accumulation_steps {numbers.micro_batches:,} on {processes}"
    if not ready.run.data.has_packs:
        whole = numbers.samples == numbers.packs  # or rows are pieces of samples
        pieces = f"{numbers.packs_per_step:,} pieces of about {counted(round(numbers.samples_per_step), 'sample')}"
        return f"{counted(numbers.packs_per_step, 'sample') if whole else pieces}, {passes}"
    samples = ready.run.size.samples
    fewest, most = numbers.step_samples
    note = f" ({fewest:,} to {most:,})" if fewest < most else ""
    note += f", {samples:,} requested" if samples is not None else ""
    return (
        f"{counted(numbers.packs_per_step, 'pack')}, about {counted(round(numbers.samples_per_step), 'sample')}{note}; "
        f"{passes}{_empty(numbers)}"
    )


def _empty(numbers: RunNumbers) -> str:
    """Micro-batches of a step that no pack is left for."""
    places = numbers.micro_batches * numbers.world_size
    idle = places - numbers.packs_per_step
    return f"; {idle} of {places} micro-batches idle, packs_per_step {places} would use them" if idle > 0 else ""


def _part_text(part: TrainedPart) -> str:
    if not part.trained:
        return f"{part.name} frozen"
    if part.trained == part.weights:
        return f"{part.name} {part.weights:,}"
    return f"{part.name} {part.trained:,} of {part.weights:,} ({percent(part.trained / part.weights)})"


def _compiler(ready: ReadyRun) -> str:
    return ", torch.compile" if ready.compiled else ""


def _packing_check(ready: ReadyRun) -> str:
    check = ready.packing_check
    if check is None:
        waits = ready.run.packing_check and ready.run.is_sharded
        return "run by all processes before the first step" if waits else "off (packing_check: false)"
    return "\n".join(check.summary_lines())


def _expectation_rows(ready: ReadyRun) -> Iterator[tuple[str, str]]:
    expected = ready.expected
    if expected is None:
        why = "no GPU, or an unknown one"
        if ready.numbers.looked_at is not None:
            why = "the data are not measured in advance (data.online)"
        yield "expected", f"no prediction of speed and memory: {why}"
        return
    by = "fitted to this GPU" if expected.fitted else "default coefficients; packtrain calibrate fits them"
    speed = f"{expected.tokens_per_second:,.0f} tokens/s, {duration(expected.step_seconds)}/step"
    yield "expected speed", f"{speed}, {duration(expected.run_seconds)} in total on {expected.gpu} ({by})"
    host = f"{gib(expected.host_bytes)} of host memory per node"
    yield "expected memory", f"{gib(expected.memory_bytes)} of {gib(expected.gpu_bytes)}; {host}"


def _batches_table(ready: ReadyRun) -> Table:
    """The first batches of every rank."""
    columns = ("rank", "batch", "samples", "images", "tiles", "patches", "tokens", "supervised", "fill")
    first = table("First batches", columns)
    for rank, infos in enumerate(ready.batches):
        for number, info in enumerate(infos):
            first.add_row(
                str(rank),
                str(number),
                f"{info.samples:,}",
                f"{info.images:,}",
                f"{info.tiles:,}",
                "?" if info.patches is None else f"{info.patches:,}",
                f"{info.tokens:,}",
                f"{info.supervised_tokens:,}",
                percent(batch_fill(ready, info)),
            )
    return first


def batch_fill(ready: ReadyRun, info: Any) -> float:
    """Real tokens over what a pack can hold, or over what a padded batch computes."""
    numbers = ready.numbers
    room = numbers.packing_length if numbers.mode == "packed" else info.tokens + info.padding
    return float(info.tokens / room) if room else 0.0


def ready_json(ready: ReadyRun) -> dict[str, object]:
    """The derived numbers of a run, for machines."""
    return {
        "folder": str(ready.run.folder),
        "mode": ready.numbers.mode,
        "numbers": asdict(ready.numbers),
        "model": {
            "name": ready.run.model.name,
            "method": ready.run.model.method,
            "attn_implementation": ready.attn_implementation,
            "dtype": ready.dtype,
            "master_weights": ready.masters,
            "compiled": ready.compiled,
            "trainable": [
                {"part": part.name, "weights": part.weights, "trained": part.trained} for part in ready.parts
            ],
        },
        "prepared": list(ready.done),
        "notes": [*ready.warnings, *ready.notes, *ready.risks],
        "course": asdict(ready.course),
        "packing_check": None if ready.packing_check is None else ready.packing_check.as_json(),
        "expected": None if ready.expected is None else asdict(ready.expected),
        "resumed": ready.resumed,
        "batches": [
            [
                {
                    **{name: getattr(info, name) for name in ("samples", "images", "tiles", "patches", "tokens")},
                    "fill": batch_fill(ready, info),
                }
                for info in infos
            ]
            for infos in ready.batches
        ],
    }
