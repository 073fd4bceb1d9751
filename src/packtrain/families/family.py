"""What a family declares: one `Family` for each of its model types, in the `__init__` of its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtrain.families.base import Rule
from packtrain.families.contracts import BatchContract
from packtrain.families.shape import Composition, Decoder
from packtrain.families.tiny.parts import TinySpec

SmallImage = Callable[[Any], Mapping[str, np.ndarray]]  # the model's config -> the arguments of get_image_features


@dataclass(frozen=True, kw_only=True)
class Family:
    """All that packtrain has to know of one model type; each part may be left out, and then its stage refuses it.

    rule         exact token costs. None: the processor is run for every record; a text model needs neither.
    contract     how samples are joined into a packed row. None: fine for text models, refused for those with media.
    shape        sizes and parameters, for predictions. None: read by the usual keys of a config, with a note.
    small_image  the least that the vision encoder takes, for ranks without media. Needed where media are trained.
    tiny         a small random model, as `tiny:MODEL_TYPE`.
    """

    model_type: str
    rule: type[Rule] | None = None
    contract: BatchContract | None = None
    refused: str = ""  # why its samples cannot be packed
    processors: tuple[str, ...] = ()  # classes of processors by which folders without a config.json are known
    image_processors: tuple[str, ...] = ()  # and of image processors that no other family has
    shape: Composition | Decoder | None = None
    small_image: SmallImage | None = None
    # "module:function" that computes on the host what the encoder would ask the GPU for (encoder, sizes) -> arguments.
    # It is imported with torch, when a model is there.
    image_sizes: str | None = None
    tiny: TinySpec | None = None
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # configs of real sizes, by name
    in_transformers: bool = True
