"""Formats of data files: which files a source has, how each is cut into units, and how entries are read from it.

Takes a `SourceSpec`; each format is a `Format`, which gives the units of a file and the raw entries of a unit. A broken
entry is a `RecordError` in its place, never an end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.records.formats.source_files import Format as Format
    from packtrain.records.formats.source_files import dataset_files as dataset_files

__getattr__, __dir__, __all__ = lazy_names(__name__)
