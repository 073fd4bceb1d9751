"""Which of the simulations to train with, and which others are worth knowing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packtrain.core.numbers import counted, gib, limits_text, percent, signed_percent, whole_percent
from packtrain.planning.study_values import Simulation
from packtrain.planning.sweep import KEPT

MOST_DROPPED = 0.005  # share of the samples that a recommended packing may leave out
TOLERATED = 0.25  # how far the samples of a step that nobody has said may move, where that keeps GPUs busy
WORTH_MOVING = 1.1  # how much faster that must be
KEEPING = 0.05  # of the best speed: what keeping more of the samples may cost
TIE = 0.01  # speeds that are nearer than this are the same: the estimates are not better
_SHORTER = 0.8  # of the recommended length: what makes a setting conservative
_NEARLY_AS_FAST = 0.85  # a longer setting that is slower than this is no alternative


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The recommended simulation and why it is that one."""

    simulation: int
    reason: str


def dropped_share(simulation: Simulation) -> float:
    """Samples that are in no pack, of all."""
    return simulation.samples_dropped / (simulation.samples_packed + simulation.samples_dropped)


def acceptable(simulations: Sequence[Simulation], samples_per_step: int, *, said: bool = False) -> list[int]:
    """Those that leave out few samples and keep the samples of a step, nearly where nobody has said how many; where
    none does, the nearest to it."""
    least = min(dropped_share(simulation) for simulation in simulations)
    allowed = MOST_DROPPED if least < MOST_DROPPED else least + MOST_DROPPED
    kept = [at for at, simulation in enumerate(simulations) if dropped_share(simulation) < allowed]
    moved = {at: _moved(simulations[at], samples_per_step) for at in kept}
    return [at for at in kept if moved[at] <= max(KEPT if said else TOLERATED, min(moved.values()))]


def choose(simulations: Sequence[Simulation], samples_per_step: int, *, said: bool = False) -> Choice:
    """The fastest that fits and keeps the samples of a step; where nobody has `said` them, they may move for speed.

    Speeds are those of the samples in packs, and the samples that fit none are the slowest: for a little speed none is
    given up. Near ties: shorter, then nearer to the bound.
    """
    kept = acceptable(simulations, samples_per_step, said=said)
    fitting = [at for at in kept if simulations[at].fits]
    if not fitting:
        return _nothing_fits(simulations, kept)
    best = max(simulations[at].tokens_per_second for at in fitting)
    steady = [at for at in fitting if _moved(simulations[at], samples_per_step) <= KEPT]
    if steady:
        best_steady = max(simulations[at].tokens_per_second for at in steady)
        if best <= WORTH_MOVING * best_steady:
            fitting, best = steady, best_steady
    near = [at for at in fitting if simulations[at].tokens_per_second >= (1 - KEEPING) * best]
    fewest = min(simulations[at].samples_dropped for at in near)
    keeping = [at for at in near if simulations[at].samples_dropped == fewest]
    best = max(simulations[at].tokens_per_second for at in keeping)
    tied = [at for at in keeping if simulations[at].tokens_per_second >= (1 - TIE) * best]
    chosen = min(tied, key=lambda at: _preference(simulations[at]))
    return Choice(simulation=chosen, reason=_why(simulations, chosen, fitting))


def _moved(simulation: Simulation, samples_per_step: int) -> float:
    return abs(simulation.samples_per_step / samples_per_step - 1)


def _preference(simulation: Simulation) -> tuple[float, ...]:
    return simulation.packing_length, -simulation.of_bound, len(simulation.limits)


def _why(simulations: Sequence[Simulation], chosen: int, fitting: Sequence[int]) -> str:
    mine = simulations[chosen]
    text = f"{mine.tokens_per_second:,.0f} real tokens/s predicted"
    fastest = simulations[max(fitting, key=lambda at: simulations[at].tokens_per_second)]
    faster = fastest.tokens_per_second / mine.tokens_per_second - 1
    others = f"{counted(len(fitting), 'packing')} that {'fits' if len(fitting) == 1 else 'fit'}"
    if fastest.samples_dropped > mine.samples_dropped:
        more = counted(fastest.samples_dropped - mine.samples_dropped, "sample")
        name = limits_text(fastest.packing_length, fastest.limits)
        text += f"; {name} would be {percent(faster)} faster, but leaves out {more} more"
    elif faster > 0:
        text += f", within {whole_percent(TIE)} of the fastest of the {others}, and shorter"
    elif len(fitting) > 1:
        text += f", the fastest of the {others}"
    return f"{text} ({gib(mine.memory_bytes)}, {percent(dropped_share(mine))} of the samples dropped)"


def _nothing_fits(simulations: Sequence[Simulation], kept: Sequence[int]) -> Choice:
    chosen = min(kept, key=lambda at: simulations[at].memory_bytes)
    mine = simulations[chosen]
    return Choice(
        simulation=chosen,
        reason=f"nothing fits this GPU; {limits_text(mine.packing_length, mine.limits)} needs least, "
        f"{gib(mine.memory_bytes)}",
    )


def efficient(simulations: Sequence[Simulation], chosen: int) -> tuple[int, str] | None:
    """A setting that fits and gets more out of the data: faster, or else fuller or with fewer samples left out."""
    mine = simulations[chosen]
    allowed = max(MOST_DROPPED, dropped_share(mine))
    others = [at for at, one in enumerate(simulations) if one.fits and at != chosen and dropped_share(one) <= allowed]
    faster = [at for at in others if simulations[at].tokens_per_second > mine.tokens_per_second]
    longer = [
        at
        for at in others
        if simulations[at].packing_length > mine.packing_length
        and simulations[at].tokens_per_second >= _NEARLY_AS_FAST * mine.tokens_per_second
        and (simulations[at].samples_dropped, -simulations[at].fill) < (mine.samples_dropped, -mine.fill)
    ]
    if not faster and not longer:
        return None
    if faster:
        found, why = max(faster, key=lambda at: simulations[at].tokens_per_second), "faster"
    else:
        found = max(longer, key=lambda at: (simulations[at].tokens_per_second, -simulations[at].packing_length))
        why = "nothing that fits is faster; this one is longer and leaves less out"
    return found, f"{why}: {_compared(simulations[found], mine)}"


def conservative(simulations: Sequence[Simulation], chosen: int, besides: int | None = None) -> tuple[int, str] | None:
    """A setting that needs less memory: the fastest that is clearly shorter, else the shorter one that needs least."""
    mine = simulations[chosen]
    allowed = max(MOST_DROPPED, 2 * dropped_share(mine))
    less = [
        at
        for at, one in enumerate(simulations)
        if (one.packing_length < mine.packing_length or (one.limits and one.packing_length == mine.packing_length))
        and one.memory_bytes < mine.memory_bytes
        and at != besides
    ]
    kept = [at for at in less if dropped_share(simulations[at]) <= allowed] or less
    clearly = [at for at in kept if simulations[at].packing_length <= _SHORTER * mine.packing_length]
    if not kept:
        return None
    if clearly:
        found = max(clearly, key=lambda at: simulations[at].tokens_per_second)
    else:
        found = min(kept, key=lambda at: simulations[at].memory_bytes)
    return found, f"less memory: {_compared(simulations[found], mine)}"


def _compared(one: Simulation, mine: Simulation) -> str:
    """What another setting changes, in numbers."""
    speed = signed_percent(one.tokens_per_second / mine.tokens_per_second - 1)
    return (
        f"{limits_text(one.packing_length, one.limits)}: {one.tokens_per_second:,.0f} real tokens/s ({speed} against "
        f"{mine.tokens_per_second:,.0f}), "
        f"fill {percent(one.fill)} (against {percent(mine.fill)}), "
        f"{gib(one.memory_bytes)} on the fullest GPU ({gib(mine.memory_bytes)}), "
        f"{counted(one.samples_dropped, 'sample')} dropped ({mine.samples_dropped:,}), "
        f"{one.samples_per_step:,.0f} samples per step ({mine.samples_per_step:,.0f})"
    )
