"""What every package shares: frozen values, errors, files written whole, fingerprints; standard library and numpy only.

Takes nothing and knows no stage. Gives the values that stages hand each other (`Record`, `Cost`, `MediaLimits`), what
tells one kind of media from another (`MODALITIES`), and the errors that users see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.core.cache_root import cache_dir as cache_dir
    from packtrain.core.errors import ArtifactError as ArtifactError
    from packtrain.core.errors import ConfigError as ConfigError
    from packtrain.core.errors import DataError as DataError
    from packtrain.core.errors import PacktrainError as PacktrainError
    from packtrain.core.errors import RecordError as RecordError
    from packtrain.core.modality import MODALITIES as MODALITIES
    from packtrain.core.modality import Modality as Modality
    from packtrain.core.values import Cost as Cost
    from packtrain.core.values import LedgerEntry as LedgerEntry
    from packtrain.core.values import Media as Media
    from packtrain.core.values import MediaHeader as MediaHeader
    from packtrain.core.values import MediaLimits as MediaLimits
    from packtrain.core.values import MediaRef as MediaRef
    from packtrain.core.values import Message as Message
    from packtrain.core.values import Record as Record
    from packtrain.core.values import Text as Text

__getattr__, __dir__, __all__ = lazy_names(__name__)
