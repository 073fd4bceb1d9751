"""`packtrain train` as a function: a config and a dataset -> a run folder with checkpoints, metrics and final weights.

Takes a `RunConfig`, or a model and data to choose one for. `resolve_run` settles every setting, `prepare` measures,
packs and loads, `predict_run` says what to expect, and a `Session` trains or resumes; a `TrainOutcome` says what came
of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.app.train.forecast import predict_run as predict_run
    from packtrain.app.train.outcome import TrainOutcome as TrainOutcome
    from packtrain.app.train.prepare import Prepared as Prepared
    from packtrain.app.train.resolve import ResolvedRun as ResolvedRun
    from packtrain.app.train.resolve import resolve_run as resolve_run
    from packtrain.app.train.session import Session as Session

__getattr__, __dir__, __all__ = lazy_names(__name__)
