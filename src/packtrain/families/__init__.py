"""Model families: what differs between them, a folder each, and the fast and exact layout of records as tokens.

Takes a model folder's settings, records and media headers; gives token layouts, costs and batch contracts. Your own
family is a `Family` made of the names below: see docs/guides/extending.md.
"""

from packtrain.core.values import MediaHeader, MediaLimits
from packtrain.families.base import Expansion, NoRule, ProcessorSettings, Rule, Run, Traits, refuse_limits, unsupported
from packtrain.families.contracts import BatchContract
from packtrain.families.family import Family
from packtrain.families.registry import register_family
from packtrain.families.shape import Composition, Projector, VisionEncoder, VisionTraits, square_image, two_layers
from packtrain.families.tiny.parts import Id, TinySpec
from packtrain.families.tiny.templates import TemplateSpec

__all__ = [
    "BatchContract",
    "Composition",
    "Expansion",
    "Family",
    "Id",
    "MediaHeader",
    "MediaLimits",
    "NoRule",
    "ProcessorSettings",
    "Projector",
    "Rule",
    "Run",
    "TemplateSpec",
    "TinySpec",
    "Traits",
    "VisionEncoder",
    "VisionTraits",
    "refuse_limits",
    "register_family",
    "square_image",
    "two_layers",
    "unsupported",
]
