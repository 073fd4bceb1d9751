"""Layers that are recomputed for the backward pass meet the graph that computed them, whatever was compiled since."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import encoded
import pytest
import segment_kernel
import torch
from torch import Tensor

from packtrain.delivery.collate.collators import StaticShapes
from packtrain.modeling import compiled
from packtrain.modeling.chunked_loss import ChunkedLoss, Targets
from packtrain.modeling.preparation import prepare_model
from packtrain.modeling.vision import checkpoint_parts

pytestmark = pytest.mark.contract  # the order of graphs is a choice that torch keeps to itself
WINDOWS, SLIDING = "qwen2_5_vl", "gemma3_text"


class Compiler:
    """Graphs that keep by turns as little as possible and everything, and a record of which of them ran."""

    def __init__(self) -> None:
        self.made = 0
        self.ran: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        backward = lambda graph, _: make_boxed_func(graph)  # noqa: E731
        return aot_autograd(fw_compiler=self._forward, bw_compiler=backward, partition_fn=self._cut)(graph, inputs)

    def _cut(self, *args: Any, **kwargs: Any) -> Any:
        from functorch.compile import default_partition, min_cut_rematerialization_partition

        self.made += 1
        return (default_partition, min_cut_rematerialization_partition)[self.made % 2](*args, **kwargs)

    def _forward(self, graph: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        return make_boxed_func(partial(self._run, self.made, graph))

    def _run(self, number: int, graph: Any, *args: Any) -> Any:
        self.ran.append(number)
        return graph(*args)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """One that knows nothing yet, in a process that prefers what ran last, as torch does of itself."""
    segment_kernel.use(monkeypatch)
    torch._dynamo.reset()
    torch._C._dynamo.eval_frame._set_lru_cache(True)
    yield Compiler()
    torch._C._dynamo.eval_frame._set_lru_cache(True)
    torch._dynamo.reset()


def model_of(family: str) -> Any:
    """Both kinds of layers, by turns; windows that are smaller than images."""
    config = copy.deepcopy(encoded.fresh_model(family).config)
    if family == WINDOWS:
        config.vision_config.update({"depth": 3, "window_size": 56})
        assert config.vision_config.fullatt_block_indexes == [1]
    else:
        assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    torch.manual_seed(0)
    model = type(encoded.fresh_model(family))(config).train()
    prepare_model(model, attn_implementation="varlen")
    return model


def packs(family: str, *, constant: bool) -> list[Any]:
    """Of other numbers of samples, of patches and, where shapes are not constant, of tokens."""
    media = ("image",) if family == WINDOWS else ()
    made = [encoded.sample(family, *media, words=words, seed=words) for words in (5, 9, 14, 3)]
    members = [made[:2], made[3:], made]
    shapes = StaticShapes(tokens=max(sum(map(len, some)) for some in members) + 7) if constant else None
    return [encoded.packed(family, *some, static_shapes=shapes) for some in members]


def loss_of(model: Any, loss: ChunkedLoss, batch: Any) -> Tensor:
    with loss.using(Targets.of(batch["labels"])):
        return model(**batch).loss


def gradients(model: Any, *losses: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.stack(losses).sum().backward()
    return encoded.gradients(model)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() != set()
    for name, grad in wanted.items():
        assert float((found[name] - grad).abs().max()) <= 1e-5 * max(1.0, float(grad.abs().max())), name


def compile_recomputed(model: Any, compiler: Compiler, **options: Any) -> compiled.CompiledLayers:
    checkpoint_parts(model, language=True, vision=True)
    return compiled.compile_layers(model, backend=compiler, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "views", [pytest.param(False, marks=pytest.mark.more), True], ids=["one graph", "a graph for views"]
)
def test_blocks_with_windows(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, views: bool) -> None:
    """The first block is given a view. A graph is made for it, and the next, for what is none, would fit it as well."""
    if views:
        monkeypatch.setattr(compiled, "_without_view", lambda hidden: hidden)
    model, batches = model_of(WINDOWS), packs(WINDOWS, static_shapes=True)
    loss = ChunkedLoss.install(model, chunk=16)
    expected = [gradients(model, loss_of(model, loss, batch)) for batch in batches]
    assert compile_recomputed(model, compiler, language=False) == compiled.CompiledLayers(language=0, vision=3)
    for batch, wanted in zip(batches, expected, strict=True):
        value = loss_of(model, loss, batch)
        first = compiler.ran.copy()
        assert len(first) == 3
        assert (len(set(first)) > 1) == views
        compiler.ran.clear()
        found = gradients(model, value)
        assert compiler.ran == first[::-1]
        compiler.ran.clear()
        assert_same(found, wanted)


@pytest.mark.full
def test_layers_with_sliding_windows(compiler: Compiler) -> None:
    """Graphs for any length are made after the first pass, and would fit it as well, before it is recomputed."""
    model, batches = model_of(SLIDING), packs(SLIDING, static_shapes=False)[:2]
    assert len({batch["input_ids"].shape for batch in batches}) == 2
    loss = ChunkedLoss.install(model, chunk=16)
    wanted = gradients(model, *(loss_of(model, loss, batch) for batch in batches))
    assert compile_recomputed(model, compiler) == compiled.CompiledLayers(language=2, vision=0)
    values = [loss_of(model, loss, batch) for batch in batches]
    first = compiler.ran.copy()
    assert len(first) == 4
    assert not set(first[:2]) & set(first[2:]), "nothing was compiled meanwhile"
    compiler.ran.clear()
    found = gradients(model, *values)
    assert sorted(compiler.ran) == sorted(first)
    assert_same(found, wanted)
