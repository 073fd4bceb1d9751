"""Where the memory of the recommended packing goes, what makes its worst pack, and what each option would change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from packtrain.advice.passes import Passes
from packtrain.advice.question import Question
from packtrain.advice.recommend import Findings
from packtrain.advice.sweep import pack_rows
from packtrain.advice.values import MemoryReport, Simulation
from packtrain.advice.views import heaviest_pack, sample_ids
from packtrain.advice.words import gib
from packtrain.costs.table import CostTable
from packtrain.estimates.host import HostNeeds, host_needs
from packtrain.estimates.memory import estimate_memory
from packtrain.estimates.options import Resource, WorstPack, explain_worst, savings
from packtrain.estimates.values import Load
from packtrain.plans.config import PackingConfig
from packtrain.plans.plan import PACK_SCHEMA, PackPlan

_REPACKED = 100_000  # rows that are packed again to see what another limit would change
WORKERS, GPUS_PER_NODE = 4, 8  # of each GPU's loader, and of a node: what host needs are computed for


def memory_report(found: Findings, plan: PackPlan, passes: Passes) -> MemoryReport:
    """The estimate that the recommendation rests on, and everything around it."""
    question, one = found.question, found.chosen
    number = heaviest_pack(question, passes)
    ids = sample_ids(plan, found.table, number)
    heaviest = passes.load(number)
    alone = question.memory_of(heaviest).total
    sentences = explain_worst(
        WorstPack(number=number, tokens=heaviest.tokens, patches=heaviest.patches, images=heaviest.images, samples=ids),
        _resources(question, one, passes),
        packing_length=one.packing_length,
    )
    both = f"That pack needs {gib(alone)}; one with the most of everything would need {gib(one.memory_bytes)}."
    return MemoryReport(
        gpu=question.gpu.name,
        gpu_bytes=question.gpu.memory_bytes,
        estimate=estimate_memory(question.shape, question.setup, one.worst, question.memory),
        worst_pack=number,
        worst_samples=ids,
        savings=savings(question.shape, question.setup, one.worst, other_loads(found), question.memory),
        sentences=(sentences[0], both, *sentences[1:]),
        host=_host(question, found.table, plan, one),
    )


def other_loads(found: Findings) -> dict[str, Load]:
    """The worst load under other limits, each packed for real."""
    question, one = found.question, found.chosen
    loads = {}
    shorter = [
        other
        for other in found.simulations
        if other.packing_length < one.packing_length and dict(other.limits) == dict(one.limits)
    ]
    if shorter:
        next_shorter = max(shorter, key=lambda other: other.packing_length)
        loads[f"packing_length {one.packing_length:,} -> {next_shorter.packing_length:,}"] = next_shorter.worst
    config = question.packing.limited(one.settings)
    for setting, resource, worst in (
        ("max_images_per_pack", "images", one.worst.images),
        ("max_patches_per_pack", "patches", one.worst.patches),
        ("max_frames_per_pack", "frames", one.worst.frames),
    ):
        half = max(worst // 2, int(question.rows.samples[resource].max()))  # no sample is lost to it
        if 0 < half < worst:
            loads[f"{setting} {half:,} (up to {worst:,} now)"] = _repacked(question, config, setting, half)
    return {**loads, **{option.label: option.simulation.worst for option in found.media}}


def _repacked(question: Question, config: PackingConfig, setting: str, limit: int) -> Load:
    some = replace(question, rows=question.rows.part(_REPACKED, config.seed))
    return pack_rows(some, config.limited({setting: limit})).passes.worst()


def _resources(question: Question, one: Simulation, passes: Passes) -> Sequence[Resource]:
    """What the worst case is told about: images, patches and vision tokens, where there are any."""
    if not one.worst.patches:
        return ()
    samples = question.rows.samples
    shown = samples["images"] > 0
    each = int((samples["vision_tokens"][shown] // samples["images"][shown]).min()) if shown.any() else None
    limit = one.limits.get("max_images_per_pack")
    largest = int(samples["largest_patches"].max())
    found = [
        Resource(
            name="images",
            worst_pack=one.worst.images,
            worst_pass=one.worst.images,
            setting="max_images_per_pack",
            limit=limit,
            tokens_each=each or None,
        ),
        Resource(
            name="patches",
            worst_pack=one.worst.patches,
            worst_pass=one.worst.patches,
            setting="max_patches_per_pack",
            limit=one.limits.get("max_patches_per_pack"),
            multiplied=None if limit is None else limit * largest,
        ),
        Resource(
            name="vision tokens",
            worst_pack=one.worst.vision_tokens,
            worst_pass=one.worst.vision_tokens,
            setting="max_vision_tokens_per_pack",
            limit=one.limits.get("max_vision_tokens_per_pack"),
            tokens_each=1,
        ),
    ]
    return found if one.worst.images else found[1:]


def _host(question: Question, table: CostTable, plan: PackPlan, one: Simulation) -> HostNeeds:
    epoch = plan.epoch(0)
    size = 8 * (epoch.num_entries + len(PACK_SCHEMA) * epoch.num_packs) * question.epochs
    return host_needs(
        shape=question.shape,
        setup=question.setup,
        load=one.worst,
        workers=WORKERS,
        gpus_per_node=min(question.setup.gpus, GPUS_PER_NODE),
        cost_table_bytes=_folder_bytes(table.folder),
        plan_bytes=size,
    )


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
