"""One record -> one sample as the model will see it: ids, labels, positions, pixels.

Text is laid out and tokenized by the rule that measured it; pixels come from the model's own processors.

    text     <s>user: <image>what?  assistant: a cat</s>      each run of media tokens is written once
    ids       1  2   [9 9 9 9] 3     4         5 6  7         and then repeated
    labels    -  -    - - - -  -     -         5 6  7         never the first token, never media

Tokens that are cached are taken from there, if record and media are still the ones that they were made from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import Media, MediaHeader, Record
from packtrain.delivery.encode.decode import Decoded, decode_frames, decode_image, media_header
from packtrain.delivery.encode.encoded_sample import IGNORED, EncodedSample, VisionCounts
from packtrain.delivery.encode.expected import Expected, require_as_planned
from packtrain.delivery.encode.model_config import model_contract
from packtrain.delivery.encode.pixels import MediaProcessor
from packtrain.delivery.encode.positions import Positions
from packtrain.delivery.encode.sample_tokens import SampleTokens, expansions_code, record_code
from packtrain.families.encoder import RecordEncoder
from packtrain.families.family import BatchContract, Expansion
from packtrain.families.registry import load_rule
from packtrain.measuring.request import Request
from packtrain.records.media import MediaStore

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Decoded", "Expected", "SampleEncoder"]


class CachedTokens(Protocol):
    """Tokens of the rows of a cost table. It must pickle."""

    def tokens(self, row: int) -> SampleTokens | None:
        """The text side of one row's sample; None where it is not kept."""
        ...


class SampleEncoder:
    """Encodes records for one model. It pickles as what it was made from, and loads processors when media ask for them.

    `measured_settings` are the processor's settings as the cost table has them; they name what has changed since.
    """

    def __init__(
        self,
        request: Request,
        *,
        measured_settings: Mapping[str, Any] | None = None,
        cached: CachedTokens | None = None,
        contract: BatchContract | None = None,
    ) -> None:
        self.request = request
        self.cached = cached  # tokens of the rows that samples are encoded for; the same bits with and without
        self._measured_settings = measured_settings
        self._settings = settings = request.settings()
        self.contract: BatchContract = contract or model_contract(settings)
        family = load_rule(settings, request.limits)
        if family is None:
            raise ConfigError(
                settings.folder,
                got=f"{settings.model_type} with a processor whose costs are only known by running it",
                expected="the family's published image and video processors, with resizing",
                fix="change the processor's settings, then measure and pack again",
            )
        self._family = family
        self._text = RecordEncoder(settings, family, loss_on=request.loss_on, add_eos=request.add_eos)
        self._positions = Positions(settings.folder, self.contract)
        self._processor: MediaProcessor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.request, self._measured_settings, self.cached, self.contract)

    @property
    def pad_id(self) -> int:
        """The id to fill up rows with: the tokenizer's own, else its end token."""
        tokenizer, tokens = self._text.tokenizer, self._settings.special_tokens
        ids = (tokenizer.id_of(tokens[name]) for name in ("pad_token", "eos_token") if name in tokens)
        return next((found for found in ids if found is not None), 0)

    def encode(
        self,
        record: Record,
        store: MediaStore,
        *,
        row: int = -1,
        expected: Expected | None = None,
        start: int = 0,
        tokens: int = -1,
    ) -> EncodedSample:
        """One sample, or `tokens` of it from `start` on (-1: all that follow).

        Raises RecordError where it can never be encoded, OSError where reading it failed, DriftError where it is not
        what was planned.
        """
        decoded = self.decode_media(record, store) if start == 0 else self._headers(record, store)
        return self.assemble(record, decoded, row=row, expected=expected, start=start, tokens=tokens)

    def warm_up(self) -> None:
        """Load the media processors and the model's shell now instead of with the first medium."""
        self._media()
        self._positions.warm_up()

    # ---- media

    def decode_media(self, record: Record, store: MediaStore) -> tuple[Decoded, ...]:
        """The pixels of a record's media, in order."""
        return tuple(self._decode(medium, store) for medium in record.media())

    def frame_indices(self, header: MediaHeader) -> tuple[int, ...]:
        """The frames of a video that the model is shown."""
        self._text.layouter.parts.expansion(header, 0)  # refuses what cannot be sampled
        return tuple(self._media().frame_indices(header))

    def _decode(self, medium: Media, store: MediaStore) -> Decoded:
        if medium.kind == "image":
            image = decode_image(store, medium.ref)
            if (size := self._text.layouter.parts.resized("image", medium.limits)) is not None:
                image = image.resize(size[::-1])
            return Decoded.image(image, medium.ref.name, medium.limits)
        if medium.kind not in self._family.placeholders:
            raise RecordError("family", f"this model takes no {medium.kind}")
        header = media_header(store, medium)
        indices = self.frame_indices(header)
        frames = decode_frames(store, medium.ref, indices)
        return Decoded(header=header, pixels=frames, indices=indices, name=medium.ref.name)

    def _headers(self, record: Record, store: MediaStore) -> tuple[Decoded, ...]:
        """For a piece after the first: its media count, but are not shown."""
        return tuple(Decoded(header=media_header(store, m), name=m.ref.name) for m in record.media())

    def _media(self) -> MediaProcessor:
        if self._processor is None:
            self._processor = MediaProcessor(self._settings, self._text.layouter.parts, self.contract)
        return self._processor

    # ---- samples

    def assemble(
        self,
        record: Record,
        decoded: Sequence[Decoded],
        *,
        row: int = -1,
        expected: Expected | None = None,
        start: int = 0,
        tokens: int = -1,
    ) -> EncodedSample:
        """As `encode`, from media that are decoded already, or synthetic."""
        import torch

        known, expansions = self._text_side(record, [medium.header for medium in decoded], row)
        ids, labels, kinds = known.expanded()
        if expected is not None:
            found = Expected(
                tokens=len(ids),
                patches=sum(expansion.patches for expansion in expansions),
                supervised_tokens=int((labels != IGNORED).sum()),
                images=sum(medium.header.kind == "image" for medium in decoded),
                videos=sum(medium.header.kind == "video" for medium in decoded),
            )
            require_as_planned(
                record,
                found=found,
                planned=expected,
                media=decoded,
                settings=self._settings,
                measured_settings=self._measured_settings,
            )
        end = len(ids) if tokens < 0 else start + tokens
        assert 0 <= start < end <= len(ids), f"piece {start}:{end} of {len(ids)} tokens of {record.id}"
        shown = decoded if start == 0 else ()
        assert not kinds[end if start == 0 else start :].any(), f"piece {start}:{end} of {record.id} cuts its media"
        labels[start] = IGNORED
        input_ids, token_kinds = torch.from_numpy(ids[start:end]), torch.from_numpy(kinds[start:end])
        media: Mapping[str, Tensor] = {}
        if shown:
            media = self._media().tensors(shown, expansions, known.run_kinds)
        return EncodedSample(
            id=record.id,
            row=row,
            input_ids=input_ids,
            labels=torch.from_numpy(labels[start:end]),
            position_ids=self._positions.of(input_ids, token_kinds, media),
            token_kinds=token_kinds,
            media=media,
            num_images=sum(medium.header.kind == "image" for medium in shown),
            num_videos=sum(medium.header.kind == "video" for medium in shown),
            vision=VisionCounts.sum_of(map(_counted, expansions if shown else ())),
            first=start == 0,
        )

    def text_tokens(self, record: Record, headers: Sequence[MediaHeader]) -> SampleTokens:
        """The text side of a record whose media have these headers."""
        return self._tokenized(record, headers, record_code(record))[0]

    def _text_side(
        self, record: Record, headers: Sequence[MediaHeader], row: int
    ) -> tuple[SampleTokens, Sequence[Expansion]]:
        """Tokens and expansions; tokenized now where they are not cached, or record or media have become others."""
        known = self.cached.tokens(row) if self.cached is not None and row >= 0 else None
        code = record_code(record)
        if known is not None and known.record == code:
            expansions = self._text.layouter.expansions(headers)
            if known.media == expansions_code(expansions):
                return known, expansions
        return self._tokenized(record, headers, code)

    def _tokenized(
        self, record: Record, headers: Sequence[MediaHeader], code: int
    ) -> tuple[SampleTokens, Sequence[Expansion]]:
        if record.tokens is not None:
            self._text.require_usable(record.tokens)
            return SampleTokens.of_ids(record.tokens, code), ()
        layout = self._text.layout(record, headers)
        return SampleTokens.of(layout, self._text.tokenizer, code), layout.expansions


def _counted(expansion: Expansion) -> VisionCounts:
    """Of one medium: its pictures are of one size."""
    return VisionCounts(
        frames=expansion.frames,
        tiles=expansion.patches // expansion.max_patches if expansion.max_patches else 0,
        patches=expansion.patches,
        squared_patches=expansion.patches * expansion.max_patches,
    )


def _again(
    request: Request,
    measured_settings: Mapping[str, Any] | None,
    cached: CachedTokens | None,
    contract: BatchContract,
) -> SampleEncoder:
    return SampleEncoder(request, measured_settings=measured_settings, cached=cached, contract=contract)
