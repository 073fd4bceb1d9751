"""Every change that packtrain makes to the modules of a model, and to torch in its process: what, why, until when.

A new release of transformers, peft, bitsandbytes or torch is this list to go through. Modules keep which patches are on
them, so that each is put on once, can be taken off, and can be asked for. Tests look for changes that pass by this
list, for releases newer than those it was last checked against, and for patches that upstream no longer needs.
"""

from __future__ import annotations

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
    against: str  # the newest release that it was checked against: "PACKAGE VERSION"
    until: str | None  # when it can go, as a test can see it in upstream's source; None: it is ours, and stays


TRANSFORMERS, PEFT, BITSANDBYTES, TORCH = "transformers 5.22", "peft 0.21", "bitsandbytes 0.50", "torch 2.15"

PATCHES: dict[str, Patch] = {
    "boundaries": Patch(
        module="attention",
        what="hooks that route a batch's cu_seq_lens around the vision encoder to the language model",
        why="encoders would take these arguments for those of their images",
        against=TRANSFORMERS,
        until="transformers no longer gives encoders' attention the language model's cu_seq_lens_q",
    ),
    "rope": Patch(
        module="attention",
        what="a hook that resets the row length before `dynamic` rotary frequencies are computed",
        why="transformers keeps those of the longest row so far, so results would depend on earlier rows",
        against=TRANSFORMERS,
        until="transformers keeps no longest length of a rotary embedding",
    ),
    "empty_media": Patch(
        module="vision",
        what="hooks that add 0 x encoder(small image) to batches without media",
        why="DDP and FSDP wait for encoders that a rank's batch does not call",
        against=TRANSFORMERS,
        until=None,
    ),
    "host_sync": Patch(
        module="host_sync",
        what="for families with `image_sizes` they are computed on the host, and image tokens found without counting",
        why="avoids about twenty device syncs per step",
        against=TRANSFORMERS,
        until="transformers takes image sizes and the places of image tokens from the host",
    ),
    "checkpointing": Patch(
        module="vision",
        what="gradient_checkpointing and its function are set part by part",
        why="transformers turns it on for the whole model, and draws a frozen encoder into the backward pass",
        against=TRANSFORMERS,
        until="transformers turns gradient checkpointing on for a part of a model",
    ),
    "patch_matmul": Patch(
        module="vision",
        what="patch embeddings are matmuls",
        why="a convolution per patch is slow, mostly in half precision",
        against=TRANSFORMERS,
        until="transformers' patch embeddings are no convolutions",
    ),
    "vision_batches": Patch(
        module="vision",
        what="the encoder's forward runs on chunks of images",
        why="all images together may not fit in memory (training.vision_batch_patches)",
        against=TRANSFORMERS,
        until=None,
    ),
    "chunked_loss": Patch(
        module="chunked_loss",
        what="the output embedding and loss_function are replaced while the loss is computed",
        why="logits of a whole row are the largest tensor of a step",
        against=TRANSFORMERS,
        until="the loss of transformers takes hidden states",
    ),
    "compiled": Patch(
        module="compiled",
        what="layers are compiled one by one, and the first gets a copy of its input",
        why="torch.compile of a whole model builds a graph per length, and recomputation may use another one",
        against=TRANSFORMERS,
        until="transformers compiles its layers one by one",
    ),
    "four_bits": Patch(
        module="load",
        what="bitsandbytes keeps 4-bit weights as they are on CPUs",
        why="in evaluation mode it repacks them to a form that the backward misreads",
        against=BITSANDBYTES,
        until="bitsandbytes no longer repacks layers on CPUs",
    ),
    "adapter_precision": Patch(
        module="adapters",
        what="peft does not cast adapters that are loaded",
        why="half-precision ones would be replaced by tensors that the optimizer does not know",
        against=PEFT,
        until="peft no longer casts adapters that it loads",
    ),
}

# For the whole process, and not taken off: by the function that makes them.
PROCESS_PATCHES: dict[str, Patch] = {
    "_mark_longest_dynamic": Patch(
        module="compiled",
        what="the length of the longest sample is in torch.compiler.config.dynamic_sources",
        why="arguments that are numbers can be marked as dynamic by their names only",
        against=TORCH,
        until="torch marks numbers as dynamic in a call",
    ),
    "_try_graphs_in_order": Patch(
        module="compiled",
        what="of a layer's compiled graphs the first that fits is taken, not the one used last",
        why="which graph runs, and so rounding, would depend on the batches before",
        against=TORCH,
        until="torch takes the order as an option of compile",
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


def set_back(module: nn.Module, name: str, before: Any) -> None:
    """An attribute as it was: of the object itself, or by `before` None that of its class."""
    module.__dict__.pop(name, None)
    if before is not None:
        setattr(module, name, before)
