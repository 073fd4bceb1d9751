"""Advice beside the settings: what to know before training with them, and what to do if it goes wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packtrain.core.numbers import about, counted, duration, gib, percent, signed_percent
from packtrain.packing.arrays import binding_resources
from packtrain.packing.packing_config import LIMITS, PackingConfig
from packtrain.planning.choice import MOST_DROPPED, dropped_share
from packtrain.planning.clock import PassColumns
from packtrain.planning.configs import RATES, derive_intervals
from packtrain.planning.question import Question
from packtrain.planning.recommend import Findings
from packtrain.planning.study_values import MemoryReport, Simulation, Trouble
from packtrain.planning.sweep import KEPT, pack_rows, simulate, step_shape
from packtrain.predicting.options import CHEAP
from packtrain.predicting.time import step_time

_VISION_HEAVY = 0.5  # share of the time in the vision encoder from which its limits are the first thing to look at
_FEW_STEPS = 20
_LOST = 0.05  # of the packs: a dropped last step that holds so many is said
_FEW_PACKS = 4  # of a step: fewer do not average out what packs of best fit differ in
_AS_MANY = 1.005  # times the packs: what packs that are alike may cost
_TINY = 20_000_000  # parameters: a model that is smaller is there to try things out
WORTH_SAYING = 1.02  # times as fast: what gains less is no advice


def hints(found: Findings, passes: PassColumns) -> tuple[str, ...]:
    """Everything worth saying about what is recommended, the most consequential first."""
    question, one = found.question, found.chosen
    config = question.packing.limited(one.settings)
    of_packs = (
        *_step(question, one),
        *_tail(config, one),
        *_alike(question, config, one),
        *_learning_rate(question, one),
        *_never_binding(question, config),
    )
    return (
        *_tiny(question),
        *_room(found),
        *_overlong(question, config, one, found),
        *_mixed(question, config, one),
        *_beyond_context(question, one),
        *_few_steps(one.steps if found.helps else found.best.steps),
        *_idle(found, passes),
        *(of_packs if found.helps else ()),
        *_vision(found, passes),
        *_without_checkpointing(found),
        *_todays_run(found),
        *_best_padded(found),
    )


def _tiny(question: Question) -> list[str]:
    """Times of a model that is only there to try things out are those of launches."""
    size = question.shape.parameters.total
    if size >= _TINY and not question.model.startswith("tiny:"):
        return []
    return [
        f"{question.model} is a tiny model of {size:,} parameters: speed, time and memory, and whether packing helps, "
        "mean nothing for a real one. Plan with --model for the model that you will train."
    ]


def _room(found: Findings) -> list[str]:
    """What fits because of changes is in the verdict."""
    if found.room is None or found.room.enough:
        return []
    changes = "; ".join(f"{change.parameter} {change.baseline} -> {change.packing}" for change in found.changes)
    return [
        f"Nothing that was tried fits {gib(found.question.usable_bytes)} ({changes or 'no option left'}): use "
        "more or larger GPUs, a smaller model, or shorter samples."
    ]


def _overlong(question: Question, config: PackingConfig, one: Simulation, found: Findings) -> list[str]:
    """Samples that fit no pack, which length would keep them, and what cutting would keep."""
    if not one.samples_dropped:
        return []
    tokens = np.minimum(question.rows.samples["tokens"], config.cutoff_len or 2**62)
    alone = one.samples_dropped == 1
    why = f"fit{'s' if alone else ''} no pack"
    if not found.helps:
        why = f"exceed{'s' if alone else ''} packing_length {config.packing_length:,}"
    elsewhere = f"; {question.baseline.name} trains on {'it' if alone else 'them'}."
    if config.cutoff_len is not None:
        why, elsewhere = f"fit{'s' if alone else ''} no pack or ha{'s' if alone else 've'} no label after the cut", "."
    text = (
        f"{counted(one.samples_dropped, 'sample')} ({percent(dropped_share(one))}) {why} and "
        f"{'is' if alone else 'are'} left out, with {one.tokens_dropped:,} tokens{elsewhere}"
    )
    longest = int(tokens.max())
    if longest > config.packing_length:
        text += f" A packing_length of {longest:,} would keep every length"
        keeping = [s for s in found.simulations if s.samples_dropped < one.samples_dropped and s.fits]
        nearest = min(keeping, key=lambda s: s.packing_length, default=None)
        text += f"; {nearest.name} fits and leaves out {nearest.samples_dropped:,}." if nearest else "."
    over = tokens > config.packing_length
    cuttable = over & (question.rows.samples["tokens"] - question.rows.tails.tokens <= config.packing_length)
    if config.overlong == "drop" and cuttable.any():
        number = round(int(cuttable.sum()) * question.rows.scale)
        text += f" With overlong: truncate or split, {number:,} could be kept in part or in pieces."
    return [text]


def _mixed(question: Question, config: PackingConfig, one: Simulation) -> list[str]:
    """What repeats and weights of a mixture make of the records that were measured."""
    rows = question.rows
    counts = rows.counts(config)
    if counts is None:
        return []
    records, unused = (round(number * rows.scale) for number in (len(rows), int((counts == 0).sum())))
    text = f"By the mixture's repeats and weights an epoch has {one.samples_packed:,} samples of "
    text += f"{counted(records, 'measured record')}"
    if unused:
        text += f" and does not use {unused:,} of them; the next epoch takes the next part"
    return [f"{text}."]


def _beyond_context(question: Question, one: Simulation) -> list[str]:
    """A pack may be longer than the context, since positions start again in every sample; a sample may not."""
    context, longest = question.shape.language.context_length, one.worst.longest
    if longest <= context:
        return []
    return [
        f"The longest sample has {longest:,} tokens, more than the {context:,} that the model was made for: "
        "cut such samples, or leave them out with max_sample_length."
    ]


def _step(question: Question, one: Simulation) -> list[str]:
    before = question.samples_before(one.samples_packed)
    moved = one.samples_per_step / before - 1
    if abs(moved) < KEPT:
        return []
    return [
        f"A step has {about(one.samples_per_step)} samples instead of {before:,} ({signed_percent(moved)}): a pack "
        f"holds {one.samples_per_pack:.1f}, and a step has whole packs."
    ]


def _tail(config: PackingConfig, one: Simulation) -> list[str]:
    """An incomplete last step that is dropped, where epochs are so short that it is much of one."""
    tail = one.packs % one.packs_per_step
    if not config.packing_drop_last or tail < _LOST * one.packs:
        return []
    share = f"{counted(tail, 'pack')} of {one.packs:,} ({percent(tail / one.packs)})"
    return [
        f"packing_drop_last leaves out {share} of every epoch, whose last step would not be whole: "
        "packing_drop_last: false trains them."
    ]


def _alike(question: Question, config: PackingConfig, one: Simulation) -> list[str]:
    """Packs of best fit hold few long or many short samples: a step of few packs is biased by length."""
    if one.packs_per_step >= _FEW_PACKS or one.steps == 1 or config.packing_strategy != "best_fit":
        return []
    alike = pack_rows(question, replace(config, packing_strategy="knapsack"))
    packs, before = len(alike.passes), len(pack_rows(question, config).passes)
    if packs > _AS_MANY * before:
        return []
    return [
        f"A step has only {counted(one.packs_per_step, 'pack')}, and packs of best_fit hold few long or many short "
        f"samples, which biases a step by length: packing_strategy: knapsack makes packs alike, {packs:,} of them "
        f"where best_fit has {before:,}."
    ]


def _few_steps(steps: int) -> list[str]:
    if steps >= _FEW_STEPS:
        return []
    return [f"An epoch has only {counted(steps, 'step')}: train more epochs, or fewer samples per step."]


def _idle(found: Findings, passes: PassColumns) -> list[str]:
    """GPUs that get no pack, and what a larger step would gain: also a reason why packing does not help."""
    question, one = found.question, found.chosen
    gpus = question.setup.gpus
    idle = one.micro_batches * gpus - one.packs_per_step
    if not idle:
        return []
    even = one.packs_per_step + idle
    gain = one.seconds / question.epoch_of_packs(passes, one.packing_length, even)
    if gain < WORTH_SAYING:
        return []
    when = "all the time" if one.micro_batches == 1 else f"in one of {one.micro_batches} micro-batches"
    are = ("is" if idle == 1 else "are") if found.helps else "would be"
    return [
        f"With {counted(one.packs_per_step, 'pack')} per step, {idle} of {gpus} GPUs {are} "
        f"idle {when}. {even} packs per step ({even * one.samples_per_pack:,.0f} samples) would keep all busy: "
        f"{gain * one.tokens_per_second:,.0f} real tokens/s, {gain:.2f} times as many; learning rates would have to "
        "follow."
    ]


def _learning_rate(question: Question, one: Simulation) -> list[str]:
    new = derive_intervals(
        question.baseline,
        before=question.samples_before(one.samples_packed),
        after=one.samples_per_step,
        steps=one.steps,
    )
    if not new.moved:
        return []
    factor = new.factor
    text = f"Learning rates: a step has {factor:.2f} times the samples; with Adam multiply by about {factor**0.5:.2f}"
    text += (
        f" (square root), by {factor:.2f} at most (linear)"
        if factor > 1
        else f" (square root) or {factor:.2f} (linear)"
    )
    given = [(name, getattr(question.baseline, name), getattr(new, name)) for name in RATES]
    rates = ", ".join(f"{name} {old:g} -> {now:g}" for name, old, now in given if old is not None)
    return [f"{text}{': ' + rates if rates else ', for every module alike'}."]


def _never_binding(question: Question, config: PackingConfig) -> list[str]:
    """Limits that no pack can reach before another one."""
    capacities = config.capacities()
    if len(capacities) < 2:
        return []
    names = tuple(capacities)
    sizes = question.rows.samples.matrix(names)
    limits = np.array(list(capacities.values()), np.int64)
    sizes = sizes[(sizes <= limits).all(axis=1)]
    binding = {names[at] for at in binding_resources(sizes, limits)} if len(sizes) else set(names)
    settings = {resource: setting for setting, resource in LIMITS.items()}
    first = ", ".join(f"{settings[name]} {capacities[name]:,}" for name in names if name in binding)
    return [
        f"{settings[name]} {capacities[name]:,} can never bind: every sample uses up {first} sooner."
        for name in names
        if name not in binding
    ]


def vision_share(question: Question, passes: PassColumns) -> float:
    """The part of the predicted time that goes into patches."""
    mean = passes.mean()
    if not mean.patches:
        return 0.0
    blind = replace(mean, patches=0, squared_patches=0, largest_patches=0)
    whole, rest = (
        step_time(question.shape, question.setup, load, question.gpu, question.time).seconds for load in (mean, blind)
    )
    return 1 - rest / whole


def _vision(found: Findings, passes: PassColumns) -> list[str]:
    """What smaller media would gain, where the vision encoder is most of the work."""
    share, one = vision_share(found.question, passes), found.chosen
    if share < _VISION_HEAVY:
        return []
    text = f"The vision encoder takes {percent(share)} of the time."
    gaining = [option for option in found.media if option.simulation.seconds * WORTH_SAYING < one.seconds]
    if not gaining:
        return [text]
    epoch = "an epoch" if found.helps else "a packed epoch"
    gains = ", ".join(
        f"{option.label} would bring {epoch} from {duration(one.seconds)} to {duration(option.simulation.seconds)}"
        for option in gaining
    )
    return [f"{text} Smaller media gain most: {gains}."]


def _without_checkpointing(found: Findings) -> list[str]:
    """Is there room for keeping activations, which is faster?"""
    question = found.question
    if not found.helps or not question.setup.gradient_checkpointing:
        return []
    bold = replace(question, setup=replace(question.setup, gradient_checkpointing=False))
    fitting = [
        s
        for s in found.simulations
        if bold.fits(s.worst) and dropped_share(s) <= max(0.005, dropped_share(found.chosen))
    ]
    if not fitting:
        return []
    longest = max(fitting, key=lambda s: s.tokens_per_second)
    config = question.packing.limited(longest.settings)
    kept = simulate(bold, config)
    if kept is None or kept.tokens_per_second <= found.chosen.tokens_per_second:
        return []
    gain = kept.tokens_per_second / found.chosen.tokens_per_second - 1
    return [
        f"Without gradient checkpointing {longest.name} would need {gib(kept.memory_bytes)} and reach "
        f"{kept.tokens_per_second:,.0f} real tokens/s ({signed_percent(gain)} against the recommended packing): "
        "worth a trial, with less room for surprises."
    ]


def _todays_run(found: Findings) -> list[str]:
    """What to know about the run that everything is compared with."""
    own, one, best, baseline = found.padded[0], found.chosen, found.best, found.question.baseline
    if not own.fits:
        name = baseline.name[0].upper() + baseline.name[1:]
        return [
            f"{name} itself does not fit: its worst batch, with a sample of {own.worst.longest:,} tokens, needs "
            f"{gib(own.memory_bytes)} of {gib(found.question.usable_bytes)}; its time is what it would "
            "be with more memory."
        ]
    if not found.helps and one.speedup > max(1.0, found.gain):
        return [
            f"A packed run would be {one.speedup:.2f} times as fast as {baseline.described}, but not by "
            f"packing: the recommended batches are {best.tokens_per_second / own.tokens_per_second:.2f} times as fast, "
            "too."
        ]
    return []


def _best_padded(found: Findings) -> list[str]:
    own, one, best = found.padded[0], found.chosen, found.better_padded
    if best is own or not found.helps:
        return []
    order = "grouped by length" if best.order == "by_length" else "in random order"
    text = (
        f"Without packing, batches of {best.batch_size} {order} would be the best found with the kernels of padded "
        f"batches: {best.tokens_per_second / own.tokens_per_second:.2f} times as fast as "
        f"{found.question.baseline.name}, where packing is {one.speedup:.2f}"
    )
    if best.order == "by_length":
        text += "; every such batch has samples of about one length"
    return [f"{text}."]


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
    epochs = max(question.baseline.epochs + 1, round(_MORE_EPOCHS * question.baseline.epochs))
    run = found.best if not found.helps else one
    return (
        f"num_train_epochs {question.baseline.epochs} -> {epochs}: {epochs * run.steps:,} steps, about "
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
