"""A user's data -> records: file formats, chat schemas, media headers, archives, mixtures.

Takes a `SourceSpec` for each file, folder or name on the hub, with its schema, and gives units of work whose raw
entries become `Record`s: messages, media and what carries loss. Nothing is decoded here; of media only headers are
read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.records.open import iter_units as iter_units
    from packtrain.records.open import open_sources as open_sources
    from packtrain.records.open import read_unit as read_unit
    from packtrain.records.schemas.converters import SCHEMAS as SCHEMAS
    from packtrain.records.schemas.converters import SchemaOptions as SchemaOptions
    from packtrain.records.shards.data_files import CachedFiles as CachedFiles
    from packtrain.records.shards.data_files import LocalFiles as LocalFiles
    from packtrain.records.shards.shard_cache import ShardCache as ShardCache
    from packtrain.records.source import Entry as Entry
    from packtrain.records.source import SourceSpec as SourceSpec
    from packtrain.records.source import Unit as Unit

__getattr__, __dir__, __all__ = lazy_names(__name__)
