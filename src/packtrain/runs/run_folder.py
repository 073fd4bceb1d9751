"""The folder of a run: who may train into it, what it is about, and how it ended.

run.yaml        the config as resolved; loads again, on any number of processes
run.json        versions, fingerprints, derived numbers, how it ended
metrics.jsonl   one line for every step, evaluation and warning
ledger.jsonl    every sample that was not trained, and why
checkpoint-N    to go on from; final: the weights alone; report.html
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

import packtrain
from packtrain.core.artifacts import alone, atomic_path, read_json, refuse_links, write_json
from packtrain.core.dataclass_json import lenient_from_json
from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.core.secrets import without_secrets
from packtrain.families.model_folder import PREFIX
from packtrain.records.yaml_text import Dumper
from packtrain.runs.derived import Derived

RUN, CONFIG, LEDGER, DELIVERY, FINAL = "run.json", "run.yaml", "ledger.jsonl", "delivery.jsonl", "final"
KIND, VERSION = "run", 1
LOCK = ".lock"
_GIT_SECONDS = 10.0
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "numpy", "pyarrow")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """How a run ended, or how far it is."""

    status: str  # running, complete, interrupted, failed
    step: int = 0
    steps: int = 0
    loss: float | None = None  # the final one: a mean over the last samples, as the page has it
    loss_samples: int | None = None  # how many they are
    eval_loss: float | None = None
    samples_seen: int = 0
    undelivered: int = 0  # samples that could not be decoded
    tokens_per_second: float | None = None  # without the steps that warm up, as the page has it
    seconds: float = 0.0  # of the run: steps and evaluations of earlier processes, and all of this one
    detail: str = ""

    def plain(self) -> dict[str, str | int | float | None]:
        """For run.json; numbers that are not finite become words.

        >>> lenient_from_json(RunOutcome, RunOutcome(status="complete", loss=float("inf")).plain()).loss
        inf
        """
        return {name: _finite(getattr(self, name)) for name in self.__slots__}


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
class Origin:
    """The weights that a run starts from: those of another run, or random ones of a tiny model."""

    run: str | None = None
    weights: str | None = None  # their folder in that run
    model: str | None = None  # that the other run started from
    step: int | None = None  # how far it was
    samples_seen: int | None = None
    seed: int | None = None  # of random weights


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Everything that run.json says; what an older run does not say is empty."""

    title: str | None = None
    model: str | None = None
    origin: Origin | None = None  # None: of no run of ours
    families: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # registered by modules of the user's
    mode: str | None = None  # packed or padded
    plan: str | None = None
    cost_table: str | None = None
    planned_epochs: int | None = None
    packs_per_step: int | None = None
    rows_per_batch: int = 1
    seed: int = 0
    balance: str = "sorted"
    world_size: int = 1
    fingerprints: Mapping[str, str | None] = field(default_factory=dict)
    measured: Mapping[str, Any] | None = None  # what the data are known by, to be compared when it is resumed
    evaluated: Mapping[str, Any] | None = None  # the same of evaluation data
    frozen: Mapping[str, str] = field(default_factory=dict)  # checksums of the weights under adapters
    derived: Derived | None = None
    notes: tuple[str, ...] = ()
    prepared: tuple[str, ...] = ()
    invocation: Invocation = field(default_factory=Invocation)
    outcome: RunOutcome | None = None
    began: str | None = None  # of the run, whose processes may be several
    ended: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None

    @property
    def status(self) -> str:
        """How it ended; `started` where it has not recorded that."""
        return (self.outcome.status if self.outcome is not None else "") or "started"

    def to_json(self) -> dict[str, Any]:
        """The content of run.json."""
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "invocation"}
        outcome = self.outcome.plain() if self.outcome is not None else None
        derived = asdict(self.derived) if self.derived is not None else None
        came_from = {} if self.origin is None else {k: v for k, v in asdict(self.origin).items() if v is not None}
        values = {**plain, **asdict(self.invocation), "origin": came_from, "derived": derived, "outcome": outcome}
        later = ("derived", "outcome", "began", "ended")
        return {name: value for name, value in values.items() if value is not None or name not in later}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> RunFacts:
        """From the content of run.json, as far as it can be read."""
        return lenient_from_json(cls, {**body, "invocation": body})


def _finite(value: Any) -> Any:
    unusual = isinstance(value, float) and (value != value or value in (float("inf"), float("-inf")))
    return str(value) if unusual else value


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One folder; its methods are for the one process that writes into it."""

    path: Path

    @property
    def holds_run(self) -> bool:
        """Was a run started here?"""
        return (self.path / RUN).is_file()

    def facts(self) -> RunFacts:
        """The content of run.json."""
        return RunFacts.from_json(self._body())

    def check_resumed(self) -> None:
        """Refuse to go on in a folder with links, before anything in it is read: it may be another user's."""
        refuse_links(self.path)

    def check_place(self) -> None:
        """Refuse a folder that cannot be made or written; nothing is left there."""
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir():
            raise self._unwritable(f"{there} is a file")
        try:
            with tempfile.TemporaryDirectory(prefix=".packtrain-", dir=there):  # what may be written is known by trying
                pass
        except OSError:
            raise self._unwritable(f"{there} cannot be written") from None

    def check(self, *, resume: bool) -> None:
        """Refuse a folder that cannot be written, or holds another run or something else."""
        self.check_place()
        if self.holds_run and not resume:
            with self.alone():  # or it is still training, which is another matter
                status = self.facts().status
            ended = "was stopped in the middle" if status == "running" else status
            another = "name another output_dir"
            on = f"packtrain train --resume {self.path} continues it; or {another}"
            raise ConfigError(
                "training.output_dir",
                got=f"{self.path}, which holds a run ({ended})",
                expected="a new folder",
                fix=another if status == "complete" else on,
            )
        others = sorted(path.name for path in self.path.iterdir()) if self.path.is_dir() else []
        if not self.holds_run and [name for name in others if name != LOCK]:
            raise ConfigError(
                "training.output_dir",
                got=f"{self.path}, which holds other files ({others[0]})",
                expected="a new or an empty folder",
                fix="name another output_dir",
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse a second process that would train into the same folder."""
        with ExitStack() as held:
            try:
                held.enter_context(alone(self.path / LOCK, wait=False))
            except BlockingIOError:
                raise ConfigError(
                    "training.output_dir",
                    got=f"{self.path}, into which another process is training",
                    expected="a folder of its own for each run",
                    fix="wait until it has ended, or name another output_dir",
                ) from None
            except OSError as error:
                raise self._unwritable(error.strerror or str(error)) from error
            yield

    def _unwritable(self, why: str) -> ConfigError:
        return ConfigError(
            "training.output_dir",
            got=f"{self.path}: {why}",
            expected="a folder that can be written",
            fix="name another output_dir",
        )

    def begin(self, sections: Mapping[str, Mapping[str, object]], facts: RunFacts) -> None:
        """Write what is about to be trained."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = yaml.dump(
            without_secrets(plain_values({name: dict(values) for name, values in sections.items() if values})),
            Dumper=Dumper,
            sort_keys=False,
        )
        with atomic_path(self.path / CONFIG) as temporary:
            temporary.write_text(f"# As resolved by packtrain {packtrain.__version__}\n{text}", encoding="utf-8")
        began = facts.began or _now()
        self._write({**facts.to_json(), "versions": versions(), "commit": commit(), "began": began, "started": _now()})

    def finish(self, outcome: RunOutcome, ledger: Iterable[bytes]) -> None:
        """Write how it ended, and everything that was not trained in one ledger."""
        self._write({**self._body(), "outcome": outcome.plain(), "ended": _now()})
        delivery = self.path / DELIVERY
        self.write_ledger(chain(ledger, delivery.read_bytes().splitlines(True) if delivery.is_file() else ()))

    def write_ledger(self, lines: Iterable[bytes]) -> None:
        """One ledger of what measuring, packing and delivering left out."""
        with atomic_path(self.path / LEDGER) as temporary, temporary.open("wb") as out:
            out.writelines(lines)

    def _body(self) -> dict[str, object]:
        return read_json(self.path / RUN, KIND, VERSION)

    def _write(self, facts: Mapping[str, object]) -> None:
        body = {name: value for name, value in facts.items() if name not in ("kind", "version")}
        write_json(self.path / RUN, KIND, VERSION, without_secrets(json.loads(json.dumps(body, default=str))))


def origin(model: str, seed: int) -> Origin | None:
    """The run whose weights a model folder holds, or the seed that a tiny model is drawn from; else None."""
    if model.startswith(PREFIX):
        return Origin(seed=seed)
    weights = Path(model).expanduser().absolute()
    if not (weights.parent / RUN).is_file():
        return None
    try:
        facts = RunFolder(weights.parent).facts()
    except ArtifactError:
        return None
    ended = facts.outcome if weights.name == FINAL else None
    run = Origin(run=str(weights.parent), weights=weights.name, model=facts.model)
    return run if ended is None else replace(run, step=ended.step, samples_seen=ended.samples_seen)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's numbers depend on."""
    versions_by_name = {"python": platform.python_version(), "packtrain": packtrain.__version__}
    for name in _PACKAGES:
        try:
            versions_by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions_by_name


def commit() -> str | None:
    """The commit of the git repository in which the run was started, with -dirty where files differ; else None."""
    # No program that the repository's own settings name is run.
    command = ("git", "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None


def plain_values(value: Any) -> Any:
    """Values as YAML and JSON have them."""
    if isinstance(value, Mapping):
        return {str(name): plain_values(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(inner) for inner in value]
    return os.fspath(value) if isinstance(value, Path) else value


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
