"""Small random models of every family, as data: `tiny:qwen3_vl` names one wherever a model is asked for."""

from packtrain.families.tiny.folder import TINY_FAMILIES, write

__all__ = ["TINY_FAMILIES", "write"]
