"""A model made ready for packs: its attention, its trainable parts, its layers; for a run, from loading on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from packtrain.core.errors import ConfigError
from packtrain.delivery.collate.batch_values import LossWeighting
from packtrain.delivery.collate.collators import StaticShapes
from packtrain.families.contracts import contract_for
from packtrain.families.family import BatchContract
from packtrain.modeling.adapters import TrainedPart, describe_trainable, keep_adapter_precision, set_trainable
from packtrain.modeling.attention import dense_backend, set_attention
from packtrain.modeling.compiled import compile_layers
from packtrain.modeling.host_sync import avoid_host_sync
from packtrain.modeling.load import keep_four_bits, load_model
from packtrain.modeling.model_parts import HALF, model_parts
from packtrain.modeling.model_settings import ModelSettings
from packtrain.modeling.patches import is_on
from packtrain.modeling.vision import (
    add_empty_media_hook,
    checkpoint_parts,
    split_vision,
    unsplit_vision,
    use_patch_matmul,
)
from packtrain.predicting.values import TrainingSetup

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_TILE = 128  # tokens
_BOUNDARIES = ("varlen", "flash")  # kernels that take the ends of samples as numbers
_ON_GPUS = {  # and why not on a CPU
    **dict.fromkeys(("flash_attention_2", "flash_attention_3"), "for which it has no kernel"),
    "flex": "where torch has no backward for it",
}


def prepare_model(
    model: Any,
    *,
    attn_implementation: str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    contract: BatchContract | None = None,
) -> str:
    """Make a model ready for packs, and return the attention that really runs.

    Its attention keeps samples apart, and its vision encoder takes part in packs without images, so that ranks agree.
    Models on which packing is known to be wrong are refused with the reason. `device` and `dtype` say where it will be
    trained, if not where its weights are now; `contract` is that of the dataset, which an unlisted model needs.
    """
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ConfigError(
            "adapter",
            got=f"{type(adapter).__name__}: it prepends learned tokens to a row and drops its positions",
            expected="an adapter that does not change the model's inputs",
            fix="use LoRA, or another adapter of the model's weights",
        )
    keep_four_bits(model)
    if contract is None or not contract.unlisted:
        contract = contract_for(model.config.to_dict(), packing=contract is None)
    used = set_attention(model, attn_implementation, contract, device=device, dtype=dtype)
    add_empty_media_hook(model, contract)
    return used


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadyModel:
    """A model and what was decided about it."""

    model: Any
    attn_implementation: str  # that really runs
    trainable: tuple[TrainedPart, ...]
    dtype: torch.dtype
    compiled: bool
    on_host: tuple[str, ...] = ()  # of a batch, what is not moved to the GPU

    @property
    def is_half(self) -> bool:
        """Are weights kept in half precision?"""
        return self.dtype in HALF

    @property
    def trains_half(self) -> bool:
        """Do any of them learn?"""
        return any(weight.requires_grad and weight.dtype in HALF for weight in self.model.parameters())


def training_device(local_rank: int, *, use_cpu: bool) -> torch.device:
    """The device that this process trains on."""
    if torch.cuda.is_available() and not use_cpu:
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def require_kernel(attention: str, device: torch.device) -> None:
    """Refuse an attention that does not train on this device; varlen does on a CPU, sample by sample."""
    if attention in _ON_GPUS and device.type == "cpu":
        raise ConfigError(
            "training.attn_implementation",
            got=f"{attention} on a CPU, {_ON_GPUS[attention]}",
            expected="an attn_implementation that can train here",
            fix="leave it out for automatic selection, or set training.attn_implementation: sdpa",
        )


def ready_model(
    settings: ModelSettings,
    setup: TrainingSetup,
    *,
    device: torch.device,
    packing: bool,
    seed: int,
    contract: BatchContract,
    compile: bool | None = None,
) -> ReadyModel:
    """Load a model and set it up for packs, or for padded rows; the trainer moves it to its device.

    Layers of an unlisted model are compiled only where that is asked for.
    """
    require_kernel(settings.attn_implementation, device)
    dtype = weights_dtype(settings, device)
    model = load_model(settings.name, dtype=dtype, seed=seed, quantize=settings.method == "qlora")
    attention = settings.attn_implementation
    if attention == "auto" and not packing:
        # What padded rows are usually trained with: they are the baseline.
        attention = dense_backend(model, contract)
    return configure_model(
        model,
        settings,
        setup,
        attn_implementation=attention,
        device=device,
        dtype=dtype,
        seed=seed,
        compiled=compile if compile is not None else device.type == "cuda" and packing and not contract.unlisted,
        static_shapes=packing,
        contract=contract,
    )


def configure_model(
    model: Any,
    settings: ModelSettings,
    setup: TrainingSetup,
    *,
    attn_implementation: str,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    compiled: bool,
    static_shapes: bool,
    contract: BatchContract | None = None,
    backend: str = "inductor",
) -> ReadyModel:
    """Everything between loading a model and training it on `device`; runs and trials of settings have it alike."""
    used = prepare_model(model, attn_implementation=attn_implementation, device=device, dtype=dtype, contract=contract)
    use_patch_matmul(model)
    torch.manual_seed(seed)  # adapters are drawn: the same ones by all ranks, and by every run of this seed
    model = set_trainable(model, settings, half_adapters=setup.half_adapters and dtype == torch.bfloat16)
    unlisted = contract is not None and contract.unlisted
    checkpoint_parts(
        model, language=setup.gradient_checkpointing, vision=setup.vision_checkpointing, only_possible=unlisted
    )
    if compiled:
        compile_layers(model, static_shapes=static_shapes, backend=backend)
    return ReadyModel(
        model=model,
        attn_implementation=used,
        trainable=describe_trainable(model),
        dtype=dtype,
        compiled=compiled,
        on_host=avoid_host_sync(model) if device.type == "cuda" else (),
    )


def ready_for_steps(
    model: Any, vision_batch_patches: int | None = None, *, contract: BatchContract | None = None
) -> None:
    """Install the hooks that steps need; the vision encoder runs on at most `vision_batch_patches` at a time."""
    keep_adapter_precision(model)
    keep_four_bits(model)
    if hasattr(model, "config") and hasattr(model.config, "to_dict"):
        parts = model_parts(model)
        if parts.vision is not None and not is_on(parts.inner, "empty_media"):
            add_empty_media_hook(model, contract or contract_for(model.config.to_dict(), packing=False))
        unsplit_vision(model)  # as an earlier trainer may have left it
    if vision_batch_patches is not None:
        split_vision(model, vision_batch_patches)


def collator_of(
    dataset: Any, ready: ReadyModel, weighting: LossWeighting, static_shapes: StaticShapes | None = None
) -> Any:
    """What makes batches of a dataset: packs for this attention, of static shapes where asked for; or padded rows."""
    options: dict[str, Any] = {"loss_weighting": weighting, "dtype": ready.dtype if ready.is_half else None}
    if dataset.config.packing:
        options |= {"boundaries": ready.attn_implementation.startswith(_BOUNDARIES), "static_shapes": static_shapes}
    return dataset.get_collator(**options)


def round_up_shapes(tokens: int) -> StaticShapes:
    """One shape for training and evaluation, so that layers are compiled once; sizes that matrix products like."""
    return StaticShapes(tokens=-(-tokens // _TILE) * _TILE)


def weights_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """The precision in which weights are kept and trained."""
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
