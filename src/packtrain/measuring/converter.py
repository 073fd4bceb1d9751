"""One raw entry in, one record out, as the request asks: the same when it is measured and when it is read to train."""

from __future__ import annotations

from collections import Counter

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import Record
from packtrain.families.registry import is_text_only
from packtrain.measuring.request import Request
from packtrain.records.media import MediaStore
from packtrain.records.schemas.formatting import load_formatting
from packtrain.records.schemas.to_record import to_record
from packtrain.records.schemas.unread import UnreadNames
from packtrain.records.source import Entry


class Filtered(RecordError):
    """A record that the user's own filters leave out."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__("filter", reason, detail)


class Converter:
    """Makes the records of one request, and knows where their media are."""

    def __init__(self, request: Request) -> None:
        self._request = request
        function = request.schema.formatting_func
        self._formatting = load_formatting(function)[0] if function else None
        self.unread = UnreadNames(strict=request.strict_columns)
        self.schemas: Counter[str] = Counter()  # what records were read as
        self._text_only = _text_only(request)
        self._stores = [
            MediaStore(
                spec.media_root,
                allow_outside_root=request.allow_outside_root,
                max_image_pixels=request.max_image_pixels,
            )
            for spec in request.specs
        ]

    def record(self, entry: Entry, source: int) -> Record:
        """The entry as a record, if the user's filters want it. Raises RecordError for one that cannot be used."""
        filters, name = self._request.filters, self._request.specs[source].name
        if filters.sources and name not in filters.sources:
            raise Filtered("source not selected", name)
        if entry.error is not None:
            raise entry.error
        record = to_record(
            entry,
            source=name,
            options=self._request.schema,
            formatting=self._formatting,
            text_only=self._text_only,
            unread=self.unread,
            schemas=self.schemas,
        )
        most = filters.max_images_per_sample
        if most is not None and (images := sum(medium.kind == "image" for medium in record.media())) > most:
            raise Filtered("more images than max_images_per_sample", f"{images} images")
        return record

    def store(self, source: int) -> MediaStore:
        """Where the media of one source are."""
        return self._stores[source]


def _text_only(request: Request) -> bool:
    try:
        return is_text_only(request.settings())
    except ConfigError:  # no model that we could read; whoever brings an encoder needs none
        return False
