"""Where training reads its data files from: local ones directly, compressed and remote ones through the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.records.formats.compression import Compression, compression_of
from packtrain.records.shards.address import PAUSES, gone, identify, is_remote, local_path, open_raw
from packtrain.records.shards.forward import direct_plain
from packtrain.records.shards.gzip_index import KIND, IndexedGzip, indexed_gzip
from packtrain.records.shards.open_files import FreeHandle, Handle, HandleTable
from packtrain.records.shards.plain import Plain
from packtrain.records.shards.shard_cache import IN_MEMORY, ShardCache
from packtrain.records.span import Span


class LocalFiles:
    """Reads plain local files where they are, and local gzip files through an index where that can be made.

    Everything else goes through the cache; without one it is read forward, again from the beginning where needed.
    """

    def __init__(self, cache: ShardCache | None = None) -> None:
        self._cache = cache
        self._handles = HandleTable()
        self._cached: dict[str, bool] = {}  # does a file go through the cache?

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFiles, (self._cache,)

    def plain(self, file: str) -> AbstractContextManager[Plain]:
        """One data file; it stays readable until the block ends."""
        if self._cache is not None and self._goes_through_cache(file):
            return self._cache.open(file)
        return self._handles.use(file, self._acquire)

    def renew(self, file: str) -> bool:
        """Forget a copy of a file, or its index, so that it is fetched or made again; False where there is none."""
        if self._cache is None:
            return False
        if self._goes_through_cache(file):
            return self._cache.drop(file)
        self._handles.forget([file])
        return _compression(file) == "gzip" and self._cache.drop(local_path(file), KIND)

    def want(self, files: Sequence[str]) -> None:
        """Declare which files this process needs now and next, in order."""
        if self._cache is not None:
            self._cache.want(list(filter(self._is_cached, files)))

    def done(self, files: Iterable[str]) -> None:
        """Withdraw files."""
        if self._cache is not None:
            self._cache.done(list(filter(self._is_cached, files)))

    def close(self) -> None:
        """Close what is idle, and end fetching ahead."""
        self._handles.close()
        if self._cache is not None:
            self._cache.close()

    def _goes_through_cache(self, file: str) -> bool:
        """Decided once for each file."""
        found = self._cached.get(file)
        if found is None:
            found = self._cached[file] = is_remote(file) or self._copies(_compression(file))
        return found

    def _is_cached(self, file: str) -> bool:
        try:
            return self._goes_through_cache(file)
        except (RecordError, OSError):
            return False  # whoever reads it will be told

    def _copies(self, kind: Compression) -> bool:
        """Is a local file of this kind copied into the cache?"""
        return kind == "zstd" or (kind == "gzip" and indexed_gzip() is None)

    def _acquire(self, file: str) -> Handle:
        """A file that does not go through the cache."""
        kind = "zstd" if is_remote(file) else _compression(file)
        if kind == "none":
            raw = open_raw(file)
            span = Span(fd=raw.fileno(), size=identify(file).size or 0, path=local_path(file))
            return FreeHandle(span, raw.close)
        if kind == "gzip" and indexed_gzip() is not None:
            indexed = IndexedGzip(local_path(file), identify(file), self._cache)
            return FreeHandle(indexed, indexed.close)
        direct = direct_plain(file, identify(file), IN_MEMORY, PAUSES)
        return FreeHandle(direct, direct.close)


class CachedFiles(LocalFiles):
    """Reads every compressed or remote file through the cache; with `copy_local` plain local ones too (slow disks)."""

    def __init__(self, cache: ShardCache, *, copy_local: bool = False) -> None:
        super().__init__(cache)
        self._copy_local = copy_local

    def __reduce__(self) -> tuple[Any, ...]:
        return _cached_files, (self._cache, self._copy_local)

    def _copies(self, kind: Compression) -> bool:
        return self._copy_local or kind != "none"


def _cached_files(cache: ShardCache, copy_local: bool) -> CachedFiles:
    return CachedFiles(cache, copy_local=copy_local)


def _compression(file: str) -> Compression:
    """How a local file is compressed, by its first bytes."""
    try:
        with open_raw(file) as raw:
            return compression_of(raw.read(4))
    except FileNotFoundError as error:
        raise gone(file, error) from error
