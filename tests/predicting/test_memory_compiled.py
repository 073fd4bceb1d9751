"""The memory model beside what compiled layers really keep: layers of real width, compiled without their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from packtrain.families.registry import known_config
from packtrain.modeling import varlen
from packtrain.modeling.adapters import set_trainable
from packtrain.modeling.compiled import compile_layers
from packtrain.modeling.model_parts import model_parts
from packtrain.modeling.model_settings import ModelSettings
from packtrain.modeling.preparation import prepare_model
from packtrain.predicting.memory_parts import language_layer, vision_layer
from packtrain.predicting.shapes import shape_from_config
from packtrain.predicting.values import Load, TrainingSetup
from packtrain.training.trial import build

TOKENS, SIDE = 256, 16
PARTITIONER = "aot_eager_decomp_partition"  # decides what is kept as inductor does, and generates no code


@torch.library.custom_op("packtrain_tests::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])


@torch.library.custom_op("packtrain_tests::attend_back", mutates_args=())
def attend_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@attend_back.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output)


def _back(ctx: Any, grad: Tensor, _: Any) -> Any:
    return (*attend_back(grad, *ctx.saved_tensors), None)


attend.register_autograd(_back, setup_context=_keep)


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in that keeps what a flash kernel keeps."""
    monkeypatch.setattr(varlen, "has_kernel", lambda *_: True)
    monkeypatch.setattr(varlen, "_kernel", lambda q, k, v, ends, *_: attend(q, k, v, ends)[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    torch.set_num_threads(threads)


def shallow(name: str) -> dict[str, Any]:
    """The known shape with two layers and few words."""
    config = dict(known_config(name))
    few = {"num_hidden_layers": 2, "vocab_size": 1000}
    if "vision_config" not in config:
        return {**config, **few}
    tokens = {key: 900 + at for at, key in enumerate(key for key in config if key.endswith("_token_id"))}
    vision = {**config["vision_config"], "depth": 2}
    if "deepstack_visual_indexes" in vision:
        vision["deepstack_visual_indexes"] = []
    return {**config, **tokens, "text_config": {**config["text_config"], **few}, "vision_config": vision}


def kept_by_layers(model: Any, batch: dict[str, Any]) -> dict[str, int]:
    """Bytes that autograd keeps, by the layer that ran; parameters and buffers do not count."""
    inner = model_parts(model).inner
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    running, found = [""], dict[int, tuple[str, Tensor]]()
    for name, module in inner.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: running.append(name))
        module.register_forward_hook(lambda *_: (running.pop(), None)[1])

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known:
            found.setdefault(tensor.untyped_storage()._cdata, (running[-1], tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        inner(**batch)
    total: dict[str, int] = {}
    for name, tensor in found.values():
        total[name] = total.get(name, 0) + tensor.untyped_storage().nbytes()
    return total


@pytest.mark.full
@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "method", "masters"),
    [
        ("qwen3-vl-2b", "full", True),
        ("llama-1b", "full", True),
        *(
            pytest.param(*case, marks=pytest.mark.more)
            for case in (
                ("qwen3-vl-2b", "lora", True),
                ("qwen3-vl-2b", "lora", False),
                ("qwen2.5-vl-3b", "full", True),
            )
        ),
    ],
)
def test_what_compiled_layers_keep(name: str, method: str, masters: bool) -> None:
    config = shallow(name)
    model = build(config, torch.device("cpu"), torch.bfloat16)
    prepare_model(model, attn_implementation="varlen")
    setup = TrainingSetup(method=method, compiled=True, master_weights=masters)  # type: ignore[arg-type]
    chosen = ModelSettings(name=name, method=setup.method, lora_rank=16)
    model = set_trainable(model, chosen, half_adapters=setup.half_adapters)
    shape = shape_from_config(config)
    batch: dict[str, Any] = {"input_ids": torch.randint(3, 800, (1, TOKENS)), "use_cache": False}
    positions = torch.arange(TOKENS)
    batch["position_ids"] = positions[None] if shape.vision is None else positions.expand(4, 1, -1)
    seen = shape.vision is not None and method == "full"  # an encoder takes as long to compile as a decoder
    if shape.vision is not None and seen:
        batch["input_ids"][:, 1 : 1 + SIDE * SIDE // 4] = config["image_token_id"]
        batch["pixel_values"] = torch.randn(SIDE * SIDE, shape.vision.patch_elements, dtype=torch.bfloat16)
        batch["image_grid_thw"] = torch.tensor([[1, SIDE, SIDE]])
    assert compile_layers(model, backend=PARTITIONER).language == 2
    kept = kept_by_layers(model, batch)
    load = Load(tokens=TOKENS, squared_tokens=TOKENS**2, longest=TOKENS)
    decoder = next(size for layer, size in kept.items() if layer.endswith("layers.1"))
    assert language_layer(shape, setup, load).saved == pytest.approx(decoder, rel=0.03)
    if shape.vision is not None and seen:
        encoder = kept["visual.blocks.1"]
        assert vision_layer(shape, shape.vision, setup, SIDE * SIDE).saved == pytest.approx(encoder, rel=0.03)
