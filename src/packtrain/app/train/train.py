"""Training for users: a config in, a run folder with a trained model out."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.app.cache import clear_run
from packtrain.app.train.from_data import RECOMMENDED, STUDY_PAGE, config_from_data
from packtrain.app.train.outcome import ProcessPlace, ReadyRun, TrainOutcome
from packtrain.app.train.prepare import prepare
from packtrain.app.train.resolve import ResolvedRun, resolve_run, with_template_date
from packtrain.app.train.resume import changes_note, config_of_run, refuse_changes
from packtrain.config.run_config import RunConfig, load_config, with_overrides
from packtrain.config.setup import check_tiles, own_limits
from packtrain.core.cache_root import cache_dir, made_cache
from packtrain.core.errors import ConfigError
from packtrain.core.fingerprint import differences
from packtrain.core.secrets import has_secrets, override_without_secrets, without_secrets
from packtrain.families.contracts import contract_for
from packtrain.families.family import ProcessorSettings
from packtrain.families.model_folder import resolve
from packtrain.families.settings import read_settings
from packtrain.runs.run_folder import CONFIG, RUN, Invocation, RunFacts, RunFolder, RunOutcome

if TYPE_CHECKING:
    from rich.console import Console

_NAMED = 5  # settings that have changed


def train(
    config: RunConfig | str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    clear_cache: bool = False,
    dry_run: bool = False,
    max_samples: int | None = None,
    batch_stats: int = 0,
    progress: Callable[[Any], None] = lambda _: None,
    ready: Callable[[ReadyRun], None] = lambda _: None,
    console: Console | None = None,
) -> TrainOutcome:
    """Measure and pack what is missing, prove packing on the first samples, train, and leave a run folder.

    Without a config, `overrides` name model and data: the rest is chosen for the GPU that is there. A config may also
    be the folder of a run that is resumed. `ready` is given everything that was derived before the first step;
    `console` is what progress is shown on. Both are used by the first process of a run alone, and nothing is shown
    without them.
    """
    _require_packages()
    here = ProcessPlace.here()
    watched = progress if here.first else lambda _: None
    config, measured = _run_config(config, overrides, resume=resume), None
    if config is None:
        given = with_overrides(
            RunConfig(), (*overrides, *((f"data.max_samples={max_samples}",) if max_samples else ()))
        )
        _require_attention(given.training.attn_implementation, use_cpu=bool(given.training.use_cpu))
        config, measured = config_from_data(given, here, watched)
        overrides = ()
    run = _resolved(config, overrides, here.world, resume=resume, max_samples=max_samples)
    _require_attention(run.model.attn_implementation, use_cpu=bool(run.arguments.get("use_cpu")))
    settings = read_settings(str(resolve(run.model.name, cache_dir() / "models")))
    run = _of_model(run, settings)
    contract_for(settings)  # refused before it is measured
    folder = RunFolder(run.folder)
    writes = here.first and not dry_run
    if writes:
        folder.check(resume=resume)
    elif here.first:
        folder.check_place()
    made_cache(run.data.cache_root)
    run = with_template_date(run)
    if clear_cache:
        if here.world > 1:  # others may read already what one of them removes
            raise ConfigError(
                "--clear-cache",
                got=f"{here.world} processes",
                expected="one process",
                fix="clear first: packtrain train CONFIG --clear-cache --dry-run, or packtrain cache clear",
            )
        run = replace(run, notes=(*run.notes, *clear_run(run)))
    with folder.alone() if writes else nullcontext():
        from packtrain.app.train.session import Session
        from packtrain.modeling.load import require_weights
        from packtrain.training.hf_trainer import refuse_unsharded

        if (local := Path(run.model.name).expanduser()).is_dir():
            require_weights(local)  # said before the data are measured
        prepared = prepare(run, watched, measured=measured)
        urls = [name for name in ("dataset_path", "eval_path") if has_secrets(str(getattr(run.config.data, name)))]
        invocation = Invocation(
            written=_written(config),
            overrides=tuple(override_without_secrets(one) for one in overrides),
            urls_with_secrets=tuple(urls),
            command=_command(),
            host=platform.node(),
            planned_in=_study_of(config),
        )
        session = Session.open(
            prepared, here, resume=resume, batch_stats=batch_stats, invocation=invocation, progress=watched
        )
        if here.first:
            ready(session.ready)
        if dry_run:
            # Of several processes the trainer says it, which asks accelerate; it is not made here.
            refuse_unsharded(session.args, is_sharded=session.args.device.type != "cpu")
            return TrainOutcome(folder=run.folder, ready=session.ready, outcome=RunOutcome(status="not trained"))
        if (ended := session.ended_before()) is not None:
            return ended
        return session.train(console if here.first else None)


def _of_model(run: ResolvedRun, settings: ProcessorSettings) -> ResolvedRun:
    """The run with the limits of media that its model has."""
    config, said = own_limits(run.config, settings)
    limits = config.data.processor_config
    return replace(
        run,
        config=config,
        data=replace(run.data, processor_config=limits),
        evaluation=run.evaluation and replace(run.evaluation, processor_config=limits),
        notes=(*run.notes, *said, *check_tiles(config)),
    )


def _study_of(config: RunConfig | str | Path) -> str | None:
    """The page that says why the config is as it is, where `packtrain plan` wrote both."""
    if isinstance(config, RunConfig) or Path(config).name != RECOMMENDED:
        return None
    page = Path(config).absolute().parent / STUDY_PAGE
    return str(page) if page.is_file() else None


def _command() -> str:
    """How this process was started."""
    return shlex.join([Path(sys.argv[0]).name, *map(override_without_secrets, sys.argv[1:])])


def _run_config(
    config: RunConfig | str | Path | None, overrides: Sequence[str], *, resume: bool
) -> RunConfig | str | Path | None:
    """The config that is meant: of a run that is resumed, the one in its folder; None where there is none yet."""
    if config is None and resume:
        folder = with_overrides(RunConfig(), overrides).training.output_dir
        if folder is None:
            raise ConfigError("--resume", got="no run", expected="its folder", fix="packtrain train --resume RUN")
        return Path(folder) / CONFIG if RunFolder(Path(folder)).holds_run else None
    if isinstance(config, RunConfig) or config is None:
        return config
    if not RunFolder(Path(config)).holds_run:
        if resume:
            _require_config_or_run(Path(config))
        if (planned := Path(config) / RECOMMENDED).is_file():
            fix = f"packtrain train {planned}"
            raise ConfigError(str(config), got="the folder of a plan", expected="a YAML file", fix=fix)
        return config
    if not resume:
        fix = f"packtrain train --resume {config} continues it"
        raise ConfigError(str(config), got="the folder of a run", expected="a YAML file", fix=fix)
    return Path(config) / CONFIG


def _require_config_or_run(path: Path) -> None:
    """What --resume names is the folder of a run unless it is a file, or is called as one."""
    if path.is_file() or (not path.exists() and path.suffix in (".yaml", ".yml", ".py")):
        return
    raise ConfigError(
        str(path),
        got=f"a folder without {RUN}" if path.is_dir() else "nothing is there",
        expected="the folder of a run, or its config",
        fix="name the folder that the run was trained into (training.output_dir)",
    )


def _resolved(
    config: RunConfig | str | Path, overrides: Sequence[str], world: int, *, resume: bool, max_samples: int | None
) -> ResolvedRun:
    """The run; one that is resumed is the run as it was begun, whatever became of the config since.

    A run folder may have been moved: its own run.yaml resumes the run that it lies in.
    """
    name = "run" if isinstance(config, RunConfig) else Path(config).stem
    given = config if isinstance(config, RunConfig) else load_config(config)
    run = resolve_run(given, world=world, overrides=overrides, name=name, max_samples=max_samples)
    if max_samples is not None:
        run = replace(run, folder=run.folder.with_name(f"{run.folder.name}-{max_samples}-samples"))
    # A trial of a run is no run of its config, unless the config is the trial's.
    own = max_samples in (None, given.data.max_samples)
    moved = _folder_of(config, overrides) if own else None
    if resume and moved is not None:
        run = replace(run, folder=moved)
    before = RunFolder(run.folder)
    if not resume:
        return run
    before.check_resumed()
    if not before.holds_run:
        return replace(run, notes=(*run.notes, f"nothing to resume in {run.folder}: the run begins again"))
    facts = before.facts()
    if not _has_checkpoint(run.folder):  # it begins again, with whatever settings, where there is nothing to lose
        if facts.status == "complete":
            raise ConfigError(
                str(run.folder),
                got="a run that is complete and has no checkpoint",
                expected="a run that can go on",
                fix="name another training.output_dir, or delete the folder",
            )
        return run
    # The others are in its config already.
    new = [one for one in overrides if override_without_secrets(one) not in facts.invocation.overrides]
    had = config_of_run(run.folder, run.config)
    _require_secrets(facts, had)
    begun = resolve_run(had, world=world, overrides=new, name=name)
    begun = replace(begun, length=replace(begun.length, planned=facts.planned_epochs or 1))
    refuse_changes(had, begun.config)
    taken = changes_note(had, begun.config)
    changed = differences(facts.invocation.written, _written(given)) if moved is None else ()
    said = "the run continues as it was begun; what has changed in the config since is not taken over: "
    notes = (said + "; ".join(changed[:_NAMED]),) if changed else ()
    return replace(begun, folder=run.folder, notes=(*begun.notes, *taken, *notes))


def _require_secrets(facts: RunFacts, config: RunConfig) -> None:
    """Refuse to go on without what was kept apart of the URLs that a run was begun with; it is written nowhere."""
    missing = [name for name in facts.invocation.urls_with_secrets if not has_secrets(str(getattr(config.data, name)))]
    if missing:
        url = getattr(config.data, missing[0])
        raise ConfigError(
            f"data.{missing[0]}",
            got=f"{url}, without the user, password or signature that the run was begun with",
            expected="the whole URL: its secrets are not kept in the run's folder",
            fix=f"resume with the config that has it, or give it again: data.{missing[0]}=URL",
        )


def _has_checkpoint(folder: Path) -> bool:
    """Is there one to go on from? Where all of them are broken, that is an error."""
    from packtrain.training.checkpoints import find_latest, refuse_broken

    if find_latest(folder) is not None:
        return True
    refuse_broken(folder)
    return False


def _folder_of(config: RunConfig | str | Path, overrides: Sequence[str]) -> Path | None:
    """The run folder whose own config this is, unless another one is named."""
    if isinstance(config, RunConfig) or any(_key(one) == "output_dir" for one in overrides):
        return None
    path = Path(config)
    return path.parent if path.name == CONFIG and RunFolder(path.parent).holds_run else None


def _key(override: str) -> str:
    """What an override sets, in whatever section."""
    return override.partition("=")[0].rpartition(".")[2]


def _written(config: RunConfig | str | Path) -> dict[str, object]:
    """What a config says, to be compared with what it said when a run was begun."""
    found = config if isinstance(config, RunConfig) else load_config(config)
    sections = found.sections("model", "data", "training")
    return dict(without_secrets(json.loads(json.dumps(sections, default=str))))


def _require_attention(attention: str | None, *, use_cpu: bool) -> None:
    """Does it train where the run will? Said before the data are measured."""
    if attention is not None and attention != "auto":
        from packtrain.modeling.preparation import require_kernel, training_device

        require_kernel(attention, training_device(0, use_cpu=use_cpu))


def _require_packages() -> None:
    """Said at once, not after the data were measured."""
    missing = [name for name in ("torch", "transformers", "accelerate", "peft") if find_spec(name) is None]
    if missing:
        got = f"{', '.join(missing)} not installed"
        raise ConfigError("packtrain train", got=got, fix="pip install 'packtrain[train]'")
    from transformers.utils import logging

    from packtrain.modeling.load import quiet_libraries

    quiet_libraries()
    logging.disable_progress_bar()
