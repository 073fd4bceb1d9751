"""Which limit stopped how many placements: typical samples offered to every finished pack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from packtrain.core.seeds import stream
from packtrain.packing.resources import Samples

PROBES = 64  # samples offered to each pack
_AT_ONCE = 1 << 16  # packs


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockedCount:
    """What became of offering samples to finished packs, for one limit."""

    stopped: int  # offers that this limit refused
    alone: int  # of these, offers that no other limit refused
    fullest: int  # packs of which this limit is used up most


@dataclass(slots=True)
class Blocked:
    """Counts over all packs. Offers are drawn by the seed from the samples of each window."""

    capacities: Mapping[str, int]
    offers: int = 0
    refused: int = 0
    _stopped: dict[str, int] = field(default_factory=dict)
    _alone: dict[str, int] = field(default_factory=dict)
    _fullest: dict[str, int] = field(default_factory=dict)

    def add(self, samples: Samples, loads: Mapping[str, np.ndarray], seed: int) -> None:
        """Offer samples of a window to its packs."""
        names = tuple(self.capacities)
        packs = len(loads[names[0]])
        if not packs:
            return
        chosen = stream(seed, "offers").integers(len(samples), size=min(PROBES, len(samples)))
        for start in range(0, packs, _AT_ONCE):
            left = {name: limit - loads[name][start : start + _AT_ONCE] for name, limit in self.capacities.items()}
            stops = {name: samples[name][chosen][None, :] > room[:, None] for name, room in left.items()}
            reasons = np.sum(list(stops.values()), axis=0)
            self.offers += reasons.size
            self.refused += int((reasons > 0).sum())
            used = np.stack([1 - left[name] / self.capacities[name] for name in names])
            fullest = used.argmax(axis=0)
            for number, name in enumerate(names):
                self._stopped[name] = self._stopped.get(name, 0) + int(stops[name].sum())
                self._alone[name] = self._alone.get(name, 0) + int((stops[name] & (reasons == 1)).sum())
                self._fullest[name] = self._fullest.get(name, 0) + int((fullest == number).sum())

    def counts(self) -> dict[str, BlockedCount]:
        """The result, by resource."""
        return {
            name: BlockedCount(
                stopped=self._stopped.get(name, 0),
                alone=self._alone.get(name, 0),
                fullest=self._fullest.get(name, 0),
            )
            for name in self.capacities
        }
