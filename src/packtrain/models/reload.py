"""Weights of a folder -> a model that is there already: all of them, or an error.

Transformers saves some models under other names than their modules have (those of the model's first release), and only
`from_pretrained` translates them back. `load_state_dict(strict=False)`, by which Trainer resumes, leaves nearly every
weight of such a model as it was, without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from packtrain.core.errors import ArtifactError
from packtrain.models.pretrained import WeightsError, from_pretrained


def reload_weights(model: Any, folder: Path) -> None:
    """Set every weight of a model to what `save_pretrained` wrote into a folder."""
    try:
        saved = from_pretrained(type(model), str(folder), unused=False, dtype=_common(model), local_files_only=True)
        model.load_state_dict(saved.state_dict(), strict=True)
    except (WeightsError, RuntimeError) as error:
        raise ArtifactError(
            str(folder),
            got=" ".join(str(error).split()),
            expected="the weights of this model, all of them",
            fix="resume from another checkpoint, or start without resuming",
        ) from error


def _common(model: Any) -> torch.dtype:
    """In which nothing is rounded: what all weights have, or else fp32."""
    kinds = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else torch.float32
