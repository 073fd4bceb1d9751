"""The study from beginning to end: statistics, sweep, choice, the chosen plan in full, memory, recommendation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packtrain.core.errors import ConfigError
from packtrain.core.modality import VISION_TOKENS
from packtrain.measuring.measure_summary import unread_note
from packtrain.measuring.table import CostTable
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.plan_builder import build_plan
from packtrain.packing.resources import EXTRAS, RESOURCES
from packtrain.packing.schedule import balance_table
from packtrain.planning.advice import advice, trouble
from packtrain.planning.choice import Choice, Room, acceptable, choose, make_room
from packtrain.planning.clock import PassColumns, pack_passes
from packtrain.planning.dataset_statistics import dataset_stats
from packtrain.planning.memory_report import memory_report
from packtrain.planning.padding import best_padded, padded_runs, padding_cost
from packtrain.planning.question import UNDECIDED, Baseline, Question
from packtrain.planning.recommend import Findings, recommend
from packtrain.planning.study_values import PicturePack, PictureSample, Simulation, Study
from packtrain.planning.sweep import default_lengths, pack_rows, smaller_media, sweep
from packtrain.predicting.time import work_seconds

SHOWN = 40  # packs of the picture
RANKS = (1, 2, 8)  # times the GPUs there are, two at least


@dataclass(frozen=True, slots=True)
class StudyProgress:
    """How far a study is."""

    done: int
    total: int
    doing: str


@dataclass(frozen=True, slots=True)
class StudyOutcome:
    """The study, and the first epoch of the plan that it recommends."""

    study: Study
    plan: PackPlan


def study_outcome(
    table: CostTable,
    question: Question,
    *,
    lengths: Sequence[int] | None = None,
    limits: Sequence[Mapping[str, int]] = (),
    progress: Callable[[StudyProgress], None] = lambda _: None,
) -> StudyOutcome:
    """Study a measured dataset for a model and GPUs, and build the plan that comes out best.

    `lengths` are tried instead of the usual ones, sets of further `limits` at every length.
    """
    progress(StudyProgress(0, 1, "reading"))
    question, simulations, room = _sweep(question, _lengths(lengths, question), limits, progress)
    chosen = choose(simulations, question.samples_per_step, fixed_step=question.baseline.sets_step)
    one = chosen.simulation
    config = question.packing.limited(one.settings)
    config = replace(
        config, packs_per_step=one.packs_per_step, packing_drop_last=False
    )  # numbers are about all samples
    progress(StudyProgress(0, 1, f"packing {config.packing_length:,}"))
    plan = build_plan(table, config, work_seconds(question.shape, question.setup, question.gpu, question.time))
    findings = _findings(question, table, simulations, chosen, room, plan)
    progress(StudyProgress(0, 1, "memory"))
    return StudyOutcome(_study(findings), plan)


def _sweep(
    question: Question,
    lengths: Sequence[int],
    limits: Sequence[Mapping[str, int]],
    progress: Callable[[StudyProgress], None],
) -> tuple[Question, tuple[Simulation, ...], Room | None]:
    """The sweep; where nothing fits, once more with options that make room."""

    def run_sweep(one: Question, sets: Sequence[Mapping[str, int]]) -> tuple[Simulation, ...]:
        return sweep(one, lengths, sets, lambda done, total, doing: progress(StudyProgress(done, total, doing)))

    simulations = run_sweep(question, limits)
    kept = acceptable(simulations, question.samples_per_step, fixed_step=question.baseline.sets_step)
    if any(one.fits for one in kept):
        return question, simulations, None
    room = make_room(question, simulations)
    question = replace(question, setup=room.setup, requested=question.setup)
    return question, run_sweep(question, (*limits, *room.limits)), room


def _findings(
    question: Question,
    table: CostTable,
    simulations: tuple[Simulation, ...],
    choice: Choice,
    room: Room | None,
    plan: PackPlan,
) -> Findings:
    """Everything that the recommendation is made from, beside the sweep."""
    epoch, config, chosen = plan.epoch(0), plan.config, choice.simulation
    passes = pack_passes({name: epoch.load(name) for name in (*RESOURCES, *EXTRAS)})
    packed = pack_rows(question, config)
    if question.rows.scale != 1:
        whole = _of_whole_plan(question, chosen, plan, passes)
        simulations = tuple(whole if one is chosen else one for one in simulations)
        choice = replace(choice, simulation=whole)
    best = best_padded(question, packed.samples, packed.dropped)
    return Findings(
        question=question,
        table=table,
        plan=plan,
        passes=passes,
        simulations=simulations,
        choice=choice,
        padded=padded_runs(question, packed.samples),
        best=best,
        padding_cost=padding_cost(question, packed.samples, best),
        mean_tokens=float(packed.samples["tokens"].mean()),
        room=room,
        media=smaller_media(question, table, config, chosen),
    )


def _study(findings: Findings) -> Study:
    """The findings as the value that is rendered."""
    question, table, plan = findings.question, findings.table, findings.plan
    dataset, memory = dataset_stats(table), memory_report(findings)
    ledger = Counter(dataset.measured_ledger) + Counter(table.dropped.values()) + Counter(plan.summary.ledger.reasons)
    return Study(
        costs=str(table.folder),
        model=question.model,
        model_type=question.shape.model_type,
        parameters=question.shape.parameters.total,
        gpu=question.gpu.name,
        gpus=question.setup.gpus,
        epochs=question.baseline.num_train_epochs,
        setup=question.setup,
        baseline=_resolved(question),
        dataset=dataset,
        padded=(*findings.padded, findings.best),
        gain=findings.gain,
        simulations=tuple(findings.simulations),
        recommendation=recommend(findings, advice(findings), trouble(findings, memory)),
        memory=memory,
        balance=tuple(balance_table(plan, tuple(times * max(question.setup.gpus, 2) for times in RANKS))),
        picture=_picture(plan, table),
        ledger=dict(ledger),
        notes=_notes(question, table),
    )


def _lengths(lengths: Sequence[int] | None, question: Question) -> Sequence[int]:
    packing, tokens = question.packing, question.rows.samples["tokens"]
    given = None if packing.packing_length == UNDECIDED else packing.packing_length
    if packing.cutoff_len is not None:
        tokens = np.minimum(tokens, packing.cutoff_len)
    longest = int(tokens.max())
    if lengths is None and given is not None:
        lengths = (given,)
    elif lengths is None:
        step = {"samples_per_step": question.samples_per_step, "gpus": question.setup.gpus}
        context = min(question.shape.language.context_length, 1 << 20)  # some configs give more than any GPU holds
        lengths = default_lengths(tokens, context, **step)
        if packing.cutoff_len is not None:  # shorter packs would cut samples once more
            lengths = [length for length in lengths if length >= longest] or [packing.cutoff_len]
    if packing.overlong == "error":
        lengths = [length for length in lengths if length >= longest]
        if not lengths:
            raise ConfigError(
                "packing.overlong",
                got=f"error, with a sample of {longest:,} tokens",
                expected="a length that holds every sample",
                fix=f"try {longest:,}, or choose overlong: drop, truncate or split",
            )
    if not lengths:
        fix = "leave it out for the usual ones"
        raise ConfigError("lengths", got="none", expected="at least one length to try", fix=fix)
    return lengths


def _of_whole_plan(question: Question, one: Simulation, plan: PackPlan, passes: PassColumns) -> Simulation:
    """The chosen simulation, which was made on a part of the rows, with the numbers of all of them."""
    counts = plan.summary.epochs[0]
    worst = passes.worst()
    memory = question.memory_of(worst).total
    seconds = question.epoch_of_packs(passes, one.packing_length, one.packs_per_step)
    samples = plan.epoch(0).num_samples
    return replace(
        one,
        packs=counts.packs,
        bound=counts.bound,
        of_bound=counts.of_bound,
        fill=counts.fill,
        samples_packed=samples,
        samples_dropped=counts.dropped,
        tokens_dropped=counts.tokens_drawn - counts.totals["tokens"],
        samples_per_pack=samples / counts.packs,
        samples_per_step=one.packs_per_step * samples / counts.packs,
        steps=-(-counts.packs // one.packs_per_step),
        worst=worst,
        memory_bytes=memory,
        fits=memory <= question.usable_bytes,
        seconds=seconds,
        tokens_per_second=counts.totals["tokens"] / seconds,
        speedup=one.speedup * counts.totals["tokens"] / seconds / one.tokens_per_second,
    )


def _resolved(question: Question) -> Baseline:
    """The baseline with everything about its step."""
    return replace(
        question.baseline,
        gradient_accumulation_steps=question.baseline.accumulation(question.setup.gpus),
        effective_batch_size=question.samples_per_step,
        chunked_loss=question.padded_setup.chunked_loss,
    )


def _layers(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def _notes(question: Question, table: CostTable) -> tuple[str, ...]:
    """What the numbers rest on."""
    fitted = question.time is not None and question.time.fitted
    notes = [
        "Time is predicted with " + ("coefficients fitted to this machine." if fitted else "default coefficients."),
        "Memory is estimated with "
        + ("coefficients fitted to this GPU." if question.memory.fitted else "default coefficients."),
        f"Parameters were counted from the model's {question.shape.counted_from}.",
        *question.shape.notes,
        "A packing fits when it leaves a tenth of the GPU's memory free; its memory is estimated for a pack with the "
        "maximum of every resource, which no single pack may reach.",
        "Speed-ups are ratios of real tokens per second; those in the table of packings are over "
        f"{question.baseline.description}.",
        f"Packs are assumed to be trained with {_layers(question.setup.compiled)} layers and padded batches with "
        f"{_layers(question.baseline.compiled)} ones; unless training.compile is set, packtrain train compiles "
        "layers for packs on a GPU and not for padded batches.",
    ]
    if question.rows.scale != 1:
        notes.append(
            f"The sweep and the padded runs were computed on {len(question.rows):,} of {len(table):,} rows drawn at "
            "random, and scaled; the recommended packing was computed on all rows."
        )
    images = question.rows.samples["images"]
    if np.any(images > 1):
        notes.append(
            "Attention in the vision encoder is estimated as if all images of a sample were as large as its largest."
        )
    if question.packing.packing_drop_last:
        notes.append("Counts ignore packing_drop_last, which leaves out less than one step of every epoch.")
    if question.gpu.notes:
        notes.append(f"{question.gpu.name}: {question.gpu.notes}.")
    return (*notes, *unread_note(table.summary.unread))


def _picture(plan: PackPlan, table: CostTable) -> tuple[PicturePack, ...]:
    """Packs spread over the first epoch, with the samples in them."""
    epoch = plan.epoch(0)
    numbers = np.unique(np.linspace(0, epoch.num_packs - 1, min(SHOWN, epoch.num_packs)).round().astype(np.int64))
    packs = [epoch.pack(int(number)) for number in numbers]
    rows = np.unique(np.concatenate([pack.rows for pack in packs]))
    columns = table.rows(("id", "source", "tokens", *VISION_TOKENS), rows)

    def sample(row: int, start: int, tokens: int) -> PictureSample:
        named = {name: column[np.searchsorted(rows, row)] for name, column in columns.items()}
        vision = sum(int(named[name]) for name in VISION_TOKENS)
        return PictureSample(
            id=str(named["id"]),
            source=str(named["source"]),
            tokens=int(named["tokens"]) if tokens < 0 else tokens,
            vision_tokens=vision if start == 0 else 0,  # media are in the first piece of a row
        )

    return tuple(
        PicturePack(
            number=int(number),
            tokens=int(epoch.load("tokens")[number]),
            samples=tuple(map(sample, pack.rows.tolist(), pack.starts.tolist(), pack.tokens.tolist())),
        )
        for number, pack in zip(numbers, packs, strict=True)
    )
