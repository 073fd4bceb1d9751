"""Chat schemas: what one raw record means, as messages with typed parts."""

from packtrain.records.schemas.to_record import (
    SCHEMAS,
    SchemaOptions,
    load_formatting,
    recognise_schema,
    to_record,
)

__all__ = ["SCHEMAS", "SchemaOptions", "load_formatting", "recognise_schema", "to_record"]
