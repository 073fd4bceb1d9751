"""Random places of a local gzip file without storing its content: an index of points where decompression can begin."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.records.formats.compression import CUT_OFF, DAMAGED
from packtrain.records.shards.address import Identity, identity_of_open, open_raw
from packtrain.records.shards.cache_folder import CacheFault, NoRoom
from packtrain.records.shards.forward import decompressed
from packtrain.records.shards.shard_cache import ShardCache
from packtrain.records.span import CursorFile

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


class _Stored(CursorFile):
    """The compressed file for the package: kept open, since it crashes where a file that it opens for a read is gone.

    A file that ends early is an error here: the package would look for the rest without end.
    """

    def __init__(self, path: str, identity: Identity) -> None:
        self._path, self._file, self._size = path, open_raw(path), identity.size or 0
        if identity_of_open(self._file) != identity:
            self._file.close()
            raise OSError(f"{path}: the file has changed while it was opened")

    def size(self) -> int:
        return self._size

    def read_at(self, position: int, length: int) -> bytes:
        wanted = min(length, max(0, self._size - position))
        piece = os.pread(self._file.fileno(), wanted, position)
        if wanted and not piece:
            raise OSError(f"{self._path} ends at byte {position:,} of {self._size:,}")
        return piece

    def whole(self) -> bool:
        """Has the file still all of its bytes?"""
        return os.fstat(self._file.fileno()).st_size >= self._size

    def fileno(self) -> int:
        raise OSError("to be read through this object only")

    def close(self) -> None:
        self._file.close()
        super().close()


class IndexedGzip:
    """The content of a gzip file at any place. Its index is made in one pass, and kept in the cache if there is one."""

    path: str | None = None

    def __init__(self, path: str, identity: Identity, cache: ShardCache | None) -> None:
        self._path, self._identity = path, identity
        self._spacing = max(SPACING, (identity.size or 0) // MOST_POINTS)
        self._file: Any = None
        self._stored = _Stored(path, identity)
        try:
            self._begin(cache)
        except BaseException:
            self._stored.close()
            raise

    def _begin(self, cache: ShardCache | None) -> None:
        if cache is not None:
            try:
                ready = cache.made(self._path, KIND, self._index())
            except (NoRoom, CacheFault):
                pass
            else:
                try:
                    if self._file is None:
                        self._file = self._imported(ready.path)
                finally:
                    cache.release(ready)
                if self._file is None:
                    cache.drop(self._path, KIND)
        if self._file is None:
            self._build()

    def _imported(self, path: str) -> Any:
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
        """Close the file."""
        self._file.close()
        self._stored.close()

    def _open(self, **options: Any) -> Any:
        package = indexed_gzip()
        assert package is not None, "the caller has asked"
        return package.IndexedGzipFile(fileobj=self._stored, spacing=self._spacing, buffer_size=BUFFER, **options)

    def _build(self) -> None:
        """Go through the whole file; first on our own, since the package takes a cut-off file for a shorter one."""
        for _ in decompressed(self._path, self._identity, ()):
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
