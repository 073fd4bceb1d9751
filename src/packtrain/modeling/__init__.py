"""Models made ready for packs: loading, trainable parts, attention, chunked loss, compiled layers, export.

Takes a model's folder and `ModelSettings` and gives a model of transformers whose trainable parts are those asked for;
`prepare_model` readies one that the user has loaded. `save_final` writes the weights alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.modeling.export import save_final as save_final
    from packtrain.modeling.load import load_model as load_model
    from packtrain.modeling.model_settings import ModelSettings as ModelSettings
    from packtrain.modeling.preparation import prepare_model as prepare_model

__getattr__, __dir__, __all__ = lazy_names(__name__)
