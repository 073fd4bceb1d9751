"""`verify`: a model's name, an attention backend and optionally data in; a report of the packing check out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.core.artifacts import make_folder_once
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError, nearest
from packtrain.delivery.encode.from_transformers import finished_tokenizer, model_contract
from packtrain.families.contracts import contract_for
from packtrain.families.layout import LossOn
from packtrain.families.model_folder import PREFIX, resolve_model
from packtrain.families.registry import load_plugins, plugins_for
from packtrain.measuring.request import Request

if TYPE_CHECKING:
    import torch

    from packtrain.delivery.encode.encode import SampleEncoder
    from packtrain.delivery.encode.encoded_sample import EncodedSample
    from packtrain.delivery.encode.unlisted import ProcessorEncoder
    from packtrain.families.family import BatchContract
    from packtrain.records.source import SourceSpec
    from packtrain.verifying.check_result import CheckReport, PricedSample


# How much wider than tiny: heads of 16 become heads of 64 or 128, a width of 64 becomes 256 or 512.
SHAPES: Mapping[str, int] = {"tiny": 1, "small": 4, "medium": 8}
_WIDTHS = frozenset(
    (
        *("hidden_size", "intermediate_size", "head_dim", "embed_dim", "out_hidden_size"),
        *("mrope_section", "query_pre_attn_scalar"),
    )
)
# A matrix with four times as many columns needs entries half as large for sums of the same size.
_SPREAD = "initializer_range"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DEVICES = ("cpu", "cuda")
_MULTIPLE = 64  # tokens of a row: padding is checked as well


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where the model runs, and in which precision."""

    device: torch.device
    dtype: torch.dtype


def verify(
    model: str,
    *,
    attn_implementation: str = "auto",
    data: str | Path | None = None,
    samples: int = 6,
    dtype: str | None = None,
    device: str | None = None,
    shape: str = "tiny",
    media_root: str | Path | None = None,
    dataset_format: str | None = None,
    loss_on: LossOn | None = None,
    allow_outside_root: bool = False,
    plugins: Sequence[str] = (),
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> CheckReport:
    """Check that a model on an attention backend gives packed samples the same results as each of them alone."""
    load_plugins(plugins)
    _check(model, shape, samples)
    place = _place(device, dtype)
    from packtrain.delivery.collate.collators import PackCollator
    from packtrain.delivery.encode.unlisted import sample_encoder
    from packtrain.modeling.attention import VARLEN_LOOP, choose_backend
    from packtrain.verifying.padding_check import refuse_batch_statistics
    from packtrain.verifying.verification import long_rows, unreached_note, verify_model

    folder = shaped_folder(resolve_model(model, cache_dir() / "models").absolute(), shape)
    request = Request(
        specs=_sources(data, media_root, dataset_format) if data is not None else (),
        model=str(folder),
        loss_on=loss_on,
        allow_outside_root=allow_outside_root,
        seed=seed,
    ).with_date()
    settings = request.settings()
    model_contract(settings)  # refused before anything is loaded
    request = replace(
        request,
        tokenizer=finished_tokenizer(settings, cache_dir() / "tokenizers"),
        plugins=plugins_for(plugins, settings.model_type),
    )
    encoder = sample_encoder(request)
    progress("loading the model")
    loaded = _load(model, request.model, place, seed)
    refuse_batch_statistics(loaded, model)
    contract = encoder.contract
    if not contract.unlisted:
        contract = contract_for(loaded.config.to_dict())  # with the defaults that transformers adds
    progress("encoding samples")
    priced, longest = _samples(request, encoder, loaded.config, contract, samples, seed)
    packed = [one.sample for one in priced]
    chosen = choose_backend(loaded, contract) if attn_implementation == "auto" else attn_implementation
    options: dict[str, Any] = {
        "pad_id": encoder.pad_id,
        "dtype": place.dtype,
        "boundaries": chosen.startswith(("varlen", "flash")),
    }
    report = verify_model(
        loaded,
        packed,
        contract,
        PackCollator(contract, pad_to_multiple=_MULTIPLE, **options),
        attn_implementation=chosen,
        backward=not (chosen == "flex" and place.device.type == "cpu"),
        costs=[one.cost for one in priced],
        patch_size=_patch_size(loaded),
        rows=long_rows(
            packed, longest, contract, lambda static: PackCollator(contract, static_shapes=static, **options)
        ),
        loss=_training_loss(loaded, place),
        name=model,
        progress=progress,
    )
    notes = [unreached_note(loaded.config, max(map(len, [*packed, longest])))]
    if report.attn_implementation == VARLEN_LOOP:
        notes.append(
            "torch's varlen kernel, which needs a GPU, bf16 or fp16 and a head dimension divisible by 8; a loop "
            "replaced it"
        )
    return replace(report, left_out=(*report.left_out, *filter(None, notes)))


def _samples(
    request: Request,
    encoder: SampleEncoder | ProcessorEncoder,
    config: Any,
    contract: BatchContract,
    count: int,
    seed: int,
) -> tuple[list[PricedSample], EncodedSample]:
    """The samples to pack, and the longest one: from the user's data, or synthetic."""
    from packtrain.delivery.encode.encode import SampleEncoder
    from packtrain.verifying.samples import (
        processor_samples,
        processor_text,
        synthetic_samples,
        synthetic_text,
        user_samples,
    )
    from packtrain.verifying.verification import long_enough

    if request.specs:
        priced, longest = user_samples(request, encoder, count, contract.longest_row)
        return priced, longest if longest is not None else max((one.sample for one in priced), key=len)
    if not isinstance(encoder, SampleEncoder):
        priced = processor_samples(request, encoder, seed)
        text = processor_text(encoder, long_enough(config, contract), seed=seed)
        return priced, text if text is not None else max((one.sample for one in priced), key=len)
    chat = request.settings().chat_template is not None
    longest = synthetic_text(encoder, long_enough(config, contract), chat=chat, seed=seed)
    return synthetic_samples(request, encoder, seed), longest


def _training_loss(model: Any, place: _Place) -> Any:
    """The default loss of `train`; from logits where the model cannot take it in chunks."""
    from packtrain.training.loss import LogitsTokenLoss, loss_on, make_losses
    from packtrain.training.step_settings import StepSettings

    try:
        losses = make_losses(model, StepSettings())
    except ConfigError:
        losses = LogitsTokenLoss()
    return loss_on(losses, place.device)


def _check(model: str, shape: str, samples: int) -> None:
    if shape not in SHAPES:
        raise ConfigError("shape", got=shape, expected=", ".join(SHAPES), fix=nearest(shape, SHAPES))
    if shape != "tiny" and not model.startswith(PREFIX):
        raise ConfigError(
            "shape", got=f"{shape} for {model}", expected=f"a model {PREFIX}FAMILY: other models have their own shape"
        )
    if samples < 2:
        raise ConfigError("samples", got=samples, expected="at least two samples")


def _place(device: str | None, dtype: str | None) -> _Place:
    try:
        import torch

        from packtrain.modeling.load import quiet_libraries

        quiet_libraries()
    except ImportError as error:
        raise ConfigError("packtrain verify", got=str(error), fix="pip install 'packtrain[train]'") from error
    if device is not None and device.split(":")[0] not in DEVICES:
        raise ConfigError("device", got=device, expected=", ".join(DEVICES), fix=nearest(device, DEVICES))
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError("dtype", got=dtype, expected=", ".join(DTYPES), fix=nearest(dtype, DTYPES))
    available = torch.cuda.is_available()
    if device is not None and device.startswith("cuda") and not available:
        raise ConfigError("device", got=device, expected="a GPU that torch can use", fix="use --device cpu")
    used = torch.device(device or ("cuda" if available else "cpu"))
    return _Place(device=used, dtype=getattr(torch, DTYPES[dtype or ("bf16" if used.type == "cuda" else "fp32")]))


def _sources(data: str | Path, media_root: str | Path | None, dataset_format: str | None) -> tuple[SourceSpec, ...]:
    from packtrain.records.open import open_sources

    root = str(media_root) if media_root is not None else None
    return tuple(open_sources(str(data), format=dataset_format, media_root=root))


def _load(name: str, folder: str, place: _Place, seed: int) -> Any:
    from packtrain.modeling.load import build_model, load_model

    if not name.startswith(PREFIX):
        return load_model(name, cache_dir=cache_dir() / "models", dtype=place.dtype).to(place.device)
    model = build_model(folder, seed).to(place.device)
    for weight in model.parameters():  # as in loading: rotary frequencies stay fp32
        weight.data = weight.data.to(place.dtype)
    return model


def _patch_size(model: Any) -> int:
    """Side of a patch of the vision encoder; 0 where there is none."""
    side = getattr(getattr(model.config, "vision_config", None), "patch_size", 0)
    return int(side[0] if isinstance(side, (list, tuple)) else side)


def widen(config: Mapping[str, Any], times: int) -> dict[str, Any]:
    """A tiny model's config with every width multiplied; depth, vocabulary and vision geometry stay.

    >>> widen({"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": {"mrope_section": [2, 3, 3]}}, 4)
    {'hidden_size': 256, 'num_attention_heads': 4, 'rope_parameters': {'mrope_section': [8, 12, 12]}}
    """
    wide: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            wide[key] = widen(value, times)
        elif key in _WIDTHS:
            wide[key] = [times * one for one in value] if isinstance(value, list) else times * value
        elif key == _SPREAD:
            wide[key] = value / times**0.5
        else:
            wide[key] = value
    return wide


def shaped_folder(tiny: Path, shape: str) -> Path:
    """The folder of a tiny model made wider, beside it; made at most once."""
    folder = tiny.with_name(f"{tiny.name}-{shape}") if SHAPES[shape] > 1 else tiny

    def write(fresh: Path) -> None:
        shutil.copytree(tiny, fresh, dirs_exist_ok=True)
        config = json.loads((tiny / "config.json").read_bytes())
        text = json.dumps(widen(config, SHAPES[shape]), indent=2) + "\n"
        (fresh / "config.json").write_text(text, encoding="utf-8")

    return make_folder_once(folder, write)
