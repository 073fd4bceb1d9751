"""The forward passes of an epoch as columns: packs, or padded batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from packtrain.predicting.values import Load

FIELDS = tuple(field.name for field in fields(Load))
_FROM_PLANS = {"squared_tokens": "attention"}  # where a plan has another name for it


@dataclass(frozen=True, slots=True, eq=False)
class PassColumns:
    """One array for each field of a Load, one number for each pass."""

    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["tokens"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def load(self, number: int) -> Load:
        """One pass."""
        return Load(**{name: int(self.columns[name][number]) for name in FIELDS})

    def worst(self) -> Load:
        """The largest of every number: no pass needs more, and usually none needs all of it at once."""
        return Load(**{name: int(self.columns[name].max()) for name in FIELDS})

    def mean(self) -> Load:
        """An average pass."""
        return Load(**{name: round(float(self.columns[name].mean())) for name in FIELDS})

    def filled(self, length: int) -> PassColumns:
        """Rows of one length, as compiled layers compute them: what a pack leaves free is one more sample."""
        free = np.maximum(length - self.columns["tokens"], 0)
        more = {
            "tokens": self.columns["tokens"] + free,
            "squared_tokens": self.columns["squared_tokens"] + free * free,
            "longest": np.maximum(self.columns["longest"], free),
        }
        return PassColumns({**self.columns, **more})

    def take(self, order: np.ndarray) -> PassColumns:
        """Some of the passes, in another order."""
        return PassColumns({name: column[order] for name, column in self.columns.items()})


def pack_passes(loads: Mapping[str, np.ndarray]) -> PassColumns:
    """Packs are rows of their own; a pack's numbers come under the names that plans have for them."""
    found = {name: loads[_FROM_PLANS.get(name, name)] for name in FIELDS if name != "rows"}
    return PassColumns({**found, "rows": np.ones_like(found["tokens"])})


def one_pass(load: Load) -> PassColumns:
    """A single pass as columns."""
    return PassColumns({name: np.array([getattr(load, name)]) for name in FIELDS})
