"""The memory model beside what torch really keeps: tiny models of every family, and a real decoder without its data."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from packtrain.families import tiny
from packtrain.modeling import chunked_loss
from packtrain.modeling.adapters import set_trainable
from packtrain.modeling.load import build_model
from packtrain.modeling.model_settings import ModelSettings
from packtrain.predicting.memory import (
    LOGIT_BYTES,
    MemoryCoefficients,
    MemoryEstimate,
    estimate_memory,
    loss_bytes,
    waiting_bytes,
)
from packtrain.predicting.memory_parts import count, states
from packtrain.predicting.shapes import read_shape, shape_from_config
from packtrain.predicting.values import Load, ModelShape, TrainingSetup
from packtrain.training.masters import make_optimizer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NOTHING_ELSE = MemoryCoefficients(framework_bytes=0, fragmentation=0.0)
QUICK = (
    ("llama", "bf16", "sdpa"),
    ("llama", "fp32", "eager"),
    ("qwen3_vl", "bf16", "sdpa"),
    ("qwen2_5_vl", "fp32", "sdpa"),
    ("qwen2_5_vl", "bf16", "eager"),
)
FAMILIES = ("llama", "qwen2", "qwen3", "smollm3", "gemma3_text", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava")
FAMILIES += ("llava_onevision", "internvl", "idefics3", "smolvlm", "gemma3")
CASES = [
    pytest.param(*case, marks=() if case in QUICK else (pytest.mark.full,))
    for case in ((family, dtype, kernel) for family in FAMILIES for dtype in DTYPES for kernel in ("sdpa", "eager"))
]
# One long sample has a mask only in layers with a window; the model counts it in all of them, to be on the safe side.
WINDOWED = ("gemma3_text",)
LAYERS = ("language activations", "vision activations", "attention")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive and not known, and their largest sum."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.now, self.peak = known, 0, 0
        self.seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and storage(tensor) not in self.known | self.seen.keys():
                self._count(tensor.untyped_storage())
        return out

    def _count(self, kept: torch.UntypedStorage) -> None:
        key, size = kept._cdata, kept.nbytes()

        def gone(_: Any) -> None:
            self.now -= size
            self.seen.pop(key, None)

        self.seen[key] = weakref.ref(kept, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


class Case:
    """A tiny model with a batch, its shape and its load."""

    def __init__(self, folder: Path, family: str, dtype: str, kernel: str) -> None:
        tiny.write(family, folder)
        self.shape = read_shape(folder)
        self.model = build_model(folder).to(DTYPES[dtype]).train()
        self.model.set_attn_implementation(kernel)
        self.batch, self.pixel_copies = make_batch(folder, self.shape, DTYPES[dtype])
        tokens, vision = self.batch["input_ids"].shape[1], self.shape.vision
        images = [] if vision is None else patches_of(self.batch, self.shape)
        self.load = Load(
            tokens=tokens,
            squared_tokens=tokens**2,
            longest=tokens,
            vision_tokens=0 if vision is None else sum(images) // vision.patches_per_token,
            patches=sum(images),
            squared_patches=sum(patches**2 for patches in images),
            largest_patches=max(images, default=0),
            images=len(images),
        )
        self.setup = TrainingSetup(
            weights_dtype=dtype,  # type: ignore[arg-type]
            attn_implementation=kernel,  # type: ignore[arg-type]
            gradient_checkpointing=False,
            vision_checkpointing=False,
        )

    def known(self) -> set[int]:
        """What is not counted: parameters, their gradients, buffers and inputs."""
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        grads = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        held = (*self.model.parameters(), *self.model.buffers(), *self.batch.values(), *grads)
        return {storage(tensor) for tensor in held}

    def estimate(self, **changes: Any) -> MemoryEstimate:
        return estimate_memory(self.shape, replace(self.setup, **changes), self.load, NOTHING_ELSE)


def make_batch(folder: Path, shape: ModelShape, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], int]:
    """One sample with two pictures and some text; also the bytes of its pixels, which some models copy."""
    from PIL import Image
    from transformers import AutoProcessor

    if shape.vision is None:
        return {"input_ids": torch.randint(5, 100, (1, 512))}, 0
    processor = AutoProcessor.from_pretrained(folder)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (336, 336, 3), dtype=np.uint8))
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Some words about it. " * 60}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
    ]
    text = processor.apply_chat_template(messages, tokenize=False)
    nested = shape.model_type in ("idefics3", "smolvlm", "gemma3")
    more = {"do_image_splitting": False} if shape.model_type in ("idefics3", "smolvlm") else {}
    images = [[picture, picture]] if nested else [picture, picture]
    batch = dict(processor(text=[text], images=images, return_tensors="pt", **more))
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    return batch, batch["pixel_values"].nbytes


def patches_of(batch: dict[str, torch.Tensor], shape: ModelShape) -> list[int]:
    if "image_grid_thw" in batch:
        return [int(grid.prod()) for grid in batch["image_grid_thw"]]
    assert shape.vision is not None
    pixels = batch["pixel_values"].flatten(0, -4)
    return [pixels[0].numel() // shape.vision.patch_elements] * len(pixels)


def sum_of(estimate: MemoryEstimate, names: tuple[str, ...] = LAYERS) -> int:
    return sum(estimate.part(name).bytes for name in names)


def at_the_loss(case: Case, load: Load | None = None) -> MemoryEstimate:
    """The estimate of the moment between forward and backward: so many logits that it is the worst one."""
    wide = replace(case.shape, language=replace(case.shape.language, vocabulary=10**7))
    estimate = estimate_memory(wide, replace(case.setup, chunked_loss=False), load or case.load, NOTHING_ELSE)
    assert estimate.moment == "the loss"
    return estimate


class Kept:
    """The tensors that autograd keeps of one forward pass, by the module that ran."""

    def __init__(self, case: Case) -> None:
        self.case, self.known, self.running = case, case.known(), [""]
        self.found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, module in case.model.named_modules():
            module.register_forward_pre_hook(lambda module, args, name=name: self.running.append(name))
            module.register_forward_hook(self._leave)

    def _leave(self, *of_module: Any) -> None:
        self.running.pop()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        # Logits belong to the loss, and pixels to the inputs.
        logits = tensor.shape[-1:] == (self.case.shape.language.vocabulary,)
        pixels = tensor.ndim > 3 and tensor.untyped_storage().nbytes() == self.case.pixel_copies
        if storage(tensor) not in self.known and not logits and not pixels:
            self.found.setdefault(storage(tensor), (self.running[-1], tensor))
        return tensor

    def of(self, *words: str) -> int:
        """The bytes kept by modules whose name has one of these words; of all modules without words."""
        kept = (tensor for name, tensor in self.found.values() if not words or any(word in name for word in words))
        return sum(tensor.untyped_storage().nbytes() for tensor in kept)


@pytest.mark.parametrize(("family", "dtype", "kernel"), CASES)
def test_what_autograd_keeps(tmp_path: Path, family: str, dtype: str, kernel: str) -> None:
    case = Case(tmp_path, family, dtype, kernel)
    kept = Kept(case)
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        loss = case.model(**case.batch, labels=case.batch["input_ids"], use_cache=False).loss
    assert loss.requires_grad
    assert len(kept.found) > 20
    estimate = at_the_loss(case)
    assert sum_of(estimate) == pytest.approx(kept.of(), rel=0.25 if family in WINDOWED else 0.05)
    if case.shape.vision is not None and kernel == "sdpa":  # squares are in a part of their own
        assert estimate.part("vision activations").bytes == pytest.approx(kept.of("vis", "project", "connec"), rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("family", "dtype", "kernel"), CASES)
def test_peak_of_forward_and_backward(
    tmp_path: Path, family: str, dtype: str, kernel: str, checkpointing: bool
) -> None:
    case = Case(tmp_path, family, dtype, kernel)
    if checkpointing:
        case.model.gradient_checkpointing_enable()
    with Live(case.known()) as live:
        case.model.model(**case.batch, use_cache=False).last_hidden_state.sum().backward()
    assert live.peak > 1e5
    estimate = case.estimate(gradient_checkpointing=checkpointing, vision_checkpointing=checkpointing)
    assert estimate.part("logits and loss").bytes == 0
    copies = 2 * case.pixel_copies if family in ("idefics3", "smolvlm", "llava_onevision") else 0
    low, high = 0.9 * live.peak - copies, (1.25 if family in WINDOWED else 1.15) * live.peak
    assert low < sum_of(estimate) < high, f"{sum_of(estimate) / live.peak:.3f} of {live.peak}"


def test_packed_rows_have_a_dense_mask_in_every_layer(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama", "bf16", "sdpa")
    tokens = case.load.tokens
    positions = torch.arange(tokens // 2).repeat(2)[None]
    kept = Kept(case)
    kept.known.add(storage(positions))
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        case.model(**case.batch, position_ids=positions, labels=case.batch["input_ids"], use_cache=False)
    load = replace(case.load, samples=2, squared_tokens=tokens**2 // 2)
    assert sum_of(at_the_loss(case, load)) == pytest.approx(kept.of(), rel=0.02)
    assert sum_of(at_the_loss(case, load)) > sum_of(at_the_loss(case)) + 2 * 2 * tokens**2


def test_logits_and_their_gradients(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama", "bf16", "sdpa")
    case.model.gradient_checkpointing_enable()
    with Live(case.known()) as live:
        case.model(**case.batch, labels=case.batch["input_ids"], use_cache=False).loss.backward()
    estimate = case.estimate(gradient_checkpointing=True, chunked_loss=False)
    assert estimate.moment == "the loss"
    assert estimate.part("logits and loss").bytes == 512 * case.shape.language.vocabulary * LOGIT_BYTES
    assert sum_of(estimate, (*LAYERS, "logits and loss")) == pytest.approx(live.peak, rel=0.03)


def fused_losses(
    logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, smoothing: float, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the one kernel of a GPU leaves behind: a sum, and a gradient in the logits' type."""
    return logits.new_zeros((), dtype=torch.float32), torch.zeros_like(logits) if with_gradient else logits


def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """As on a GPU: the product of half-precision factors comes out in fp32."""
    return left.new_zeros((len(left), right.shape[1]), dtype=torch.float32)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("supervised", [40, 400])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_chunked_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, supervised: int, method: str
) -> None:
    monkeypatch.setattr(chunked_loss, "_losses", fused_losses)
    monkeypatch.setattr(chunked_loss, "_product", wide_product)
    monkeypatch.setattr(chunked_loss, "_add_product", lambda total, by_logits, rows: None)  # as on a GPU: in place
    case = Case(tmp_path, "llama", dtype, "sdpa")
    head = case.model.lm_head.requires_grad_(method == "full")
    known = case.known()
    hidden = torch.randn(supervised, 64, dtype=DTYPES[dtype], requires_grad=True)
    ids = torch.randint(5, 100, (supervised,))
    with Live(known | {storage(ids), storage(hidden)}) as live:
        chosen = hidden.index_select(0, torch.arange(supervised))
        chunked_loss._SumOfLosses.apply(chosen, head.weight, None, ids, None, 50, 0.0)
    load = replace(case.load, supervised_tokens=supervised)
    setup = replace(case.setup, method=method, chunked_loss=True, loss_chunk=50)  # type: ignore[arg-type]
    assert loss_bytes(case.shape, setup, load) == pytest.approx(live.peak, rel=0.05)
    assert live.peak > 50_000


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_a_tied_head_waits_for_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    case = Case(tmp_path, "llama", "fp32", "sdpa")
    if not tied:
        case.model.lm_head.weight = torch.nn.Parameter(case.model.lm_head.weight.detach().clone())
    else:
        case.model.lm_head.weight = case.model.model.embed_tokens.weight
    made: list[Any] = []
    backward = chunked_loss._SumOfLosses.backward

    def watched(ctx: Any, *outer: torch.Tensor) -> Any:
        grads = backward(ctx, *outer)
        made.append(weakref.ref(grads[1].untyped_storage()))
        return grads

    monkeypatch.setattr(chunked_loss._SumOfLosses, "backward", staticmethod(watched))
    case.known()  # gradients are there from the pass before
    labels = case.batch["input_ids"]
    waits: list[bool] = []
    loss = chunked_loss.ChunkedLoss.install(case.model, chunk=64)
    layer = case.model.model.layers[0]
    layer.register_full_backward_hook(lambda *_: waits.append(made[0]() is not None))
    with loss.using(chunked_loss.Targets.of(labels)):
        total = case.model(**case.batch, labels=labels, use_cache=False).loss
    total.backward()
    assert waits == [tied]
    shape = replace(case.shape, language=replace(case.shape.language, tied=tied))
    load = replace(case.load, supervised_tokens=10)
    assert waiting_bytes(shape, case.setup, load) == (case.model.lm_head.weight.nbytes if tied else 0)
    assert waiting_bytes(shape, case.setup, replace(load, supervised_tokens=0)) == 0, "without loss nothing waits"
    assert waiting_bytes(shape, replace(case.setup, method="lora"), load) == 0


class Kernel(torch.autograd.Function):
    """Keeps what a flash kernel keeps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, queries: Any, keys: Any, values: Any) -> Any:
        out = torch.empty_like(queries.transpose(1, 2).contiguous())
        statistics = torch.empty(queries.shape[1:3], dtype=torch.float32, device=queries.device)
        ctx.save_for_backward(queries, keys, values, out, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_decoder_of_real_width_without_data(dtype: str, checkpointing: bool) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = Qwen3Config(hidden_size=2048, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8)
    config.intermediate_size, config.vocab_size = 6144, 151936
    ALL_ATTENTION_FUNCTIONS["counted"] = lambda module, q, k, v, mask, **more: (Kernel.apply(q, k, v), None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).train()
    model.set_attn_implementation("counted")
    if checkpointing:
        model.gradient_checkpointing_enable()
    for weight in model.parameters():
        weight.grad = torch.empty_like(weight)
    embedded = torch.empty(1, 8192, 2048, dtype=DTYPES[dtype], device="meta", requires_grad=True)
    held = (*model.parameters(), *model.buffers(), *(weight.grad for weight in model.parameters()), embedded)
    with Live({storage(tensor) for tensor in held}) as live:
        model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state.sum().backward()
    setup = TrainingSetup(weights_dtype=dtype, gradient_checkpointing=checkpointing)  # type: ignore[arg-type]
    load = Load(tokens=8192, squared_tokens=8192**2, longest=8192)
    estimate = estimate_memory(shape_from_config(config.to_dict()), setup, load, NOTHING_ELSE)
    assert live.peak > 1e9
    assert sum_of(estimate) == pytest.approx(live.peak, rel=0.05)


@pytest.mark.contract
@pytest.mark.parametrize(("method", "masters"), [("lora", True), ("lora", False), ("dora", True)])
def test_adapters_in_half_precision_and_in_fp32(tmp_path: Path, method: str, masters: bool) -> None:
    case = Case(tmp_path, "llama", "bf16", "sdpa")
    setup = replace(case.setup, method=method, lora_rank=8, master_weights=masters)  # type: ignore[arg-type]
    chosen = ModelSettings(name="tiny:llama", method=setup.method, lora_rank=8)
    case.model = set_trainable(case.model, chosen, half_adapters=setup.half_adapters)
    trained = [weight for weight in case.model.parameters() if weight.requires_grad]
    assert count(case.shape, setup).adapters == sum(weight.numel() for weight in trained)
    fixed = states(case.shape, setup)
    assert fixed.gradients == sum(weight.nbytes for weight in trained)
    assert fixed.weights == sum(weight.nbytes for weight in case.model.parameters())
    case.model.enable_input_require_grads()
    known = case.known()
    with Live(known) as live:
        hidden = case.model.base_model.model.model(**case.batch, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    full, case.setup = at_the_loss(case), setup
    estimate, half = at_the_loss(case), (method, masters) == ("lora", True)
    assert (sum_of(estimate) < sum_of(full)) == half, "fp32 adapters keep more than they save"
    assert sum_of(estimate) == pytest.approx(live.now, rel=0.05)


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "rounded"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weights_gradients_and_states_of_one_gpu(tmp_path: Path, dtype: str, optimizer: str, masters: bool) -> None:
    case = Case(tmp_path, "qwen3_vl", dtype, "sdpa")
    case.known()
    weights = list(case.model.parameters())
    kind: Any = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
    made = make_optimizer(kind, [{"params": weights}], {"lr": 1e-3}, masters=masters)
    made.step()
    gc.collect()
    kept = [tensor for state in made.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    fixed = states(case.shape, replace(case.setup, optimizer=optimizer, master_weights=masters))  # type: ignore[arg-type]
    assert fixed.weights == sum(weight.nbytes for weight in weights)
    assert fixed.gradients == sum(weight.grad.nbytes for weight in weights if weight.grad is not None)
    assert fixed.optimizer == sum(tensor.nbytes for tensor in kept if tensor.ndim)
    assert fixed.buffers == 0
