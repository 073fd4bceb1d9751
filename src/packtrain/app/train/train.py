"""`train`: a config in, a run folder with a trained model out."""

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
from packtrain.core.cache_root import cache_dir, make_cache
from packtrain.core.errors import ConfigError
from packtrain.core.fingerprint import differences
from packtrain.core.secrets import has_secrets, override_without_secrets, without_secrets
from packtrain.families.contracts import contract_for
from packtrain.families.family import ProcessorSettings
from packtrain.families.model_folder import resolve_model
from packtrain.families.settings import read_settings
from packtrain.runs.run_folder import CONFIG, RUN, Invocation, RunFacts, RunFolder, RunOutcome

if TYPE_CHECKING:
    from rich.console import Console

_CHANGES = 5  # of settings, that a note names


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
    """Measure and pack what is missing, check packing on the first samples, train, and write a run folder.

    Without a config, `overrides` name model and data, and the rest is chosen for the available GPU. To resume, `config`
    may be the folder of the run. `ready` gets everything that was derived before the first step; progress is shown on
    `console`. Only the first process of a run uses the two.
    """
    _require_packages()
    here = ProcessPlace.here()
    progress = progress if here.first else lambda _: None
    config, measured = _run_config(config, overrides, resume=resume), None
    if config is None:
        given = with_overrides(
            RunConfig(), (*overrides, *((f"data.max_samples={max_samples}",) if max_samples else ()))
        )
        _require_attention(given.training.attn_implementation, use_cpu=bool(given.training.use_cpu))
        config, measured = config_from_data(given, here, progress)
        overrides = ()
    run = _resolve_run(config, overrides, here.world_size, resume=resume, max_samples=max_samples)
    _require_attention(run.model.attn_implementation, use_cpu=bool(run.arguments.get("use_cpu")))
    settings = read_settings(str(resolve_model(run.model.name, cache_dir() / "models")))
    run = _of_model(run, settings)
    contract_for(settings, packing=run.data.packing is not False)  # refused before it is measured
    folder = RunFolder(run.folder)
    writes = here.first and not dry_run
    if writes:
        folder.check(resume=resume)
    elif here.first:
        folder.check_place()
    make_cache(run.data.cache_root)
    run = with_template_date(run)
    if clear_cache:
        if here.world_size > 1:  # one would remove what others are reading
            raise ConfigError(
                "--clear-cache",
                got=f"{here.world_size} processes",
                expected="one process",
                fix="clear first: packtrain train CONFIG --clear-cache --dry-run, or packtrain cache clear",
            )
        run = replace(run, notes=(*run.notes, *clear_run(run)))
    with folder.alone() if writes else nullcontext():
        from packtrain.app.train.session import Session
        from packtrain.modeling.load import require_weights
        from packtrain.training.hf_trainer import refuse_unsharded

        if (local := Path(run.model.name).expanduser()).is_dir():
            require_weights(local)  # before the data are measured
        prepared = prepare(run, progress, measured=measured)
        urls = [name for name in ("dataset_path", "eval_path") if has_secrets(str(getattr(run.config.data, name)))]
        invocation = Invocation(
            written=_written(config),
            overrides=tuple(override_without_secrets(one) for one in overrides),
            urls_with_secrets=tuple(urls),
            command=_command(),
            host=platform.node(),
            planned_in=_study_page(config),
        )
        session = Session.open(
            prepared, here, resume=resume, batch_stats=batch_stats, invocation=invocation, progress=progress
        )
        if here.first:
            ready(session.ready)
        if dry_run:
            # With several processes the trainer refuses it, after asking accelerate; a dry run makes no trainer.
            refuse_unsharded(session.args, is_sharded=session.args.device.type != "cpu")
            return TrainOutcome(folder=run.folder, ready=session.ready, outcome=RunOutcome(status="not trained"))
        if (ended := session.ended_before()) is not None:
            return ended
        return session.train(console if here.first else None)


def _of_model(run: ResolvedRun, settings: ProcessorSettings) -> ResolvedRun:
    """The run with the media limits of its model."""
    config, notes = own_limits(run.config, settings)
    limits = config.data.processor_config
    return replace(
        run,
        config=config,
        data=replace(run.data, processor_config=limits),
        evaluation=run.evaluation and replace(run.evaluation, processor_config=limits),
        notes=(*run.notes, *notes, *check_tiles(config)),
    )


def _study_page(config: RunConfig | str | Path) -> str | None:
    """The report of the study that recommended this config, where `packtrain plan` wrote both."""
    if isinstance(config, RunConfig) or Path(config).name != RECOMMENDED:
        return None
    page = Path(config).absolute().parent / STUDY_PAGE
    return str(page) if page.is_file() else None


def _command() -> str:
    """The command line of this process, without secrets."""
    return shlex.join([Path(sys.argv[0]).name, *map(override_without_secrets, sys.argv[1:])])


def _run_config(
    config: RunConfig | str | Path | None, overrides: Sequence[str], *, resume: bool
) -> RunConfig | str | Path | None:
    """The config to train; for a resumed run the one in its folder. None: one has to be chosen."""
    if config is None and resume:
        folder = with_overrides(RunConfig(), overrides).training.output_dir
        if folder is None:
            raise ConfigError(
                "--resume", got="no run", expected="the folder of a run", fix="packtrain train --resume RUN"
            )
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
    """Refuse a path for --resume that is neither the folder of a run nor a config."""
    if path.is_file() or (not path.exists() and path.suffix in (".yaml", ".yml", ".py")):
        return
    raise ConfigError(
        str(path),
        got=f"a folder without {RUN}" if path.is_dir() else "nothing is there",
        expected="the folder of a run, or its config",
        fix="name the folder that the run was trained into (training.output_dir)",
    )


def _resolve_run(
    config: RunConfig | str | Path, overrides: Sequence[str], world_size: int, *, resume: bool, max_samples: int | None
) -> ResolvedRun:
    """The run; a resumed one as it was started, whatever the config says by now.

    A run folder may have been moved: run.yaml in a run folder resumes the run of that folder.
    """
    name = "run" if isinstance(config, RunConfig) else Path(config).stem
    given = config if isinstance(config, RunConfig) else load_config(config)
    run = resolve_run(given, world_size=world_size, overrides=overrides, name=name, max_samples=max_samples)
    if max_samples is not None:
        run = replace(run, folder=run.folder.with_name(f"{run.folder.name}-{max_samples}-samples"))
    # With max_samples it is another run than its config's, unless the config is that trial's.
    own = max_samples in (None, given.data.max_samples)
    moved = _resumed_folder(config, overrides) if own else None
    if resume and moved is not None:
        run = replace(run, folder=moved)
    if not resume:
        return run
    folder = RunFolder(run.folder)
    folder.check_resumed()
    if not folder.holds_run:
        return replace(run, notes=(*run.notes, f"nothing to resume in {run.folder}: the run starts from the beginning"))
    facts = folder.facts()
    if not _has_checkpoint(run.folder):  # it starts from the beginning, with any settings: nothing is lost
        if facts.status == "complete":
            raise ConfigError(
                str(run.folder),
                got="a run that is complete and has no checkpoint",
                expected="a run that can continue",
                fix="name another training.output_dir, or delete the folder",
            )
        return run
    # Earlier overrides are in its config already.
    new = [one for one in overrides if override_without_secrets(one) not in facts.invocation.overrides]
    before = config_of_run(run.folder, run.config)
    _require_secrets(facts, before)
    resumed = resolve_run(before, world_size=world_size, overrides=new, name=name)
    resumed = replace(resumed, length=replace(resumed.length, planned=facts.planned_epochs or 1))
    refuse_changes(before, resumed.config)
    changed = differences(facts.invocation.written, _written(given)) if moved is None else ()
    note = "the run continues as it was started; changes of the config since then are ignored: "
    ignored = (note + "; ".join(changed[:_CHANGES]),) if changed else ()
    notes = (*resumed.notes, *changes_note(before, resumed.config), *ignored)
    return replace(resumed, folder=run.folder, notes=notes)


def _require_secrets(facts: RunFacts, config: RunConfig) -> None:
    """Refuse to continue without the secrets of the URLs that the run was started with; they are written nowhere."""
    missing = [name for name in facts.invocation.urls_with_secrets if not has_secrets(str(getattr(config.data, name)))]
    if missing:
        url = getattr(config.data, missing[0])
        raise ConfigError(
            f"data.{missing[0]}",
            got=f"{url}, without the user, password or signature that the run was started with",
            expected="the whole URL: secrets are not stored in the run's folder",
            fix=f"resume with the original config, or pass data.{missing[0]}=URL",
        )


def _has_checkpoint(folder: Path) -> bool:
    """Is there one to resume from? It is an error if all of them are broken."""
    from packtrain.training.checkpoints import find_latest, refuse_broken

    if find_latest(folder) is not None:
        return True
    refuse_broken(folder)
    return False


def _resumed_folder(config: RunConfig | str | Path, overrides: Sequence[str]) -> Path | None:
    """The run folder that this config is in, unless the overrides name another one."""
    if isinstance(config, RunConfig) or any(_key(one) == "output_dir" for one in overrides):
        return None
    path = Path(config)
    return path.parent if path.name == CONFIG and RunFolder(path.parent).holds_run else None


def _key(override: str) -> str:
    """The key of an override, without its section."""
    return override.partition("=")[0].rpartition(".")[2]


def _written(config: RunConfig | str | Path) -> dict[str, object]:
    """The settings of a config, to compare them with those at the start of the run."""
    loaded = config if isinstance(config, RunConfig) else load_config(config)
    sections = loaded.sections("model", "data", "training")
    return dict(without_secrets(json.loads(json.dumps(sections, default=str))))


def _require_attention(attention: str | None, *, use_cpu: bool) -> None:
    """Refuse an attention that cannot train here, before the data are measured."""
    if attention is not None and attention != "auto":
        from packtrain.modeling.preparation import require_kernel, training_device

        require_kernel(attention, training_device(0, use_cpu=use_cpu))


def _require_packages() -> None:
    """Refuse to start without the packages for training, before the data are measured."""
    missing = [name for name in ("torch", "transformers", "accelerate", "peft") if find_spec(name) is None]
    if missing:
        got = f"{', '.join(missing)} not installed"
        raise ConfigError("packtrain train", got=got, fix="pip install 'packtrain[train]'")
    from transformers.utils import logging

    from packtrain.modeling.load import quiet_libraries

    quiet_libraries()
    logging.disable_progress_bar()
