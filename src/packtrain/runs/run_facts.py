"""run.json as values: what is trained on what, how it was started, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """How a run ended, or where it stands."""

    status: str  # running, complete, interrupted, failed
    step: int = 0
    steps: int = 0
    loss: float | None = None  # the final one: a mean over the last samples, as the page has it
    loss_samples: int | None = None  # how many they are
    eval_loss: float | None = None
    samples_seen: int = 0
    tokens_per_second: float | None = None  # without the steps that warm up, as the page has it
    seconds: float = 0.0  # of the run: steps and evaluations of earlier processes, and all of this one
    detail: str = ""

    def plain(self) -> dict[str, str | int | float | None]:
        """For run.json; numbers that are not finite become words."""
        return {name: _finite(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> RunOutcome:
        """As run.json has it.

        >>> RunOutcome.of(RunOutcome(status="complete", loss=float("inf")).plain()).loss
        inf
        """
        numbers = ("loss", "eval_loss", "tokens_per_second", "seconds")
        found = {name: value for name, value in plain.items() if name in cls.__slots__}
        return cls(**found | {name: float(found[name]) for name in numbers if isinstance(found.get(name), str)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Invocation:
    """How a run was started."""

    written: Mapping[str, Any] = field(default_factory=dict)  # what the user's config says, by section
    overrides: tuple[str, ...] = ()
    urls_with_secrets: tuple[str, ...] = ()  # settings of data that have to be given again
    command: str = ""
    host: str = ""
    planned_in: str | None = None  # the page of the study that wrote the config


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Everything that run.json says but for versions and times; what an older run does not say is empty."""

    title: str | None = None
    model: str | None = None
    origin: Mapping[str, Any] | None = None  # see `origin` of a run's folder
    families: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # registered by modules of the user's
    mode: str | None = None  # packed or padded
    plan: str | None = None
    cost_table: str | None = None
    planned_epochs: int | None = None
    packs_per_step: int | None = None
    rows_per_batch: int | None = None
    seed: int | None = None
    balance: str | None = None
    world: int | None = None
    fingerprints: Mapping[str, str | None] = field(default_factory=dict)
    measured: Mapping[str, Any] | None = None  # what the data are known by, to be compared when it is resumed
    evaluated: Mapping[str, Any] | None = None  # the same of evaluation data
    frozen: Mapping[str, str] = field(default_factory=dict)  # what the weights beside adapters are known by
    derived: Mapping[str, Any] = field(default_factory=dict)  # numbers for people and pages
    notes: tuple[str, ...] = ()
    prepared: tuple[str, ...] = ()
    invocation: Invocation = field(default_factory=Invocation)
    outcome: RunOutcome | None = None
    began: str | None = None  # of the run, whose processes may be several
    ended: str | None = None

    @property
    def status(self) -> str:
        """How it ended; `begun` where it has not said."""
        return self.outcome.status if self.outcome is not None else "begun"

    def to_json(self) -> dict[str, Any]:
        """The content of run.json."""
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "invocation"}
        outcome = self.outcome.plain() if self.outcome is not None else None
        found = {**plain, **asdict(self.invocation), "outcome": outcome}
        later = ("outcome", "began", "ended")
        return {name: value for name, value in found.items() if value is not None or name not in later}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> RunFacts:
        """From the content of run.json."""
        own, started = ({one.name for one in fields(kind)} & body.keys() for kind in (cls, Invocation))
        found = {name: body[name] for name in own}
        if (outcome := body.get("outcome")) is not None:
            found["outcome"] = RunOutcome.of({"status": "begun", **outcome})
        return cls(**found, invocation=Invocation(**{name: body[name] for name in started}))


def _finite(value: Any) -> Any:
    unusual = isinstance(value, float) and (value != value or value in (float("inf"), float("-inf")))
    return str(value) if unusual else value
