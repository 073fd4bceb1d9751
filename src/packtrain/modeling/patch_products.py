"""Patch embeddings as matrix products: encoders that get patches one by one call a convolution for each of them.

Where the kernel of a convolution is as large as its input, it is one product of matrices. Convolutions are slow at
that, in half precision above all. The module keeps its weights, its names and its results; only how they are computed
changes, and inputs of another size still take the convolution.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from packtrain.modeling.model_parts import model_parts
from packtrain.modeling.patches import is_on, put, set_back

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def multiply_patches(model: Any) -> int:
    """Compute a model's patch embeddings as products, and return how many modules that changed; idempotent."""
    vision = model_parts(model).vision
    found = [module for module in vision.modules() if _is_patchwise(module)] if vision is not None else []
    for module in found:
        before = module.__dict__.get("forward")
        module.forward = _Product(module)
        put(module, "patch_products", partial(set_back, module, "forward", before))
    return len(found)


def _is_patchwise(module: nn.Module) -> bool:
    """A convolution that takes pieces side by side and whole, not changed before."""
    return (
        isinstance(module, _CONVOLUTIONS)
        and tuple(module.kernel_size) == tuple(module.stride)
        and module.groups == 1
        and not any(module.padding)
        and set(module.dilation) == {1}
        and not is_on(module, "patch_products")
    )


class _Product:
    """The forward of one convolution."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._convolve = module.forward

    def __call__(self, pixels: Tensor) -> Tensor:
        module = self._module
        if tuple(pixels.shape[2:]) != tuple(module.kernel_size):
            return self._convolve(pixels)
        found = linear(pixels.flatten(1), module.weight.flatten(1), module.bias)
        return found.view(*found.shape, *(1 for _ in module.kernel_size))
