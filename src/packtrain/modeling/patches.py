"""Every change that packtrain makes to the modules of a model: what, why, and until when.

A new release of transformers, peft or bitsandbytes is this list to go through. Modules keep which patches are on them,
so that each is put on once, can be taken off, and can be asked for. A test looks for changes that pass by this list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

_PLACE = "_packtrain_patches"  # where a module keeps them


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One kind of change, made by `packtrain.modeling.MODULE`."""

    module: str
    what: str
    why: str
    until: str  # when it can go


PATCHES: dict[str, Patch] = {
    "boundaries": Patch(
        module="attention",
        what="hooks that route a batch's cu_seq_lens around the vision encoder to the language model",
        why="encoders would take these arguments for those of their images",
        until="transformers separates the two",
    ),
    "rope": Patch(
        module="attention",
        what="a hook that resets the row length before `dynamic` rotary frequencies are computed",
        why="transformers keeps those of the longest row so far, so results would depend on earlier rows",
        until="frequencies follow the current row",
    ),
    "empty_media": Patch(
        module="vision",
        what="hooks that add 0 x encoder(small image) to batches without media",
        why="DDP and FSDP wait for encoders that a rank's batch does not call",
        until="never: it belongs to training on several ranks",
    ),
    "host_sync": Patch(
        module="host_sync",
        what="image sizes are computed on the host, and image tokens found without counting them (qwen3_vl)",
        why="avoids about twenty device syncs per step",
        until="transformers takes the sizes from the host",
    ),
    "patch_matmul": Patch(
        module="vision",
        what="patch embeddings are matmuls",
        why="a convolution per patch is slow, mostly in half precision",
        until="torch's convolutions or the encoders do so",
    ),
    "vision_batches": Patch(
        module="vision",
        what="the encoder's forward runs on chunks of images",
        why="all images together may not fit in memory (training.vision_batch_patches)",
        until="never: it is a setting",
    ),
    "chunked_loss": Patch(
        module="chunked_loss",
        what="the output embedding and loss_function are replaced while the loss is computed",
        why="logits of a whole row are the largest tensor of a step",
        until="transformers computes the loss in chunks, over supervised tokens only",
    ),
    "compiled": Patch(
        module="compiled",
        what="layers are compiled one by one, and the first gets a copy of its input",
        why="torch.compile of a whole model builds a graph per length, and recomputation may use another one",
        until="transformers compiles layers for training with checkpointing",
    ),
    "four_bits": Patch(
        module="load",
        what="bitsandbytes keeps 4-bit weights as they are on CPUs",
        why="in evaluation mode it repacks them to a form that the backward misreads",
        until="bitsandbytes changes them for inference alone",
    ),
    "adapter_precision": Patch(
        module="adapters",
        what="peft does not cast adapters that are loaded",
        why="half-precision ones would be replaced by tensors that the optimizer does not know",
        until="peft loads in place",
    ),
}


def put(module: nn.Module, name: str, undo: Callable[[], object], value: Any = None) -> None:
    """Note that a patch is on a module now; `value` is what `patch_on` gives."""
    assert name in PATCHES, f"{name} is not in the list of patches"
    module.__dict__.setdefault(_PLACE, {})[name] = (undo, value)


def is_on(module: nn.Module, name: str) -> bool:
    """Is a patch on this very module?"""
    return name in module.__dict__.get(_PLACE, {})


def patch_on(module: nn.Module, name: str) -> Any:
    """The value of a patch that is on a module; None where there is none."""
    return module.__dict__.get(_PLACE, {}).get(name, (None, None))[1]


def take_off(module: nn.Module, name: str) -> None:
    """The module without a patch; nothing where it is not there."""
    undo, _ = module.__dict__.get(_PLACE, {}).pop(name, (None, None))
    if undo is not None:
        undo()


def patches_of(model: nn.Module) -> dict[str, int]:
    """The patches that are on a model, with the number of modules."""
    return dict(Counter(name for module in model.modules() for name in module.__dict__.get(_PLACE, {})))


def set_back(module: nn.Module, name: str, before: Any) -> None:
    """An attribute as it was: of the object itself, or by `before` None that of its class."""
    module.__dict__.pop(name, None)
    if before is not None:
        setattr(module, name, before)
