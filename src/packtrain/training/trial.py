"""One setting of training, run for a few steps on synthetic samples: how long a step takes, and what memory it needs.

The model is random and is prepared as training prepares it. Gradients stay between steps, as they do where several
passes make one step, so that memory is that of the second pass and all later ones.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from packtrain.core.errors import PacktrainError
from packtrain.delivery.collate.batch_values import Batch
from packtrain.delivery.collate.collators import PackCollator, PaddedCollator, StaticShapes
from packtrain.delivery.encode.encoded_sample import PackedRow, PackKey
from packtrain.delivery.encode.synthetic_samples import Mix, SyntheticSamples, pack_lengths, row_lengths
from packtrain.families.contracts import contract_for
from packtrain.modeling.load import auto_class
from packtrain.modeling.model_settings import ModelSettings
from packtrain.modeling.preparation import ReadyModel, configure_model
from packtrain.modeling.vision import split_vision
from packtrain.predicting.calibration import Measurement
from packtrain.predicting.shapes import shape_from_config
from packtrain.predicting.values import Load, TrainingSetup
from packtrain.training.loss import ChunkedTokenLoss, LogitsTokenLoss, TokenLossSum
from packtrain.training.masters import make_optimizer
from packtrain.training.predictions import batch_load
from packtrain.training.stopwatch import device_memory, stopwatch

OUT_OF_MEMORY = "out of memory"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LONG = 300  # characters of an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A model, how it is trained, and what its batches look like."""

    model: str  # a name for `config`
    config: Mapping[str, Any] = field(repr=False)
    setup: TrainingSetup
    tokens: int  # of a pack, or of the longest row of a padded batch
    rows: int | None = None  # of a padded batch; None: one pack
    mix: Mix = field(default_factory=Mix)
    held_out: bool = False
    steps: int = 5  # that are measured
    warmup: int = 2
    backend: str = "inductor"  # of compiled layers

    @property
    def name(self) -> str:
        """The trial in a line."""
        setup, mix = self.setup, self.mix
        kind = f"packed {self.tokens:,}" if self.rows is None else f"padded {self.rows} x {self.tokens:,}"
        again = {(True, True): "recomputed", (False, False): "kept", (False, True): "encoder recomputed"}
        usual = Mix()
        parts = [
            self.model,
            setup.method,
            kind,
            again.get((setup.gradient_checkpointing, setup.vision_checkpointing), "decoder recomputed"),
            "compiled" if setup.compiled else "eager",
        ]
        if mix.mean_tokens != usual.mean_tokens:
            parts.append(f"{mix.mean_tokens:,} a sample")
        if mix.patches_per_token not in (0, usual.patches_per_token):
            parts.append(f"{mix.patches_per_token:g} patches a token")
        return ", ".join(parts)


def measure_trial(trial: Trial, device: torch.device) -> Measurement:
    """Run it. Too little memory, or a setting that does not run, is a result as well."""
    planned = Measurement(
        name=trial.name,
        model=trial.model,
        shape=shape_from_config(trial.config),
        setup=trial.setup,
        load=Load(tokens=trial.tokens, squared_tokens=0, longest=0),
        held_out=trial.held_out,
    )
    error = ""
    try:
        _free(device, compiled=trial.setup.compiled)
        return _Run(trial, device).measured(planned)
    except PacktrainError:
        raise
    except torch.OutOfMemoryError:
        error = OUT_OF_MEMORY
    except Exception as failure:  # a kernel, a compiler or a model that does not take the setting
        error = f"{type(failure).__name__}: {failure}"[:_LONG]
    finally:
        _free(device, compiled=trial.setup.compiled)
    return replace(planned, error=error)


def build(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """A random model of this config, made where it is used."""
    from transformers import AutoConfig

    kind = str(config["model_type"])
    model_config = AutoConfig.for_model(kind, **{name: value for name, value in config.items() if name != "model_type"})
    torch.manual_seed(0)
    with device:
        return auto_class(kind).from_config(model_config, dtype=dtype).to(device).train()


class _Run:
    """A prepared model with its optimizer and one batch."""

    def __init__(self, trial: Trial, device: torch.device) -> None:
        self._trial, self._device = trial, device
        dtype = _DTYPES[trial.setup.weights_dtype]
        batch = _batch(trial, dtype)
        self._info = batch.info
        ready, setup = _prepare_model(trial, device, dtype), trial.setup
        self._model, self._waited = ready.model, not ready.on_host
        self._losses: TokenLossSum = (
            ChunkedTokenLoss(ready.model, setup.loss_chunk) if setup.chunked_loss else LogitsTokenLoss()
        )
        self._targets = self._losses.targets(batch)
        self._batch = Batch({**batch.to(device), **{name: batch[name] for name in ready.on_host if name in batch}})
        self._trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        fused = device.type == "cuda"
        self._optimizer = make_optimizer(
            torch.optim.AdamW,
            [{"params": self._trained}],
            {"lr": 1e-6, "fused": fused, "foreach": not fused},
            masters=trial.setup.master_weights,
        )

    def measured(self, planned: Measurement) -> Measurement:
        """The median step, and the peak of memory over all of them."""
        for _ in range(self._trial.warmup):
            self._step(lambda: None)
        memory, watch, marks = device_memory(self._device), stopwatch(self._device), list[Any]()
        watch.wait()
        memory.restart()
        for _ in range(self._trial.steps):
            self._step(lambda: marks.append(watch.mark()))  # at its beginning, and after its backward pass
        marks.append(watch.mark())
        watch.wait()
        reserved, context = _reserved_bytes(self._device)
        return replace(
            planned,
            load=batch_load(self._info),
            seconds=median(watch.between(*pair) for pair in pairwise(marks[::2])),
            pass_seconds=median(map(watch.between, marks[:-1:2], marks[1::2])),
            allocated=memory.peak(),
            reserved=reserved,
            context=context,
            waited=self._waited,
        )

    def _step(self, mark: Callable[[], None]) -> None:
        mark()
        loss, _ = self._losses.total(self._model, Batch(self._batch), self._targets)
        (loss / self._info.supervised_tokens).backward()
        mark()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)


def _prepare_model(trial: Trial, device: torch.device, dtype: torch.dtype) -> ReadyModel:
    """The model as training has it."""
    setup = trial.setup
    sees = shape_from_config(trial.config).vision is not None
    settings = ModelSettings(
        name=trial.model,
        method=setup.method,
        lora_rank=setup.lora_rank,
        train_vision=setup.train_vision if sees else None,
        train_projector=setup.train_projector if sees else None,
    )
    ready = configure_model(
        build(trial.config, device, dtype),
        settings,
        setup,
        attn_implementation=setup.attn_implementation,
        device=device,
        dtype=dtype,
        seed=0,
        compiled=setup.compiled,
        static_shapes=trial.rows is None,
        backend=trial.backend,
    )
    if setup.vision_batch_patches is not None:
        split_vision(ready.model, setup.vision_batch_patches)
    return ready


def _batch(trial: Trial, dtype: torch.dtype) -> Batch:
    """The one batch that every step is given."""
    make, contract = SyntheticSamples(trial.config, trial.mix, dtype=dtype), contract_for(trial.config)
    if trial.rows is not None:
        lengths = row_lengths(trial.tokens, trial.rows)
        samples = [make.sample(number, tokens) for number, tokens in enumerate(lengths)]
        rows = [PackedRow(key=PackKey(0, number), samples=(one,)) for number, one in enumerate(samples)]
        return PaddedCollator(contract, pad_id=0, dtype=dtype)(rows)
    samples = [make.sample(number, tokens) for number, tokens in enumerate(pack_lengths(trial.tokens, trial.mix))]
    collate = PackCollator(
        contract,
        pad_id=0,
        dtype=dtype,
        boundaries=trial.setup.attn_implementation == "varlen",
        static_shapes=StaticShapes(tokens=trial.tokens) if trial.setup.compiled else None,
    )
    return collate([PackedRow(key=PackKey(0, 0), samples=tuple(samples))])


def _reserved_bytes(device: torch.device) -> tuple[int, int]:
    """Peak bytes reserved by torch, and what the driver counts beyond them; zeros where there is no GPU."""
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    beyond = max(0, total - free - torch.cuda.memory_reserved(device))
    return torch.cuda.max_memory_reserved(device), beyond


def _free(device: torch.device, *, compiled: bool) -> None:
    """Give everything back, compiled code included: a second length would be compiled for any length."""
    if compiled:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
