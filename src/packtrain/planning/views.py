"""Views of the recommended plan: some of its packs to look at, how equal the work of ranks is, its heaviest pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packtrain.core.modality import VISION_TOKENS
from packtrain.measuring.table import CostTable
from packtrain.packing.balance import balance_table
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.resources import EXTRAS, RESOURCES
from packtrain.planning.passes import FIELDS, PassColumns, pack_passes
from packtrain.planning.question import Question
from packtrain.planning.study_values import BalanceRow, PicturePack, PictureSample

SHOWN = 40  # packs of the picture
RANKS = (1, 2, 8)  # times the GPUs there are, two at least
_EXACT = 16  # packs whose memory is estimated one by one, after a first look at all


def plan_passes(plan: PackPlan) -> PassColumns:
    """The packs of the first epoch."""
    epoch = plan.epoch(0)
    return pack_passes({name: epoch.load(name) for name in (*RESOURCES, *EXTRAS)})


def balance_rows(plan: PackPlan, gpus: int) -> tuple[BalanceRow, ...]:
    """Slowest rank over mean, and how alike steps are, for numbers of ranks that the plan can keep busy."""
    return tuple(
        BalanceRow(
            ranks=line.ranks,
            packs_per_step=line.packs_per_step,
            random=line.random.slowest,
            sorted=line.sorted.slowest,
            strict=line.strict.slowest,
            spread_random=line.random.length_spread,
            spread_sorted=line.sorted.length_spread,
            spread_strict=line.strict.length_spread,
        )
        for line in balance_table(plan, tuple(times * max(gpus, 2) for times in RANKS))
    )


def picture(plan: PackPlan, table: CostTable) -> tuple[PicturePack, ...]:
    """Packs spread over the first epoch, with the samples in them."""
    epoch = plan.epoch(0)
    numbers = np.unique(np.linspace(0, epoch.num_packs - 1, min(SHOWN, epoch.num_packs)).round().astype(np.int64))
    packs = [epoch.pack(int(number)) for number in numbers]
    named = _Named(table, np.concatenate([pack.rows for pack in packs]))
    return tuple(
        PicturePack(
            number=int(number),
            tokens=int(epoch.load("tokens")[number]),
            samples=tuple(
                named.sample(int(row), int(start), int(tokens))
                for row, start, tokens in zip(pack.rows, pack.starts, pack.tokens, strict=True)
            ),
        )
        for number, pack in zip(numbers, packs, strict=True)
    )


class _Named:
    """Names and sizes of some rows."""

    def __init__(self, table: CostTable, rows: np.ndarray) -> None:
        self._rows = np.unique(rows)
        self._found = table.rows(("id", "source", "tokens", *VISION_TOKENS), self._rows)

    def sample(self, row: int, start: int, tokens: int) -> PictureSample:
        """One entry of a pack; media stand in the first piece of a row."""
        at = int(np.searchsorted(self._rows, row))
        found = {name: column[at] for name, column in self._found.items()}
        vision = sum(int(found[name]) for name in VISION_TOKENS)
        return PictureSample(
            id=str(found["id"]),
            source=str(found["source"]),
            tokens=int(found["tokens"]) if tokens < 0 else tokens,
            vision_tokens=vision if start == 0 else 0,
        )


def heaviest_pack(question: Question, passes: PassColumns) -> int:
    """The pack that needs most memory, estimated exactly for those that it can be.

    Memory is largest at one of several moments, which different things decide: candidates are the packs with most of
    each, and those that a linear look at all of them together finds.
    """
    worst = passes.worst()
    whole = question.memory_of(worst).total
    score = np.zeros(len(passes))
    found: set[int] = {int(passes[name].argmax()) for name in FIELDS}
    for names in (
        ("tokens", "longest", "samples"),
        ("supervised_tokens",),
        ("patches", "squared_patches", "vision_tokens"),
    ):
        half = replace(worst, **{name: getattr(worst, name) // 2 for name in names})
        if getattr(worst, names[0]):
            saved = whole - question.memory_of(half).total
            score += passes[names[0]] * (2 * saved / getattr(worst, names[0]))
            found |= _most(passes[names[0]])
    candidates = sorted(found | _most(score))
    return max(candidates, key=lambda number: question.memory_of(passes.load(number)).total)


def _most(values: np.ndarray) -> set[int]:
    return set(np.argsort(-values, kind="stable")[:_EXACT].tolist())


def sample_ids(plan: PackPlan, table: CostTable, number: int) -> tuple[str, ...]:
    """The samples of one pack, the longest first."""
    rows = np.unique(plan.epoch(0).pack(number).rows)
    found = table.rows(("id", "tokens"), rows)
    order: Sequence[int] = np.argsort(-found["tokens"], kind="stable").tolist()
    return tuple(str(found["id"][at]) for at in order)
