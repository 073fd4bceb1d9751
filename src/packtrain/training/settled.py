"""Python's garbage collector, kept from stopping a step: what is there after the first steps is not looked at again.

Models, compiled code and their guards are some million objects. A full collection looks at each of them, for a tenth of
a second or more in which nothing is sent to the GPU. They live as long as the run does, so they are set aside.
"""

from __future__ import annotations

import gc
from typing import Any

from transformers import TrainerCallback

_AFTER = (1, 10)  # steps: layers are compiled in the first ones


def set_aside() -> None:
    """What is alive now is left out of collections until `gc.unfreeze`."""
    gc.collect()
    gc.freeze()


class SettledObjects(TrainerCallback):
    """A run, as a context: its objects are set aside after its first steps, and given back at its end."""

    def __init__(self) -> None:
        self._steps = 0

    def __enter__(self) -> None:
        self._steps = 0

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()

    def on_step_end(self, *args: Any, **values: Any) -> None:
        """A step of the optimizer is done."""
        self._steps += 1
        if self._steps in _AFTER:
            set_aside()
