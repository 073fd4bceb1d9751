"""The check before the first step: what is compared, and when an earlier start has compared it already.

A listed model is checked at every start of packed training. An unlisted one is trained on packs only if the check has
passed; that is kept, by everything it depends on, so that the next start is quick and any change runs it again.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.core.artifacts import read_json, write_json
from packtrain.core.cache_root import cache_dir
from packtrain.core.dataclass_json import from_json
from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.core.fingerprint import digest, files_state
from packtrain.families.model_folder import resolve_model

if TYPE_CHECKING:
    import torch

    from packtrain.app.train.prepare import Prepared
    from packtrain.modeling.preparation import ReadyModel
    from packtrain.verifying.check_result import CheckReport

KIND, VERSION = "packing_check", 1
_PACKAGES = ("packtrain", "torch", "transformers", "peft")


def check_first_step(
    prepared: Prepared,
    loaded: ReadyModel,
    collate: Any,
    device: torch.device,
    *,
    inputs: Mapping[str, Any],
    resumed: bool,
    progress: Callable[[str], None] = lambda _: None,
) -> CheckReport | None:
    """Compare packed or padded samples with each of them alone, on the model as it is trained.

    Raises where they differ. None where nothing is to be checked: padded rows of a listed model, the check turned off,
    and weights that are sharded, which may be too large for one process: there the trainer runs it later.
    """
    from packtrain.modeling.preparation import ready_for_steps
    from packtrain.training.agreement import gather_values
    from packtrain.training.first_packs import check_first_packs, check_first_rows
    from packtrain.training.loss import loss_on, make_losses
    from packtrain.verifying.packing_check import Training
    from packtrain.verifying.padding_check import refuse_batch_statistics

    run, contract = prepared.run, prepared.dataset.contract
    refuse_batch_statistics(loaded.model, run.model.name)
    packing = bool(run.data.packing)
    if packing and contract.unlisted and not run.packing_check:
        raise ConfigError(
            "training.packing_check",
            got=f"false for {contract.model_type!r}, which is trained on packs only where the check passes",
            expected="true",
            fix="leave packing_check out, or train on padded rows: data.packing=false",
        )
    if run.is_sharded or (packing and not run.packing_check) or not (packing or contract.unlisted):
        return None
    key = _key(prepared, loaded, device, inputs) if contract.unlisted and not resumed else None
    kept = _read(key) if key is not None else None
    if all(gather_values(kept is not None)) and kept is not None:  # ranks of one run do the same
        return kept
    progress("checking packing on the model" if packing else "checking padded rows on the model")
    loaded.model.to(device)
    ready_for_steps(loaded.model, run.step.vision_batch_patches, contract=contract)
    smoothing = run.arguments.get("label_smoothing_factor") or 0.0
    training = Training(loss=loss_on(make_losses(loaded.model, run.step, smoothing), device), smoothing=smoothing)
    if packing:
        report = check_first_packs(
            loaded.model,
            prepared.dataset,
            collate,
            contract=contract,
            rank=0,  # all processes check the same samples
            world_size=1,
            training=training,
        )
    else:
        report = check_first_rows(loaded.model, prepared.dataset, collate, contract=contract, training=training)
    if key is not None:
        write_json(_place(key), KIND, VERSION, {"report": asdict(report)}, checked=True)
    return report


def _key(prepared: Prepared, loaded: ReadyModel, device: torch.device, inputs: Mapping[str, Any]) -> str:
    """A name of all that the outcome depends on: weights, data and packs, kernels, shapes and versions."""
    import torch

    run = prepared.run
    folder = Path(resolve_model(run.model.name, cache_dir() / "models"))
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    return digest(
        {
            "weights": files_state(files),
            "folder": str(folder.resolve()),
            "model": asdict(run.model),
            "setup": asdict(run.setup),
            "step": asdict(run.step),
            "seed": run.arguments["seed"],
            "smoothing": run.arguments.get("label_smoothing_factor"),
            "contract": repr(replace(prepared.dataset.contract, small_media={})),
            "inputs": dict(inputs),
            "packing": asdict(prepared.dataset.plan.config),
            "rows": [bool(run.data.packing), prepared.dataset.rows_per_batch],
            "attention": loaded.attn_implementation,
            "dtype": str(loaded.dtype),
            "compiled": loaded.compiled,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
            "versions": {name: _version(name) for name in _PACKAGES},
        }
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _place(key: str) -> Path:
    folder = cache_dir() / "checks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{key}.json"


def _read(key: str) -> CheckReport | None:
    """What an earlier start has found; None where there was none, or its file is damaged."""
    from packtrain.verifying.check_result import CheckReport

    try:
        report = from_json(CheckReport, read_json(_place(key), KIND, VERSION, checked=True)["report"])
    except (ArtifactError, TypeError, ValueError, KeyError):
        return None
    return replace(report, kept=True) if report.passed else None
