"""Compiled layers compute what layers do, are compiled once for packs of all kinds, and leave the model as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import encoded
import pytest
import segment_kernel
import torch
from torch import Tensor

from packtrain.delivery.collate.collators import StaticShapes
from packtrain.modeling.chunked_loss import ChunkedLoss, Targets
from packtrain.modeling.compiled import CompiledLayers, compile_layers, undo_compile
from packtrain.modeling.preparation import prepare_model

FAMILY = "qwen3_vl"
MARGIN = 7  # tokens of padding in the fullest pack


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler that knows nothing yet, and the kernel's way through attention."""
    segment_kernel.use(monkeypatch)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def packs() -> list[Any]:
    """Packs of 1 to 5 samples, one of them without padding but for the margin, all of one shape."""
    made = [encoded.sample(FAMILY, "image", words=words, seed=seed) for seed, words in enumerate((5, 9, 14, 3, 20, 8))]
    members = [made[:3], made[3:5], made[1:2], made[2:6], made[:5]]
    tokens = max(sum(map(len, some)) for some in members) + MARGIN
    return [encoded.packed(FAMILY, *some, static_shapes=StaticShapes(tokens=tokens)) for some in members]


def ready(*, attention: str = "varlen") -> tuple[Any, ChunkedLoss]:
    model = encoded.fresh_model(FAMILY).train()
    prepare_model(model, attn_implementation=attention)
    return model, ChunkedLoss.install(model, chunk=16)


def trained(model: Any, loss: ChunkedLoss, batches: list[Any]) -> list[tuple[float, dict[str, Tensor]]]:
    found = []
    for batch in batches:
        model.zero_grad()
        with loss.using(Targets.of(batch["labels"])):
            value = model(**batch).loss
        value.backward()
        found.append((float(value), encoded.gradients(model)))
    return found


def assert_same(found: list[Any], expected: list[Any], allowed: float = 1e-5) -> None:
    for (loss, grads), (wanted_loss, wanted) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-6)
        assert grads.keys() == wanted.keys() != set()
        for name, grad in wanted.items():
            assert float((grads[name] - grad).abs().max()) <= allowed * max(1.0, float(grad.abs().max())), name


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_one_graph_serves_all_packs() -> None:
    """Packs differ in samples, in the longest of them and in patches; one graph of each kind of layer takes them."""
    (model, loss), batches = ready(), packs()
    expected = trained(model, loss, batches)
    eager = set(segment_kernel.CALLS)
    assert len({segments for _, segments in eager}) > 3
    assert compile_layers(model, backend="eager") == CompiledLayers(language=2, vision=2)
    segment_kernel.CALLS.clear()
    assert_same(trained(model, loss, batches[:1]), expected[:1])
    first = graphs()
    assert first == 2, "one for the decoder, one for the encoder, its first block included"
    assert not torch._dynamo.utils.counters["graph_break"]
    found = trained(model, loss, batches[1:])
    assert_same(found, expected[1:])
    # Newer kernels are chosen by whether any sample is longer than 128 tokens: one more graph at most.
    assert graphs() - first <= 1
    assert set(segment_kernel.CALLS) == eager, "the kernel must see what it sees without compiling"
    again = graphs()
    trained(model, loss, batches)
    assert graphs() == again


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpointing(reentrant: bool) -> None:
    (model, loss), batches = ready(), packs()[:2]
    expected = trained(model, loss, batches)
    calls = len(segment_kernel.CALLS)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    compile_layers(model, backend="eager")
    segment_kernel.CALLS.clear()
    assert_same(trained(model, loss, batches), expected)
    assert len(segment_kernel.CALLS) > calls, "layers must have been computed a second time"


def test_with_adapters() -> None:
    peft = pytest.importorskip("peft")
    model, loss = ready()
    loss.remove()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=r".*language_model.*\.(q|down)_proj", init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    loss, batches = ChunkedLoss.install(wrapped, chunk=16), packs()[:3]
    expected = trained(wrapped, loss, batches)
    assert compile_layers(wrapped, backend="eager") == CompiledLayers(language=2, vision=2)
    assert_same(trained(wrapped, loss, batches), expected)
    assert graphs() >= 2


def test_compiling_changes_no_names_and_can_be_undone() -> None:
    (model, loss), batches = ready(), packs()[:1]
    names = list(model.state_dict())
    compile_layers(model, backend="eager")
    layer = model.model.language_model.layers[0]
    compiled = layer._compiled_call_impl
    assert compiled is not None
    compile_layers(model, backend="eager")
    assert layer._compiled_call_impl is compiled, "twice must be once"
    assert list(model.state_dict()) == names
    undo_compile(model)
    trained(model, loss, batches)
    assert graphs() == 0


def test_parts_can_be_left_as_they_are() -> None:
    model, _ = ready()
    assert compile_layers(model, vision=False, backend="eager") == CompiledLayers(language=2, vision=0)
    assert all(block._compiled_call_impl is None for block in model.model.visual.blocks)
    undo_compile(model)
    assert compile_layers(model, language=False, backend="eager") == CompiledLayers(language=0, vision=2)


@pytest.mark.full
def test_any_length_without_static_shapes() -> None:
    (model, loss), made = ready(), [encoded.sample(FAMILY, words=words, seed=words) for words in (5, 9, 14, 30)]
    batches = [encoded.packed(FAMILY, *made[:count]) for count in (1, 2, 3, 4)]
    expected = trained(model, loss, batches)
    compile_layers(model, vision=False, static_shapes=False, backend="eager")
    assert_same(trained(model, loss, batches), expected)
    assert graphs() <= 2


@pytest.mark.contract
@pytest.mark.parametrize("family", [*encoded.VISION, *encoded.TEXT_ONLY])
def test_layers_of_every_family_are_found(family: str) -> None:
    model = encoded.fresh_model(family)
    config = model.config.get_text_config()
    found = compile_layers(model, backend="eager")
    assert found.language == config.num_hidden_layers
    assert (found.vision > 0) == (family in encoded.VISION)


@pytest.mark.full
@pytest.mark.contract
def test_real_code_computes_the_same() -> None:
    (model, loss), batches = ready(), packs()
    expected = trained(model, loss, batches)
    compile_layers(model)
    assert_same(trained(model, loss, batches), expected)
    assert graphs() >= 2
