"""Data files as plain bytes, wherever they are: local, compressed, remote, through a cache with a budget.

Takes a path or URL and gives any span of its content: `LocalFiles` from the disk, `CachedFiles` through a `ShardCache`,
which fetches a remote or compressed file once per machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.records.shards.data_files import CachedFiles as CachedFiles
    from packtrain.records.shards.data_files import LocalFiles as LocalFiles
    from packtrain.records.shards.shard_cache import ShardCache as ShardCache

__getattr__, __dir__, __all__ = lazy_names(__name__)
