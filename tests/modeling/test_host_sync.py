"""What the host computes ahead is what the model would compute, bit for bit."""

from __future__ import annotations

from typing import Any

import encoded
import pytest
import torch
from torch import Tensor

from packtrain.core.modality import GRIDS
from packtrain.modeling import host_sync
from packtrain.modeling.host_sync import add_to_tokens, avoid_host_sync
from packtrain.modeling.preparation import prepare_model

FAMILY = "qwen3_vl"


def ready() -> Any:
    model = encoded.fresh_model(FAMILY).train()
    prepare_model(model, attn_implementation="varlen")
    return model


def stepped(model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = encoded.loss_of(model, batch)
    loss.backward()
    return loss.detach(), encoded.gradients(model)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes on the host and pixels on a GPU, as far as the model can tell."""
    monkeypatch.setattr(host_sync, "_are_apart", lambda grid, rows: True)


@pytest.mark.contract
@pytest.mark.usefixtures("apart")
def test_a_step_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = ready(), encoded.packed(FAMILY, *encoded.samples(FAMILY))
    expected_loss, expected = stepped(model, batch)
    assert avoid_host_sync(model) == GRIDS
    assert avoid_host_sync(model) == GRIDS, "twice must be once"
    given: dict[str, Any] = {}
    model.model.language_model.register_forward_pre_hook(lambda _, args, kw: given.update(kw), with_kwargs=True)
    # The model must not compute it a second time: it would ask the GPU.
    from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

    for name in ("get_vision_interpolation_indices_and_weights", "get_vision_position_ids"):
        own = getattr(modeling, name)
        monkeypatch.setattr(modeling, name, _only_handed_over(own))
    loss, grads = stepped(model, batch)
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(grads[name], grad) for name, grad in expected.items())
    assert not any(name.startswith(("image_", "video_")) for name in given)


def _only_handed_over(own: Any) -> Any:
    def call(*args: Any, kwargs: dict[str, Any], **others: Any) -> Any:
        assert any(name in kwargs for name in ("interp_indices", "position_ids")), "computed by the model"
        return own(*args, kwargs=kwargs, **others)

    return call


def test_sizes_beside_the_pixels_are_left_alone() -> None:
    model, batch = ready(), encoded.packed(FAMILY, *encoded.samples(FAMILY))
    expected_loss, expected = stepped(model, batch)
    avoid_host_sync(model)
    given: dict[str, Any] = {}
    model.model.visual.register_forward_pre_hook(lambda _, args, kw: given.update(kw), with_kwargs=True)
    loss, grads = stepped(model, batch)
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(grads[name], grad) for name, grad in expected.items())
    assert "cu_seqlens" not in given


@pytest.mark.contract
@pytest.mark.parametrize("rows", [1, 3])
def test_features_are_added_where_their_tokens_stand(rows: int) -> None:
    torch.manual_seed(0)
    model = ready()
    mask = torch.rand(rows, 20) < 0.4
    hidden = torch.randn(rows, 20, 8, requires_grad=True)
    features = torch.randn(int(mask.sum()), 8, requires_grad=True)
    expected = model.model.language_model._deepstack_process(hidden, mask, features)
    found = add_to_tokens(hidden, mask, features)
    assert torch.equal(found, expected)
    weights = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), (hidden, features)),
        torch.autograd.grad((expected * weights).sum(), (hidden, features)),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.contract
@pytest.mark.parametrize("rows", [1, 3])
def test_features_are_put_where_their_tokens_stand(rows: int) -> None:
    torch.manual_seed(0)
    mask = (torch.rand(rows, 20) < 0.4)[..., None].expand(-1, -1, 8)
    embedded = torch.randn(rows, 20, 8, requires_grad=True)
    features = torch.randn(int(mask[..., 0].sum()), 8, requires_grad=True)
    expected = embedded.masked_scatter(mask, features)
    found = embedded.masked_scatter(mask.as_subclass(host_sync._TokenMask), features)
    assert type(found.grad_fn).__name__ != type(expected.grad_fn).__name__, "its gradient would ask the GPU"
    assert torch.equal(found, expected)
    weights = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), (embedded, features)),
        torch.autograd.grad((expected * weights).sum(), (embedded, features)),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.contract
@pytest.mark.usefixtures("apart")
def test_no_gradient_selects_by_a_mask() -> None:
    model, batch = ready(), encoded.packed(FAMILY, *encoded.samples(FAMILY))
    assert "MaskedScatterBackward0" in backward_names(encoded.loss_of(model, batch)), "what is looked for was there"
    avoid_host_sync(model)
    assert "MaskedScatterBackward0" not in backward_names(encoded.loss_of(model, batch))


def backward_names(loss: Tensor) -> set[str]:
    found, waiting = {}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = type(node).__name__
            waiting += [before for before, _ in node.next_functions]
    return set(found.values())


def test_other_models_are_left_alone() -> None:
    model = encoded.fresh_model("qwen2_5_vl")
    assert avoid_host_sync(model) == ()
    assert "get_placeholder_mask" not in vars(model.model)
    assert avoid_host_sync(encoded.fresh_model("llama")) == ()
