"""If it goes wrong: what to look for while the recommended run trains, and what to change then."""

from __future__ import annotations

from packtrain.core.numbers import counted, duration, gib
from packtrain.planning.choice import MOST_DROPPED, dropped_share
from packtrain.planning.passes import PassColumns
from packtrain.planning.recommend import Findings, described
from packtrain.planning.study_values import MemoryReport, Trouble
from packtrain.planning.sweep import step_shape
from packtrain.predicting.options import CHEAP

_MORE_EPOCHS = 1.5
_LESS = 0.97  # of the memory: what needs more than this is no way out


def trouble(found: Findings, passes: PassColumns, memory: MemoryReport) -> tuple[Trouble, ...]:
    """What may happen, with what to do about it in this plan."""
    return (
        Trouble(sign="Out of memory", action=_out_of_memory(found, memory)),
        Trouble(sign="The loss jumps or becomes NaN", action=_unstable(found)),
        Trouble(sign="The loss falls too slowly", action=_slow(found)),
        Trouble(sign="Fewer samples per second than predicted", action=_waiting(found, passes)),
    )


def _out_of_memory(found: Findings, memory: MemoryReport) -> str:
    one = found.chosen
    allowed = max(2 * MOST_DROPPED, 2 * dropped_share(one))
    shorter = [
        other
        for other in found.simulations
        if other.packing_length < one.packing_length
        and other.memory_bytes < _LESS * one.memory_bytes
        and dropped_share(other) <= allowed
    ]
    ways = [
        f"{described(other)} needs {gib(other.memory_bytes)} and drops {counted(other.samples_dropped, 'sample')}"
        for other in sorted(shorter, key=lambda other: -other.memory_bytes)[:2]
    ]
    options = [
        saving
        for saving in memory.savings
        if saving.total_after < _LESS * memory.estimate.total and saving.option in CHEAP and saving.seconds
    ]
    for saving in sorted(options, key=lambda saving: saving.seconds or 0)[:1]:
        ways.append(f"{saving.option} ({saving.change}) needs {gib(saving.total_after)}; {saving.cost}")
    if not ways:
        return "nothing that was tried needs clearly less: use GPUs with more memory, or a smaller model."
    return f"the plan counts on {gib(one.memory_bytes)}. Next: {'; '.join(ways)}."


def _unstable(found: Findings) -> str:
    question, one = found.question, found.chosen
    half = max(1, question.samples_per_step // 2)
    step = step_shape(half, one.samples_per_pack, question.setup.gpus)
    rate = question.baseline.learning_rate
    lower = f"learning_rate {rate:g} -> {rate / 2:g}" if rate is not None else "half the learning_rate"
    text = f"{lower}, or more warm-up"
    if found.helps and step.packs < one.packs_per_step:
        text += f"; then effective_batch_size {half:,} ({counted(step.packs, 'pack')} per step) with the lower rate"
    return f"{text}. Look at the samples of the step: packtrain inspect RUN --step N."


def _slow(found: Findings) -> str:
    question, one = found.question, found.chosen
    epochs = max(question.epochs + 1, round(_MORE_EPOCHS * question.epochs))
    run = found.best if not found.helps else one
    return (
        f"num_train_epochs {question.epochs} -> {epochs}: {epochs * run.steps:,} steps, about "
        f"{duration(epochs * run.seconds)}; stop when the evaluation loss rises."
    )


def _waiting(found: Findings, passes: PassColumns) -> str:
    question, one = found.question, found.chosen
    media = int(passes["images"].sum() + passes["frames"].sum())
    if not media:
        return "the run's report shows how long it waits for data; if it does, raise dataloader_num_workers."
    rate = media / one.seconds / question.setup.gpus
    return (
        f"every GPU uses {rate:,.1f} images or frames a second at the predicted speed: where the run waits for data, "
        "raise dataloader_num_workers, or give its workers more cores."
    )
