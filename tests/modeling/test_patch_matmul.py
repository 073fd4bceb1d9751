"""Patch embeddings as products of matrices give what convolutions give."""

from __future__ import annotations

import encoded
import pytest
import torch

from packtrain.modeling.model_parts import model_parts
from packtrain.modeling.preparation import prepare_model
from packtrain.modeling.vision import use_patch_matmul


@pytest.mark.contract
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_model_computes_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoded.fresh_model(family).train()
    prepare_model(model, attn_implementation="sdpa")
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():  # Qwen3-VL's convolution has one, of zeros
        if "patch_embed" in name and "bias" in name:
            torch.nn.init.normal_(parameter)
    batch = encoded.packed(family, *encoded.samples(family))
    before = encoded.loss_of(model, batch)
    before.backward()
    expected = encoded.gradients(model)
    names = list(model.state_dict())
    assert use_patch_matmul(model) == 1
    assert use_patch_matmul(model) == 0, "twice must be once"
    assert list(model.state_dict()) == names
    model.zero_grad()
    for name in ("conv2d", "conv3d"):
        monkeypatch.setattr(torch.nn.functional, name, _must_not_be_called)
    after = encoded.loss_of(model, batch)
    after.backward()
    assert float(after) == pytest.approx(float(before), rel=1e-6)
    found = encoded.gradients(model)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert float((grad - expected[name]).abs().max()) <= 1e-5 * max(1.0, float(expected[name].abs().max())), name


def _must_not_be_called(*args: object, **kwargs: object) -> None:
    raise AssertionError("a convolution was computed")


def test_whole_pictures_still_take_the_convolution() -> None:
    """Encoders of tiles slide the same kernel over whole pictures."""
    model = encoded.fresh_model("llava")
    encoder = model_parts(model).vision
    assert encoder is not None
    embedding = next(module for module in encoder.modules() if isinstance(module, torch.nn.Conv2d))
    pixels = torch.randn(2, 3, *(3 * side for side in embedding.kernel_size))
    expected = embedding(pixels)
    assert use_patch_matmul(model) == 1
    assert torch.equal(embedding(pixels), expected)


def test_nothing_to_do_without_a_encoder() -> None:
    assert use_patch_matmul(encoded.fresh_model("llama")) == 0
