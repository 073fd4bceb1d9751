"""Chat schemas: what one raw record means, as messages with typed parts.

Takes a raw record (a dict from JSON or a table) and `SchemaOptions`, and gives a `Record`. `recognise_schema` tells the
schema from a record's columns; columns that none reads are refused by name where they could carry meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.records.schemas.converters import SCHEMAS as SCHEMAS
    from packtrain.records.schemas.converters import SchemaOptions as SchemaOptions
    from packtrain.records.schemas.converters import load_formatting as load_formatting
    from packtrain.records.schemas.converters import to_record as to_record
    from packtrain.records.schemas.recognise import recognise_schema as recognise_schema

__getattr__, __dir__, __all__ = lazy_names(__name__)
