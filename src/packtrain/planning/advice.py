"""Advice beside the settings: what to know before training with them, and what to do if it goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from packtrain.core.numbers import counted, decimal, duration, gib, percent, signed_percent
from packtrain.packing.multi_resource import binding_resources
from packtrain.packing.packing_config import SETTING_OF
from packtrain.planning.choice import MOST_DROPPED
from packtrain.planning.configs import RATES, derive_intervals
from packtrain.planning.recommend import Findings
from packtrain.planning.study_values import MemoryReport, Trouble
from packtrain.planning.sweep import KEPT, pack_rows, simulate, step_shape
from packtrain.predicting.options import CHEAP
from packtrain.predicting.time import step_time

_VISION_HEAVY = 0.5  # share of the time in the vision encoder from which its limits are the first thing to look at
_FEW_STEPS = 20
_LOST = 0.05  # of the packs: a dropped last step that holds this many is worth a line
_FEW_PACKS = 4  # of a step: fewer do not average out how packs of best fit differ
_AS_MANY = 1.005  # times the packs: what similar packs may cost
_EVEN = 0.2  # of padding: batches with more of it are not of one length
_TINY = 20_000_000  # parameters: a smaller model is there to try things out
WORTH_SAYING = 1.02  # times as fast: what gains less is no advice
_MORE_EPOCHS = 1.5
_LESS = 0.97  # of the memory: what needs more than this is no way out


def advice(findings: Findings) -> tuple[str, ...]:
    """Everything worth saying about what is recommended, the most consequential first."""
    of_packs = (_step, _tail, _similar_packs, _learning_rate, _never_binding) if findings.helps else ()
    lines = (
        *(_tiny, _room, _overlong, _mixture, _beyond_context, _few_steps, _idle),
        *of_packs,
        *(_vision, _without_checkpointing, _baseline, _best_padded),
    )
    return tuple(line for find in lines for line in find(findings))


def _tiny(findings: Findings) -> Iterator[str]:
    """Times of a model that is only there to try things out are those of kernel launches."""
    name, size = findings.question.model, findings.question.shape.parameters.total
    if size < _TINY or name.startswith("tiny:"):
        yield (
            f"{name} is a tiny model of {size:,} parameters: speed, time and memory, and whether packing helps, "
            "mean nothing for a real one. Plan with --model for the model that you will train."
        )


def _room(findings: Findings) -> Iterator[str]:
    """What fits because of changes is in the verdict."""
    if findings.room is not None and not findings.room.enough:
        changes = "; ".join(f"{change.parameter} {change.baseline} -> {change.packing}" for change in findings.changes)
        yield (
            f"Nothing that was tried fits {gib(findings.question.usable_bytes)} ({changes or 'no option left'}): use "
            "more or larger GPUs, a smaller model, or shorter samples."
        )


def _overlong(findings: Findings) -> Iterator[str]:
    """Samples that fit no pack, which length would keep them, and what cutting would keep."""
    question, one, config = findings.question, findings.chosen, findings.config
    if not one.samples_dropped:
        return
    samples, tails = question.rows.samples, question.rows.tails
    tokens = np.minimum(samples["tokens"], config.cutoff_len or 2**62)
    s, them, are = ("s", "it", "is") if one.samples_dropped == 1 else ("", "them", "are")
    why, elsewhere = f"fit{s} no pack", f"; {question.baseline.name} trains on {them}."
    if config.cutoff_len is not None:
        why, elsewhere = f"fit{s} no pack or ha{'s' if s else 've'} no label after the cut", "."
    elif not findings.helps:
        why = f"exceed{s} packing_length {config.packing_length:,}"
    text = (
        f"{counted(one.samples_dropped, 'sample')} ({percent(one.dropped_share)}) {why} and {are} left out, with "
        f"{one.tokens_dropped:,} tokens{elsewhere}"
    )
    if (longest := int(tokens.max())) > config.packing_length:
        text += f" A packing_length of {longest:,} would keep every length"
        keeping = [s for s in findings.simulations if s.fits and s.samples_dropped < one.samples_dropped]
        nearest = min(keeping, key=lambda other: other.packing_length, default=None)
        text += f"; {nearest.name} fits and leaves out {nearest.samples_dropped:,}." if nearest else "."
    cuttable = (tokens > config.packing_length) & (samples["tokens"] - tails.tokens <= config.packing_length)
    if config.overlong == "drop" and cuttable.any():
        number = round(int(cuttable.sum()) * question.rows.scale)
        text += f" With overlong: truncate or split, {number:,} could be kept in part or in pieces."
    yield text


def _mixture(findings: Findings) -> Iterator[str]:
    """What repeats and weights of a mixture make of the records that were measured."""
    rows, one = findings.question.rows, findings.chosen
    if (counts := rows.counts(findings.config)) is None:
        return
    records, unused = (round(number * rows.scale) for number in (len(rows), int((counts == 0).sum())))
    rest = f" and does not use {unused:,} of them; the next epoch takes the next part" if unused else ""
    yield (
        f"With the mixture's repeats and weights an epoch has {one.samples_packed:,} samples of "
        f"{counted(records, 'measured record')}{rest}."
    )


def _beyond_context(findings: Findings) -> Iterator[str]:
    """A pack may be longer than the context, since positions start again in every sample; a sample may not."""
    context, longest = findings.question.shape.language.context_length, findings.chosen.worst.longest
    if longest > context:
        yield (
            f"The longest sample has {longest:,} tokens, more than the {context:,} of the model's context: truncate "
            "such samples, or leave them out with max_sample_length."
        )


def _few_steps(findings: Findings) -> Iterator[str]:
    steps = findings.recommended.steps
    if steps < _FEW_STEPS:
        yield f"An epoch has only {counted(steps, 'step')}: train more epochs, or fewer samples per step."


def _idle(findings: Findings) -> Iterator[str]:
    """GPUs that get no pack, and what a larger step would gain: also a reason why packing does not help."""
    question, one = findings.question, findings.chosen
    gpus = question.setup.gpus
    idle = one.micro_batches * gpus - one.packs_per_step
    even = one.packs_per_step + idle
    gain = one.seconds / question.epoch_of_packs(findings.passes, one.packing_length, even) if idle else 1.0
    if gain < WORTH_SAYING:
        return
    when = "all the time" if one.micro_batches == 1 else f"in one of {one.micro_batches} micro-batches"
    are = ("is" if idle == 1 else "are") if findings.helps else "would be"
    yield (
        f"With {counted(one.packs_per_step, 'pack')} per step, {idle} of {gpus} GPUs {are} idle {when}. {even} packs "
        f"per step ({even * one.samples_per_pack:,.0f} samples) would keep all busy: "
        f"{gain * one.tokens_per_second:,.0f} real tokens/s, {gain:.2f} times as many; learning rates would have to be "
        "scaled."
    )


def _step(findings: Findings) -> Iterator[str]:
    one = findings.chosen
    before = findings.question.samples_before(one.samples_packed)
    moved = one.samples_per_step / before - 1
    if abs(moved) >= KEPT:
        yield (
            f"A step has {decimal(one.samples_per_step)} samples instead of {before:,} ({signed_percent(moved)}): a "
            f"pack holds {decimal(one.samples_per_pack)} on average, and a step has whole packs."
        )


def _tail(findings: Findings) -> Iterator[str]:
    """An incomplete last step that is dropped, where epochs are so short that it is much of one."""
    one = findings.chosen
    tail = one.packs % one.packs_per_step
    if findings.config.packing_drop_last and tail >= _LOST * one.packs:
        share = f"{counted(tail, 'pack')} of {one.packs:,} ({percent(tail / one.packs)})"
        yield (
            f"packing_drop_last leaves out {share} of every epoch, an incomplete last step: packing_drop_last: false "
            "trains them."
        )


def _similar_packs(findings: Findings) -> Iterator[str]:
    """Packs of best fit hold few long or many short samples: a step of few packs is biased by length."""
    question, one, config = findings.question, findings.chosen, findings.config
    if one.packs_per_step >= _FEW_PACKS or one.steps == 1 or config.packing_strategy != "best_fit":
        return
    similar = len(pack_rows(question, replace(config, packing_strategy="knapsack")).passes)
    best_fit = len(pack_rows(question, config).passes)
    if similar <= _AS_MANY * best_fit:
        yield (
            f"A step has only {counted(one.packs_per_step, 'pack')}, and packs of best_fit hold either few long or "
            f"many short samples, which biases a step by length: packing_strategy: knapsack makes similar packs, "
            f"{similar:,} of them where best_fit has {best_fit:,}."
        )


def _learning_rate(findings: Findings) -> Iterator[str]:
    baseline, one = findings.question.baseline, findings.chosen
    before = findings.question.samples_before(one.samples_packed)
    new = derive_intervals(baseline, before=before, after=one.samples_per_step, steps=one.steps)
    if not new.moved:
        return
    linear = f"by {new.factor:.2f} at most" if new.factor > 1 else f"or {new.factor:.2f}"
    given = [(name, getattr(baseline, name), getattr(new, name)) for name in RATES]
    rates = ", ".join(f"{name} {old:g} -> {now:g}" for name, old, now in given if old is not None)
    yield (
        f"Learning rates: a step has {new.factor:.2f} times the samples; with Adam multiply them by about "
        f"{new.factor**0.5:.2f} (square-root scaling), {linear} (linear scaling)"
        f"{': ' + rates if rates else ', the same for every module'}."
    )


def _never_binding(findings: Findings) -> Iterator[str]:
    """Limits that no pack can reach before another one."""
    capacities = findings.config.capacities()
    names, limits = tuple(capacities), np.array(list(capacities.values()), np.int64)
    sizes = findings.question.rows.samples.matrix(names)
    sizes = sizes[(sizes <= limits).all(axis=1)]
    binding = {names[at] for at in binding_resources(sizes, limits)} if len(sizes) else set(names)
    first = ", ".join(f"{SETTING_OF[name]} {capacities[name]:,}" for name in names if name in binding)
    for name in names:
        if name not in binding:
            yield f"{SETTING_OF[name]} {capacities[name]:,} can never bind: every sample uses up {first} sooner."


def _vision_share(findings: Findings) -> float:
    """The part of the predicted time that goes into patches."""
    question, mean = findings.question, findings.passes.mean()
    if not mean.patches:
        return 0.0
    blind = replace(mean, patches=0, squared_patches=0, largest_patches=0)
    whole, rest = (
        step_time(question.shape, question.setup, load, question.gpu, question.time).seconds for load in (mean, blind)
    )
    return 1 - rest / whole


def _vision(findings: Findings) -> Iterator[str]:
    """What smaller media would gain, where the vision encoder is most of the work."""
    share, one = _vision_share(findings), findings.chosen
    if share < _VISION_HEAVY:
        return
    epoch = "an epoch" if findings.helps else "a packed epoch"
    gains = ", ".join(
        f"{option.label} would bring {epoch} from {duration(one.seconds)} to {duration(option.simulation.seconds)}"
        for option in findings.media
        if option.simulation.seconds * WORTH_SAYING < one.seconds
    )
    text = f"The vision encoder takes {percent(share)} of the time."
    yield f"{text} Smaller media gain most: {gains}." if gains else text


def _without_checkpointing(findings: Findings) -> Iterator[str]:
    """Is there room for keeping activations, which is faster?"""
    question, one = findings.question, findings.chosen
    if not findings.helps or not question.setup.gradient_checkpointing:
        return
    bold = replace(question, setup=replace(question.setup, gradient_checkpointing=False))
    allowed = max(MOST_DROPPED, one.dropped_share)
    fitting = [other for other in findings.simulations if bold.fits(other.worst) and other.dropped_share <= allowed]
    if not fitting:
        return
    fastest = max(fitting, key=lambda other: other.tokens_per_second)
    kept = simulate(bold, question.packing.limited(fastest.settings))
    if kept is not None and kept.tokens_per_second > one.tokens_per_second:
        gain = kept.tokens_per_second / one.tokens_per_second - 1
        yield (
            f"Without gradient checkpointing {fastest.name} would need {gib(kept.memory_bytes)} and reach "
            f"{kept.tokens_per_second:,.0f} real tokens/s ({signed_percent(gain)} against the recommended packing): "
            "worth a try, with less headroom."
        )


def _baseline(findings: Findings) -> Iterator[str]:
    """What to know about the run that everything is compared with."""
    own, one, best = findings.padded[0], findings.chosen, findings.best
    baseline, usable = findings.question.baseline, findings.question.usable_bytes
    if not own.fits:
        name = baseline.name[0].upper() + baseline.name[1:]
        yield (
            f"{name} itself does not fit: its worst batch, with a sample of {own.worst.longest:,} tokens, needs "
            f"{gib(own.memory_bytes)} of {gib(usable)}; its time is what it would be with more memory."
        )
    elif not findings.helps and one.speedup > max(1.0, findings.gain):
        yield (
            f"A packed run would be {one.speedup:.2f} times as fast as {baseline.description}, but not by packing: the "
            f"recommended batches are {best.tokens_per_second / own.tokens_per_second:.2f} times as fast as well."
        )


def _best_padded(findings: Findings) -> Iterator[str]:
    own, one, best = findings.padded[0], findings.chosen, findings.better_padded
    if best is own or not findings.helps:
        return
    by_length = best.order == "by_length"
    order = "grouped by length" if by_length else "in random order"
    biased = "; all samples of such a batch have about the same length"
    note = biased if by_length and best.waste < _EVEN else ""
    yield (
        f"Without packing, batches of {best.batch_size} {order} are the fastest with the kernels of padded batches: "
        f"{best.tokens_per_second / own.tokens_per_second:.2f} times as fast as {findings.question.baseline.name}, "
        f"where packing is {one.speedup:.2f} times as fast{note}."
    )


# ---- if it goes wrong


def trouble(findings: Findings, memory: MemoryReport) -> tuple[Trouble, ...]:
    """What may happen while the recommended run trains, with what to do about it in this plan."""
    return (
        Trouble("Out of memory", _out_of_memory(findings, memory)),
        Trouble("The loss jumps or becomes NaN", _unstable(findings)),
        Trouble("The loss falls too slowly", _slow(findings)),
        Trouble("Fewer samples per second than predicted", _waiting(findings)),
    )


def _out_of_memory(findings: Findings, memory: MemoryReport) -> str:
    one = findings.chosen
    allowed = max(2 * MOST_DROPPED, 2 * one.dropped_share)
    shorter = [
        other
        for other in findings.simulations
        if other.packing_length < one.packing_length
        and other.memory_bytes < _LESS * one.memory_bytes
        and other.dropped_share <= allowed
    ]
    ways = [
        f"{other.name} needs {gib(other.memory_bytes)} and drops {counted(other.samples_dropped, 'sample')}"
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
    return f"the plan expects {gib(one.memory_bytes)}. Try next: {'; '.join(ways)}."


def _unstable(findings: Findings) -> str:
    question, one = findings.question, findings.chosen
    half = max(1, question.samples_per_step // 2)
    step = step_shape(half, one.samples_per_pack, question.setup.gpus)
    rate = question.baseline.learning_rate
    text = f"learning_rate {rate:g} -> {rate / 2:g}" if rate is not None else "halve the learning_rate"
    text += ", or more warm-up"
    if findings.helps and step.packs < one.packs_per_step:
        text += f"; then effective_batch_size {half:,} ({counted(step.packs, 'pack')} per step) with the lower rate"
    return f"{text}. Look at the samples of the step: packtrain inspect RUN --step N."


def _slow(findings: Findings) -> str:
    run, before = findings.recommended, findings.question.baseline.num_train_epochs
    epochs = max(before + 1, round(_MORE_EPOCHS * before))
    return (
        f"num_train_epochs {before} -> {epochs}: {epochs * run.steps:,} steps, about {duration(epochs * run.seconds)}; "
        "stop when the evaluation loss rises."
    )


def _waiting(findings: Findings) -> str:
    passes, gpus = findings.passes, findings.question.setup.gpus
    if not (media := int(passes["images"].sum() + passes["frames"].sum())):
        return "the run's report shows how long it waits for data; if it does, raise dataloader_num_workers."
    return (
        f"every GPU takes {media / findings.chosen.seconds / gpus:,.1f} images or frames a second at the predicted "
        "speed: if the run waits for data, raise dataloader_num_workers, or give its workers more cores."
    )
