"""Model families: what differs between them, a folder each, and the fast and exact layout of records as tokens.

Takes a model folder's settings, records and media headers; gives token layouts, costs and batch contracts. Your own
family is a `Family` made of the names below: see docs/guides/extending.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.families.family import BatchContract as BatchContract
    from packtrain.families.family import Expansion as Expansion
    from packtrain.families.family import Family as Family
    from packtrain.families.family import ModuleNames as ModuleNames
    from packtrain.families.family import NoRule as NoRule
    from packtrain.families.family import ProcessorSettings as ProcessorSettings
    from packtrain.families.family import Rule as Rule
    from packtrain.families.family import Run as Run
    from packtrain.families.model_folder import resolve_model as resolve_model
    from packtrain.families.registry import register_family as register_family
    from packtrain.families.shape import Composition as Composition
    from packtrain.families.shape import Projector as Projector
    from packtrain.families.shape import VisionEncoder as VisionEncoder
    from packtrain.families.shape import VisionTraits as VisionTraits
    from packtrain.families.shape import square_image as square_image
    from packtrain.families.shape import two_layers as two_layers
    from packtrain.families.tiny import CHATML as CHATML
    from packtrain.families.tiny import CLIP_PIXELS as CLIP_PIXELS
    from packtrain.families.tiny import LLAMA_TOKENS as LLAMA_TOKENS
    from packtrain.families.tiny import TINY_VISION as TINY_VISION
    from packtrain.families.tiny import Id as Id
    from packtrain.families.tiny import TemplateSpec as TemplateSpec
    from packtrain.families.tiny import TinySpec as TinySpec
    from packtrain.families.tiny import text_config as text_config

__getattr__, __dir__, __all__ = lazy_names(__name__)
