"""One record -> one sample as the model will see it: ids, labels, positions, pixels.

Text is laid out and tokenized by the rule that measured it; pixels come from the model's own processors.

    text     <s>user: <image>what?  assistant: a cat</s>      each run of media tokens is written once
    ids       1  2   [9 9 9 9] 3     4         5 6  7         and then repeated
    labels    -  -    - - - -  -     -         5 6  7         never the first token, never media

Tokens that are cached are taken from there, if record and media are still the ones that they were made from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from packtrain.core.errors import DriftError, RecordError, require
from packtrain.core.fingerprint import differences
from packtrain.core.modality import count_media
from packtrain.core.values import Media, MediaHeader, Record
from packtrain.delivery.encode.decode import Decoded, decode_frames, decode_image, media_header
from packtrain.delivery.encode.encoded_sample import IGNORED, EncodedSample, SampleCounts, VisionCounts
from packtrain.delivery.encode.from_transformers import model_contract
from packtrain.delivery.encode.pixels import MediaProcessor, Positions
from packtrain.delivery.encode.sample_tokens import SampleTokens, sample_key
from packtrain.families.encoder import RecordEncoder
from packtrain.families.family import BatchContract, Expansion, ProcessorSettings
from packtrain.families.registry import load_rule
from packtrain.families.tokenizer import LightTokenizer
from packtrain.measuring.request import Request, settings_state
from packtrain.records.media import MediaStore

if TYPE_CHECKING:
    from torch import Tensor

    from packtrain.delivery.encode.token_cache import TokenTable


__all__ = ["Decoded", "SampleEncoder"]


class SampleEncoder:
    """Encodes records for one model. It pickles as what it was made from, and loads processors when media ask for them.

    `measured_settings` are the processor's settings as the cost table has them; they name what has changed since.
    """

    def __init__(
        self,
        request: Request,
        *,
        measured_settings: Mapping[str, Any] | None = None,
        cached: TokenTable | None = None,
        contract: BatchContract | None = None,
    ) -> None:
        self.request = request
        self.cached = cached  # tokens of the rows that samples are encoded for; the same bits with and without
        self._measured_settings = measured_settings
        self._settings = settings = request.settings()
        self.contract: BatchContract = contract or model_contract(settings)
        family = load_rule(settings, request.limits)
        assert family is not None, "`sample_encoder` chooses the processor for models without a rule"
        self._family = family
        self._text = RecordEncoder(settings, family, loss_on=request.loss_on, add_eos=request.add_eos)
        self._positions = Positions(settings.folder, self.contract)
        self._processor: MediaProcessor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(SampleEncoder, measured_settings=self._measured_settings, cached=self.cached)
        return partial(again, contract=self.contract), (self.request,)

    @property
    def pad_id(self) -> int:
        """The id to fill up rows with: the tokenizer's own, else its end token."""
        return pad_id(self._text.tokenizer, self._settings)

    def encode(
        self,
        record: Record,
        store: MediaStore,
        *,
        row: int = -1,
        expected: SampleCounts | None = None,
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
        """Headers only, for a piece after the first: its media count, but are not shown."""
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
        expected: SampleCounts | None = None,
        start: int = 0,
        tokens: int = -1,
    ) -> EncodedSample:
        """Like `encode`, with media that are already decoded, or synthetic."""
        import torch

        text, expansions = self._text_side(record, [medium.header for medium in decoded], row)
        ids, labels, kinds = text.expand()
        counts = count_media(medium.header.kind for medium in decoded)
        if expected is not None:
            actual = SampleCounts(
                tokens=len(ids),
                patches=sum(expansion.patches for expansion in expansions),
                supervised_tokens=int((labels != IGNORED).sum()),
                images=counts["images"],
                videos=counts["videos"],
            )
            require_as_planned(
                record,
                actual=actual,
                planned=expected,
                media=decoded,
                settings=self._settings,
                measured_settings=self._measured_settings,
            )
        end = len(ids) if tokens < 0 else start + tokens
        require(0 <= start < end <= len(ids), f"piece {start}:{end} of {len(ids)} tokens of {record.id}")
        shown = decoded if start == 0 else ()
        cut = kinds[end if start == 0 else start :]
        require(not cut.any(), f"piece {start}:{end} of {record.id} cuts its media")
        labels[start] = IGNORED
        input_ids, token_kinds = torch.from_numpy(ids[start:end]), torch.from_numpy(kinds[start:end])
        media: Mapping[str, Tensor] = {}
        if shown:
            media = self._media().tensors(shown, expansions, text.run_kinds)
        return EncodedSample(
            id=record.id,
            row=row,
            input_ids=input_ids,
            labels=torch.from_numpy(labels[start:end]),
            position_ids=self._positions.of(input_ids, token_kinds, media),
            token_kinds=token_kinds,
            media=media,
            num_images=counts["images"] if shown else 0,
            num_videos=counts["videos"] if shown else 0,
            vision=VisionCounts.total(map(_vision_counts, expansions if shown else ())),
            first=start == 0,
        )

    def text_tokens(self, record: Record, headers: Sequence[MediaHeader]) -> SampleTokens:
        """The text side of a record whose media have these headers, to be kept."""
        tokens, expansions = self._tokenize(record, headers)
        return replace(tokens, key=sample_key(record, expansions))

    def _text_side(
        self, record: Record, headers: Sequence[MediaHeader], row: int
    ) -> tuple[SampleTokens, Sequence[Expansion]]:
        """Tokens and expansions; tokenized now unless they are cached for the same record and media."""
        cached = self.cached.tokens(row) if self.cached is not None and row >= 0 else None
        if cached is not None:
            expansions = self._text.layouter.expansions(headers)
            if cached.key == sample_key(record, expansions):
                return cached, expansions
        return self._tokenize(record, headers)

    def _tokenize(self, record: Record, headers: Sequence[MediaHeader]) -> tuple[SampleTokens, Sequence[Expansion]]:
        if record.tokens is not None:
            self._text.require_usable(record.tokens)
            return SampleTokens.of_ids(record.tokens), ()
        layout = self._text.layout(record, headers)
        return SampleTokens.of(layout, self._text.tokenizer), layout.expansions


def pad_id(tokenizer: LightTokenizer, settings: ProcessorSettings) -> int:
    """The id to fill up rows with: the tokenizer's own, else its end token."""
    tokens = settings.special_tokens
    ids = (tokenizer.id_of(tokens[name]) for name in ("pad_token", "eos_token") if name in tokens)
    return next((token_id for token_id in ids if token_id is not None), 0)


def _vision_counts(expansion: Expansion) -> VisionCounts:
    """The counts of one medium, whose images or frames have one size."""
    return VisionCounts(
        frames=expansion.frames,
        tiles=expansion.patches // expansion.max_patches if expansion.max_patches else 0,
        patches=expansion.patches,
        squared_patches=expansion.patches * expansion.max_patches,
    )


_COUNTS = ("tokens", "patches", "supervised_tokens", "images", "videos")
_MOST_NAMED = 5


def require_as_planned(
    record: Record,
    *,
    actual: SampleCounts,
    planned: SampleCounts,
    media: Sequence[Decoded],
    settings: ProcessorSettings,
    measured_settings: Mapping[str, Any] | None,
) -> None:
    """Raise DriftError where a sample does not have the counts that its pack was planned with."""
    changed = [
        f"{name} {getattr(actual, name)} found, {getattr(planned, name)} planned"
        for name in _COUNTS
        if getattr(actual, name) != getattr(planned, name)
    ]
    if not changed:
        return
    now = json.loads(json.dumps(settings_state(settings), default=str))  # as it was written
    named = differences(measured_settings, now) if measured_settings is not None else []
    again = "measure and pack again"
    if named:
        shown = "; ".join(named[:_MOST_NAMED]) + (f"; {len(named) - _MOST_NAMED} more" if named[_MOST_NAMED:] else "")
        fix = f"these settings have changed since measuring: {shown}. Restore them, or {again}"
    else:
        known = (
            "no setting has changed since measuring, so the sample has"
            if measured_settings is not None
            else ("the sample or the model's settings have")
        )
        fix = f"{known} changed: restore it, or {again}"
    sizes = _sizes(media, planned.headers)
    raise DriftError(
        f"sample {record.id} ({record.origin})",
        got="; ".join(changed) + (f". Media now: {sizes}" if sizes else ""),
        expected="the counts that its pack was planned with",
        fix=fix,
    )


def _sizes(media: Sequence[Decoded], measured: tuple[MediaHeader, ...] | None) -> str:
    """Each medium with its size; where the sizes measured are known, only those that differ."""
    if measured is None or len(measured) != len(media):
        shown = [f"{medium.name} {_size(medium.header)}" for medium in media]
    else:
        pairs = zip(media, measured, strict=True)
        shown = [f"{m.name} {_size(m.header)}, was {_size(old)}" for m, old in pairs if _size(m.header) != _size(old)]
    more = f" and {len(shown) - _MOST_NAMED} more" if shown[_MOST_NAMED:] else ""
    return "; ".join(shown[:_MOST_NAMED]) + more


def _size(header: MediaHeader) -> str:
    size = f"{header.width}x{header.height}"
    return size if header.kind == "image" else f"{size}, {header.frames} frames at {header.fps:g} fps"
