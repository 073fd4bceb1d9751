"""Where the memory of the recommended packing goes, what makes its worst pack, and what each option would change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packtrain.core.numbers import counted
from packtrain.packing.pack_plan import PACK_SCHEMA
from packtrain.planning.choice import make_room
from packtrain.planning.clock import FIELDS, PassColumns
from packtrain.planning.dataset_statistics import largest_image_patches, tiles_of
from packtrain.planning.question import Question
from packtrain.planning.recommend import Findings
from packtrain.planning.study_values import (
    Beside,
    Combination,
    MemoryReport,
    Simulation,
)
from packtrain.planning.sweep import simulate
from packtrain.predicting.host_memory import HostNeeds, host_needs
from packtrain.predicting.memory import vision_layer_parts
from packtrain.predicting.options import NOTHING, Saving, savings
from packtrain.predicting.values import Load, TrainingSetup

_NAMED = 3  # samples of the heaviest pack that a sentence names
_REPACKED = 100_000  # rows that are packed again to see what another limit would change
_COMFORTABLE = 0.6  # of a GPU: what leaves room for surprises
WORKERS, GPUS_PER_NODE = 4, 8  # of each GPU's loader, and of a node: what host needs are computed for
_EXACT = 16  # packs whose memory is estimated one by one, after a first look at all
_Tried = tuple[str, str, Simulation, int]  # option, change, what packing is like with it, samples filtered out


def memory_report(findings: Findings) -> MemoryReport:
    """The estimate that the recommendation rests on, and everything around it."""
    question, one = findings.question, findings.chosen
    number = heaviest_pack(question, findings.passes)
    ids, heaviest = _sample_ids(findings, number), findings.passes.load(number)
    vision = question.shape.vision
    return MemoryReport(
        gpu=question.gpu.name,
        gpu_bytes=question.gpu.memory_bytes,
        usable_bytes=question.usable_bytes,
        estimate=question.memory_of(one.worst),
        beside=tuple(_beside(findings)),
        vision_layer=vision_layer_parts(question.shape, question.setup, one.worst),
        vision_layers=vision.layers if vision else 0,
        comfortable=comfortable(findings),
        worst_bytes=question.memory_of(heaviest).total,
        worst_pack=number,
        worst_samples=ids,
        savings=_savings(findings),
        sentences=explain_worst(number, heaviest, ids, _resources(findings), packing_length=one.packing_length),
        host=_host(findings),
    )


def _beside(findings: Findings) -> Iterator[Beside]:
    """The requested setup, where options had to be turned on, and the padded run."""
    question, padded = findings.question, findings.padded[0]
    if findings.room is not None:
        asked = question.memory_of(findings.room.worst, question.requested)
        yield Beside(name="as requested", estimate=asked, fits=asked.total <= question.usable_bytes)
    name = question.baseline.name.removeprefix("a ")
    yield Beside(name=name, estimate=question.padded_memory_of(padded.worst), fits=padded.fits)


def comfortable(findings: Findings) -> Combination | None:
    """Changes after which a good part of the GPU stays free; none where it does already, or cannot."""
    question, one = findings.question, findings.chosen
    spare = replace(question, headroom=1 - _COMFORTABLE)
    if one.memory_bytes <= spare.usable_bytes:
        return None
    room = make_room(spare, [one])
    settings = dict(room.limits[0] if room.limits else one.settings)
    packed = simulate(replace(spare, setup=room.setup), question.packing.limited(settings)) if room.enough else None
    if packed is None:
        return None
    limits = {name: f"{value:,}" for name, value in settings.items() if dict(one.settings).get(name) != value}
    options = {change.parameter: change.packing for change in room.changes if change.parameter not in settings}
    return Combination(
        changes=tuple(f"{name} {value}" for name, value in {**limits, **options}.items()),
        memory_bytes=packed.memory_bytes,
        seconds=packed.seconds,
        lost=max(0, packed.samples_dropped - one.samples_dropped),
    )


def _savings(findings: Findings) -> tuple[Saving, ...]:
    """Every option that is not taken, and other limits at several values, each packed for real."""
    question, one = findings.question, findings.chosen

    def seconds(setup: TrainingSetup) -> float:
        return replace(question, setup=setup).epoch_of_packs(findings.passes, one.packing_length, one.packs_per_step)

    others = [_saved(question, one, *tried) for tried in _other_packings(findings)]
    options = savings(question.shape, question.setup, one.worst, question.memory, seconds)
    return tuple(sorted((*options, *others), key=lambda saving: (-saving.bytes, saving.option, saving.change)))


def _saved(question: Question, one: Simulation, option: str, change: str, packed: Simulation, filtered: int) -> Saving:
    total = question.memory_of(packed.worst).total
    same = abs(packed.packs - one.packs) <= NOTHING * one.packs
    now, cost = (
        one.memory_bytes,
        "as many packs" if same else f"{counted(packed.packs, 'pack')} instead of {one.packs:,}",
    )
    if abs(now - total) < NOTHING * now:
        patches = f"{packed.worst.patches:,} patches" if one.worst.patches else f"{packed.worst.tokens:,} tokens"
        cost += f"; saves nothing: packs fill up with more samples, and the fullest has {patches} again"
    lost = filtered + packed.samples_dropped - one.samples_dropped
    return Saving(
        option=option,
        change=change,
        bytes=now - total,
        total_after=total,
        cost=cost,
        seconds=packed.seconds,
        lost=max(0, lost),
    )


def _other_packings(findings: Findings) -> Iterator[_Tried]:
    """Shorter packs, limits at several values, fewer images per sample, smaller media."""
    question, one = findings.question, findings.chosen
    shorter = [
        other
        for other in findings.simulations
        if other.packing_length < one.packing_length and dict(other.limits) == dict(one.limits)
    ]
    for other in sorted(shorter, key=lambda other: -other.packing_length)[:2]:
        yield "packing_length", f"{one.packing_length:,} -> {other.packing_length:,}", other, 0
    config = findings.config
    some = replace(question, rows=question.rows.part(_REPACKED, config.seed))
    for setting, resource, worst in (
        ("max_images_per_pack", "images", one.worst.images),
        ("max_patches_per_pack", "patches", one.worst.patches),
        ("max_frames_per_pack", "frames", one.worst.frames),
    ):
        most = int(question.rows.samples[resource].max())  # no sample is lost to it
        for limit in sorted({max(worst // 2, most), max(worst // 4, most)}, reverse=True):
            if 0 < limit < worst and (packed := simulate(some, config.limited({setting: limit}))):
                yield setting, f"{worst:,} at most -> {limit:,}", packed, 0
    images = some.rows.samples["images"]
    most = int(images.max())
    for limit in sorted({most - 1, most // 2} - {0}, reverse=True):
        kept = np.flatnonzero(images <= limit)
        if len(kept) and (packed := simulate(replace(some, rows=some.rows.take(kept)), config)):
            filtered = round((len(images) - len(kept)) * some.rows.scale)
            yield "max_images_per_sample", f"{most:,} at most -> {limit:,}", packed, filtered
    for option in findings.media:
        yield option.setting, f"{option.value:,}", option.simulation, 0


def _largest_image(findings: Findings) -> int:
    """Patches of the largest image: what attends to itself, or all tiles where images are cut."""
    samples = findings.question.rows.samples
    if tiles_of(samples) is None:
        return int(samples["largest_patches"].max())
    return findings.table.largest_image() or largest_image_patches(samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceUse:
    """The most of one resource that a pack of the plan has, and what the settings allow."""

    name: str  # in the plural: images, tiles, patches, vision tokens
    most: int
    setting: str = ""  # the limit's name
    limit: int | None = None
    tokens_each: int | None = None  # the fewest tokens that one of these takes up
    product: int | None = None  # of other limits, where it has none of its own

    def explain(self, packing_length: int) -> str:
        """Whether its limit can stop a pack, as a sentence."""
        text = f"A micro-batch has at most {self.most:,} {self.name}"
        if self.limit is None:
            whole = "" if self.product is None else f"; the product of the limits is {self.product:,}"
            return f"{text}{whole}; no limit on {self.name} is set."
        setting, tokens = f"{self.setting} {self.limit:,}", self.tokens_each
        if tokens is not None and (held := packing_length // tokens) < self.limit:
            full = f"{packing_length:,} tokens hold at most {held:,} {self.name} of {tokens:,} tokens"
            return f"{text}; {full}, so {setting} never binds."
        return f"{text}; {setting} {'binds' if self.most >= self.limit else 'does not bind in this plan'}."


def explain_worst(
    number: int, heaviest: Load, ids: Sequence[str], resources: Iterable[ResourceUse], *, packing_length: int
) -> tuple[str, ...]:
    """The worst case in sentences: the samples of the heaviest pack, and how much of each resource a pack can have."""
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    pack = (
        f"Pack {number:,} needs the most memory: {heaviest.tokens:,} of {packing_length:,} tokens, "
        f"{heaviest.patches:,} patches and {heaviest.images:,} images from {counted(len(ids), 'sample')} "
        f"({', '.join(ids[:_NAMED])}{more})."
    )
    return (pack, *(resource.explain(packing_length) for resource in resources))


def _resources(findings: Findings) -> list[ResourceUse]:
    """Images, tiles, patches and vision tokens, where there are any."""
    one = findings.chosen
    worst, samples, limits = one.worst, findings.question.rows.samples, one.limits
    if not worst.patches:
        return []
    limit = limits.get("max_images_per_pack")
    largest = 0 if limit is None else _largest_image(findings)
    resources = []
    if worst.images:
        shown = samples["images"] > 0
        each = int((samples["vision_tokens"][shown] // samples["images"][shown]).min()) if shown.any() else 0
        resources.append(
            ResourceUse(
                name="images",
                most=worst.images,
                setting="max_images_per_pack",
                limit=limit,
                tokens_each=each or None,
            )
        )
    if tiles_of(samples) is not None:
        of_one = worst.largest_patches  # all tiles are of one size
        product = None if limit is None else limit * (largest // of_one)
        resources.append(ResourceUse(name="tiles", most=worst.patches // of_one, product=product))
    return [
        *resources,
        ResourceUse(
            name="patches",
            most=worst.patches,
            setting="max_patches_per_pack",
            limit=limits.get("max_patches_per_pack"),
            product=None if limit is None or worst.frames else limit * largest,
        ),
        ResourceUse(
            name="vision tokens",
            most=worst.vision_tokens,
            setting="max_vision_tokens_per_pack",
            limit=limits.get("max_vision_tokens_per_pack"),
            tokens_each=1,
        ),
    ]


def _host(findings: Findings) -> HostNeeds:
    question, epoch = findings.question, findings.plan.epoch(0)
    return host_needs(
        shape=question.shape,
        setup=question.setup,
        load=findings.chosen.worst,
        workers=WORKERS,
        gpus_per_node=min(question.setup.gpus, GPUS_PER_NODE),
        cost_table_bytes=sum(path.stat().st_size for path in findings.table.folder.iterdir() if path.is_file()),
        plan_bytes=8 * (epoch.num_entries + len(PACK_SCHEMA) * epoch.num_packs) * question.baseline.num_train_epochs,
    )


def heaviest_pack(question: Question, passes: PassColumns) -> int:
    """The pack that needs most memory, estimated exactly for those that it can be.

    Memory is largest at one of several moments, which different things decide: candidates are the packs with most of
    each, and those that a linear look at all of them together finds.
    """
    worst = passes.worst()
    whole = question.memory_of(worst).total
    score = np.zeros(len(passes))
    heaviest: set[int] = {int(passes[name].argmax()) for name in FIELDS}
    for names in (
        ("tokens", "longest", "samples"),
        ("supervised_tokens",),
        ("patches", "squared_patches", "vision_tokens"),
    ):
        half = replace(worst, **{name: getattr(worst, name) // 2 for name in names})
        if getattr(worst, names[0]):
            saved = whole - question.memory_of(half).total
            score += passes[names[0]] * (2 * saved / getattr(worst, names[0]))
            heaviest |= _most(passes[names[0]])
    candidates = sorted(heaviest | _most(score))
    return max(candidates, key=lambda number: question.memory_of(passes.load(number)).total)


def _most(values: np.ndarray) -> set[int]:
    return set(np.argsort(-values, kind="stable")[:_EXACT].tolist())


def _sample_ids(findings: Findings, number: int) -> tuple[str, ...]:
    """The samples of one pack, the longest first."""
    rows = np.unique(findings.plan.epoch(0).pack(number).rows)
    columns = findings.table.rows(("id", "tokens"), rows)
    return tuple(str(columns["id"][at]) for at in np.argsort(-columns["tokens"], kind="stable"))
