"""Where training reads its data files from: local ones directly, compressed and remote ones through the cache."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.core.retries import PAUSES
from packtrain.records.shards.address import (
    Identity,
    identify,
    identity_of_open,
    is_remote,
    local_path,
    missing_file,
    open_raw,
)
from packtrain.records.shards.cache_folder import CacheFault, NoRoom
from packtrain.records.shards.decompression import (
    CUT_OFF,
    DAMAGED,
    Compression,
    decompress,
    detect_compression,
    direct_plain,
)
from packtrain.records.shards.open_files import Handle, HandleTable
from packtrain.records.shards.shard_cache import IN_MEMORY, ShardCache
from packtrain.records.span import Plain, PlainFile, Span

KIND = "gzip index of "
SPACING = 4 << 20  # bytes of content between two points: each read decompresses half of that on average
MOST_POINTS = 1 << 10  # per file as compressed; a point takes up to 32 KiB
BUFFER = 1 << 16


def indexed_gzip() -> Any | None:
    """The package that makes such indices, where it is installed."""
    try:
        import indexed_gzip as package
    except ImportError:
        return None
    return package


class _Compressed:
    """The stored bytes of a file for the package: kept open, since it crashes where a file is gone that it opens again.

    A file that ends early is an error here: the package would look for the rest without end.
    """

    path: str | None = None

    def __init__(self, path: str, identity: Identity) -> None:
        self._path, self._file, self.size = path, open_raw(path), identity.size or 0
        if identity_of_open(self._file) != identity:
            self._file.close()
            raise OSError(f"{path}: the file has changed while it was opened")

    def read_at(self, position: int, length: int) -> bytes:
        wanted = min(length, max(0, self.size - position))
        piece = os.pread(self._file.fileno(), wanted, position)
        if wanted and not piece:
            raise OSError(f"{self._path} ends at byte {position:,} of {self.size:,}")
        return piece

    def whole(self) -> bool:
        """Has the file still all of its bytes?"""
        return os.fstat(self._file.fileno()).st_size >= self.size

    def close(self) -> None:
        self._file.close()


class IndexedGzip:
    """The content of a gzip file at any place. Its index is made in one pass, and kept in the cache if there is one."""

    path: str | None = None

    def __init__(self, path: str, identity: Identity, cache: ShardCache | None) -> None:
        self._path, self._identity = path, identity
        self._spacing = max(SPACING, (identity.size or 0) // MOST_POINTS)
        self._file: Any = None
        self._stored = _Compressed(path, identity)
        self._seekable = PlainFile(self._stored)
        try:
            self._begin(cache)
        except BaseException:
            self._stored.close()
            raise

    def _begin(self, cache: ShardCache | None) -> None:
        if cache is not None:
            try:
                ready = cache.derive(self._path, KIND, self._index())
            except (NoRoom, CacheFault):
                pass
            else:
                try:
                    if self._file is None:
                        self._file = self._import_index(ready.path)
                finally:
                    cache.release(ready)
                if self._file is None:
                    cache.drop(self._path, KIND)
        if self._file is None:
            self._build()

    def _import_index(self, path: str) -> Any:
        """The file with an index that was kept; None where that is not whole: the package would trust its offsets."""
        with open(path, "rb") as kept:
            checksum, index = kept.read(4), kept.read()
        if zlib.crc32(index).to_bytes(4, "little") != checksum:
            return None
        file = self._open()
        file.import_index(fileobj=io.BytesIO(index))
        return file

    def read_at(self, position: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only where the file ends."""
        if not self._stored.whole():
            raise RecordError("read", CUT_OFF, f"{self._path} has fewer bytes than when it was opened")
        try:
            return self._file.pread(max(0, length), position)  # type: ignore[no-any-return]
        except EOFError:
            return b""

    def close(self) -> None:
        self._file.close()
        self._stored.close()

    def _open(self, **options: Any) -> Any:
        package = indexed_gzip()
        assert package is not None, "the caller has asked"
        return package.IndexedGzipFile(fileobj=self._seekable, spacing=self._spacing, buffer_size=BUFFER, **options)

    def _build(self) -> None:
        """Go through the whole file; first on our own, since the package takes a cut-off file for a shorter one."""
        for _ in decompress(self._path, self._identity, ()):
            pass
        file = self._open(skip_crc_check=True)
        try:
            file.build_full_index()
        except OSError:
            file.close()
            raise
        except Exception as error:  # its own errors have no common class
            file.close()
            raise RecordError("read", DAMAGED, f"{self._path}: {error}") from error
        self._file = file

    def _index(self) -> Iterator[bytes]:
        """The index as the blocks of a file."""
        self._build()
        stored = io.BytesIO()
        self._file.export_index(fileobj=stored)
        yield zlib.crc32(stored.getvalue()).to_bytes(4, "little") + stored.getvalue()


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
        if self._cache is not None:
            self._cache.done(list(filter(self._is_cached, files)))

    def close(self) -> None:
        """Close what is idle, and end fetching ahead."""
        self._handles.close()
        if self._cache is not None:
            self._cache.close()

    def _goes_through_cache(self, file: str) -> bool:
        """Decided once for each file."""
        if file not in self._cached:
            self._cached[file] = is_remote(file) or self._copies(_compression(file))
        return self._cached[file]

    def _is_cached(self, file: str) -> bool:
        try:
            return self._goes_through_cache(file)
        except (RecordError, OSError):
            return False  # reading it raises the error

    def _copies(self, kind: Compression) -> bool:
        """Is a local file of this kind copied into the cache?"""
        return kind == "zstd" or (kind == "gzip" and indexed_gzip() is None)

    def _acquire(self, file: str) -> Handle:
        """A file that does not go through the cache."""
        kind = "zstd" if is_remote(file) else _compression(file)
        if kind == "none":
            raw = open_raw(file)
            span = Span(fd=raw.fileno(), size=identify(file).size or 0, path=local_path(file))
            return Handle(span, raw.close)
        if kind == "gzip" and indexed_gzip() is not None:
            indexed = IndexedGzip(local_path(file), identify(file), self._cache)
            return Handle(indexed, indexed.close)
        direct = direct_plain(file, identify(file), IN_MEMORY, PAUSES)
        return Handle(direct, direct.close)


class CachedFiles(LocalFiles):
    """Reads every compressed or remote file through the cache; with `copy_local` plain local ones too (slow disks)."""

    def __init__(self, cache: ShardCache, *, copy_local: bool = False) -> None:
        super().__init__(cache)
        self._copy_local = copy_local

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(CachedFiles, copy_local=self._copy_local), (self._cache,)

    def _copies(self, kind: Compression) -> bool:
        return self._copy_local or kind != "none"


def _compression(file: str) -> Compression:
    """The compression of a local file, by its first bytes."""
    try:
        with open_raw(file) as raw:
            return detect_compression(raw.read(4))
    except FileNotFoundError as error:
        raise missing_file(file, error) from error
