"""Small random models: `tiny:qwen3_vl` names one wherever a model is asked for. Families have them as data.

Vision geometry (patch, tile, merge, token counts) is that of real checkpoints, so that costs are realistic; only depth
and width are small.
"""

from packtrain.families.registry import tiny_families
from packtrain.families.tiny.folder import write

__all__ = ["tiny_families", "write"]
