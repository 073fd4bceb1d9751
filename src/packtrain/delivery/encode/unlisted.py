"""Samples of models without a rule, by running their processor on every record: exact, and slower than a rule.

Ids and tensors are what the processor returns. The text of the record, rendered by the chat template with one
placeholder for each medium, says which tokens carry loss; its tokens are found among the processor's:

    rendered   <s> user : [IMG]                         what ? assistant : a cat </s>
    processor  <s> user : [IMG] [IMG] [BREAK] ... [END] what ? assistant : a cat </s>

What carries loss must be found there token by token, and only once, with the text around it up to the next medium;
otherwise the record is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from packtrain.core.errors import ConfigError, RecordError, require
from packtrain.core.values import Cost, Media, MediaHeader, MediaLimits, Record, Supervision, Text
from packtrain.delivery.encode.encode import SampleEncoder, pad_id, require_as_planned
from packtrain.delivery.encode.encoded_sample import (
    IGNORED,
    IMAGE,
    TEXT,
    VIDEO,
    EncodedSample,
    SampleCounts,
    VisionCounts,
)
from packtrain.delivery.encode.from_transformers import model_contract
from packtrain.delivery.encode.joins import TOKEN_KINDS, complete_contract, image_record, refuse_packing
from packtrain.delivery.encode.pixels import Positions
from packtrain.delivery.encode.processor import ProcessorOutputs, RealProcessor
from packtrain.families.contracts import contract_for
from packtrain.families.encoder import RecordEncoder, SizedRecord, SupervisedCost
from packtrain.families.family import BatchContract, TextOnly
from packtrain.families.registry import find_family, load_rule
from packtrain.families.tokenizer import Runs, covered_by_all
from packtrain.measuring.drift import ProcessorCounts
from packtrain.measuring.measurer import CostRule, FamilyRule
from packtrain.measuring.request import Request
from packtrain.records.media import MediaStore

if TYPE_CHECKING:
    from torch import Tensor

Ids = np.ndarray  # (tokens,) int64
_REWRITTEN = 4  # tokens next to a medium that may be others than in the text: some processors put spaces there


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProcessedRecord:
    """What the processor made of one record, and where that carries loss."""

    ids: Ids
    labels: Ids  # IGNORED at the first token, on media and on what `loss_on` leaves out
    kinds: Ids  # TEXT, IMAGE or VIDEO
    outputs: ProcessorOutputs
    counts: ProcessorCounts
    lost: bool  # has it media of a kind of which no token is found?
    supervision: Supervision


class RecordProcessor:
    """Runs one model's processor on records."""

    def __init__(self, request: Request) -> None:
        settings = request.settings()
        self.settings = settings
        self.real = RealProcessor(request, settings)
        # Loss is taken on text, whose tokens are the same whether media are expanded or not.
        text_only = TextOnly(settings, MediaLimits())
        self.text = RecordEncoder(settings, text_only, loss_on=request.loss_on, add_eos=request.add_eos, typed=True)
        self._images, self._videos = self.real.token_ids("image"), self.real.token_ids("video")
        self._placeholders = self.real.placeholders()
        written = {self.text.tokenizer.id_of(token) for token in self._placeholders}
        self._stand_ins = self._images | self._videos | {token for token in written if token is not None}

    def process(self, record: Record, store: MediaStore) -> ProcessedRecord:
        """Run the processor. RecordError where it fails or its tokens cannot be understood; OSError from reading."""
        if any(isinstance(part, Media) for m in record.messages if m.role == "assistant" for part in m.parts):
            raise RecordError("processor", "media in an assistant message")
        self.refuse_placeholders(record)
        try:
            outputs = self.real.outputs(record, store)
            counts = self.real.count(record, outputs)
        except (RecordError, ConfigError, OSError, MemoryError):
            raise
        except Exception as error:  # a processor may fail in any way on bad media
            raise RecordError("processor", "the processor failed", f"{type(error).__name__}: {error}"[:300]) from None
        ids = np.asarray(outputs["input_ids"], dtype=np.int64)
        kinds = self._kinds(record, ids)
        labels, supervision = self._labels(record, ids, kinds)
        kind_ids = {"image": IMAGE, "video": VIDEO}
        return ProcessedRecord(
            ids=ids,
            labels=labels,
            kinds=kinds,
            outputs=outputs,
            counts=counts,
            lost=any(not (kinds == kind_ids[medium.kind]).any() for medium in record.media()),
            supervision=supervision,
        )

    def refuse_placeholders(self, record: Record) -> None:
        """No text may hold them: the model would look for a medium of another sample of the batch."""
        texts = [part.text for message in record.messages for part in message.parts if isinstance(part, Text)]
        if any(token in text for text in (*texts, *record.beside()) for token in self._placeholders):
            raise RecordError("template", "media placeholders in the text do not match the media", "one is in a text")
        held = sorted({*self._images, *self._videos}.intersection(record.tokens.ids if record.tokens else ()))
        if held:
            raise RecordError("schema", "a media placeholder id", f"{held[0]}: use messages")

    def _kinds(self, record: Record, ids: Ids) -> Ids:
        """The kind of each token, by the ids that the config names."""
        shown = {medium.kind for medium in record.media()}
        kinds = np.full(len(ids), TEXT, dtype=np.int64)
        if not shown:
            return kinds
        if not self._images | self._videos:
            raise RecordError("processor", "neither the model's config nor its processor names its media tokens")
        if shown == {"image", "video"} and not self._videos - self._images:
            raise RecordError("processor", "images and videos share one token, so they cannot be told apart")
        apart = sorted(self._videos - self._images) if "image" in shown else sorted(self._images | self._videos)
        if "image" in shown:
            kinds[np.isin(ids, sorted(self._images))] = IMAGE
        if "video" in shown:
            kinds[np.isin(ids, apart)] = VIDEO
        return kinds

    def _labels(self, record: Record, ids: Ids, kinds: Ids) -> tuple[Ids, Supervision]:
        """The labels of the processor's tokens."""
        labels = np.where(kinds == TEXT, ids, IGNORED)
        labels[:1] = IGNORED
        if record.tokens is not None:
            supervised = np.zeros(len(ids), dtype=bool)
            for first, end in record.tokens.supervised:
                supervised[first:end] = True
            return np.where(supervised, labels, IGNORED), Supervision()
        tokenizer, layouter = self.text.tokenizer, self.text.layouter
        layout = layouter.rendered(record)
        silent = (False,) * sum(1 for _ in record.media())
        supervision = Supervision(silent, layout.ended(tokenizer), layout.shortened)
        if layout.supervised is None:
            return labels, supervision
        encoding = tokenizer.encode(layout.text, special=layout.special)
        spans = covered_by_all(encoding, layout.supervised, after=1)
        carrying = np.array([at for first, end in spans for at in range(first, end)], dtype=np.int64)
        places = find_tokens(np.asarray(encoding.ids), ids, self._stand_ins, carrying)
        kept = np.full(len(ids), IGNORED, dtype=np.int64)
        kept[places] = labels[places]
        return kept, supervision


def find_tokens(text: Ids, ids: Ids, media: Collection[int], wanted: Ids) -> Ids:
    """Where tokens of a rendered text are among those of a processor, which writes media in place of placeholders.

    >>> find_tokens(np.array([5, 9, 6, 7]), np.array([5, 9, 9, 3, 9, 6, 7]), {9}, np.array([3]))
    array([6])
    """
    if np.array_equal(text, ids):
        return wanted
    stands = np.flatnonzero(np.isin(text, sorted(media))).tolist()
    before = min(_common(text, ids), stands[0] if stands else len(text))
    after = min(_common(text[::-1], ids[::-1]), len(text) - (stands[-1] + 1 if stands else before))
    places = np.where(wanted < before, wanted, wanted + len(ids) - len(text))
    between = (wanted >= before) & (wanted < len(text) - after)
    for start, end in itertools.pairwise((-1, *stands, len(text))):
        here = between & (wanted > start) & (wanted < end)
        if here.any():
            places[here] = wanted[here] + _only_shift(text, ids, (start + 1, end), wanted[here])
    in_order = not (np.diff(places) <= 0).any()
    if np.isin(wanted, stands).any() or not in_order or not np.array_equal(ids[places], text[wanted]):
        raise _lost()
    return places


def _common(one: Ids, other: Ids) -> int:
    """How many tokens two texts begin with alike."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _only_shift(text: Ids, ids: Ids, span: tuple[int, int], wanted: Ids) -> int:
    """How far a span of text around some tokens was moved; what it has next to media may have been written anew."""
    first, last = span
    for cut in range(_REWRITTEN + 1):
        start = min(first + cut, int(wanted[0])) if first else 0
        end = max(last - cut, int(wanted[-1]) + 1) if last < len(text) else last
        if end - start > len(ids):
            continue
        windows = np.lib.stride_tricks.sliding_window_view(ids, end - start)
        places = np.flatnonzero((windows == text[start:end]).all(1))
        if len(places) > 1:
            break
        if len(places):
            return int(places[0]) - start
    raise _lost()


def _lost() -> RecordError:
    return RecordError("loss", "the answer was not found among the processor's tokens")


def _refuse_videos(record: Record) -> None:
    """How videos are joined is not read off the processor."""
    if any(medium.kind == "video" for medium in record.media()):
        raise RecordError("processor", "a video, for a model without a family", "only its images are understood")


class ProcessorRule:
    """Costs of a model that has no rule."""

    def __init__(self, request: Request) -> None:
        self._records = RecordProcessor(request)
        family = find_family(self._records.settings.model_type)
        self._unlisted = family is None or family.contract is None

    def compute_costs(self, batch: Sequence[SizedRecord], store: MediaStore) -> list[SupervisedCost | RecordError]:
        """One record after the other, encoded for real."""
        costs: list[SupervisedCost | RecordError] = []
        for sized in batch:
            try:
                costs.append(self._compute_cost(sized.record, sized.headers, store))
            except RecordError as error:
                costs.append(error)
        return costs

    def _compute_cost(self, record: Record, headers: tuple[MediaHeader, ...], store: MediaStore) -> SupervisedCost:
        if record.tokens is not None:
            self._records.refuse_placeholders(record)
            return self._records.text.cost(record, headers)
        if self._unlisted:
            _refuse_videos(record)
        try:
            sample = self._records.process(record, store)
        except OSError as error:
            raise RecordError("processor", "the processor failed", f"{type(error).__name__}: {error}"[:300]) from None
        supervised = sample.labels != IGNORED
        if not supervised.any():
            raise RecordError("loss", "no supervised tokens")
        media = sample.kinds != TEXT
        tail = len(media) - (int(np.flatnonzero(media)[-1]) + 1 if media.any() else 0)
        if sample.lost:
            tail = 0  # where nothing says which ids are media, nothing may be cut
        cost = Cost(
            tokens=len(sample.ids),
            text_tokens=int((~media).sum()),
            image_tokens=int((sample.kinds == IMAGE).sum()),
            video_tokens=int((sample.kinds == VIDEO).sum()),
            images=sum(header.kind == "image" for header in headers),
            videos=sum(header.kind == "video" for header in headers),
            frames=sample.counts.frames,
            objects=record.objects,
            patches=sample.counts.patches,
            max_patches_per_image=sample.counts.max_patches_per_image,
            supervised_tokens=int(supervised.sum()),
            tail_tokens=tail,
            tail_runs=",".join(map(str, _runs(supervised[len(media) - tail :]))),
        )
        return cost, sample.supervision


def _runs(supervised: np.ndarray) -> tuple[int, ...]:
    """Lengths of the spans of some tokens, in turn without and with loss."""
    runs = Runs()
    for carries in supervised.tolist():
        runs.add(1, loss=carries)
    return runs.lengths()


class ProcessorEncoder:
    """Encodes records for one model without a rule. It pickles as what it was made from, its contract included."""

    cached = None  # tokens come from the processor, with the media

    def __init__(
        self,
        request: Request,
        *,
        packing: bool = True,
        measured_settings: Mapping[str, Any] | None = None,
        contract: BatchContract | None = None,
    ) -> None:
        self.request = request
        self._packing, self._measured_settings = packing, measured_settings
        self._records = RecordProcessor(request)
        settings = self._records.settings
        fresh = contract is None
        if contract is None:
            known = model_contract(settings, packing=packing)
            contract = complete_contract(known, self._records.real, settings, packing=packing)
            if packing:
                refuse_packing(contract, settings.folder)
        self.contract = contract
        self._positions = Positions(settings.folder, contract)
        if fresh and packing and contract.positions == "mrope":
            self._require_positions()

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(ProcessorEncoder, packing=self._packing, measured_settings=self._measured_settings)
        return partial(again, contract=self.contract), (self.request,)

    def _require_positions(self) -> None:
        """Refuse a model that places images in another way, before any record is."""
        try:
            self.encode(image_record(), MediaStore("."))
        except RecordError as error:
            if error.stage == "positions":
                raise ConfigError(
                    self._records.settings.folder,
                    got=f"model type {self.contract.model_type!r}: {error.reason} ({error.detail})",
                    expected="positions of three dimensions: time, height and width",
                    fix="train on padded rows: data.packing=false",
                ) from error

    @property
    def pad_id(self) -> int:
        """The id to fill up rows with: the tokenizer's own, else its end token."""
        return pad_id(self._records.text.tokenizer, self._records.settings)

    def warm_up(self) -> None:
        """Build the model's shell now instead of with the first medium."""
        self._positions.warm_up()

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
        """One sample, or `tokens` of it from `start` on; errors as those of SampleEncoder."""
        import torch

        _refuse_videos(record)
        sample = self._records.process(record, store)
        if sample.lost:
            raise RecordError("processor", "the tokens of a medium were not found", "the config does not name their id")
        kinds = [medium.kind for medium in record.media()]
        images, videos = kinds.count("image"), kinds.count("video")
        if expected is not None:
            actual = SampleCounts(
                tokens=len(sample.ids),
                patches=sample.counts.patches,
                supervised_tokens=int((sample.labels != IGNORED).sum()),
                images=images,
                videos=videos,
            )
            require_as_planned(
                record,
                actual=actual,
                planned=expected,
                media=(),
                settings=self._records.settings,
                measured_settings=self._measured_settings,
            )
        end = len(sample.ids) if tokens < 0 else start + tokens
        piece = f"piece {start}:{end} of {record.id}"
        require(0 <= start < end <= len(sample.ids), f"{piece} has {len(sample.ids)} tokens")
        require(not sample.kinds[end if start == 0 else start :].any(), f"{piece} cuts its media")
        labels = sample.labels[start:end].copy()
        labels[0] = IGNORED
        media = self._media(sample, start, end)
        input_ids, token_kinds = torch.from_numpy(sample.ids[start:end]), torch.from_numpy(sample.kinds[start:end])
        first = start == 0
        counted = VisionCounts(frames=sample.counts.frames, patches=sample.counts.patches)
        return EncodedSample(
            id=record.id,
            row=row,
            input_ids=input_ids,
            labels=torch.from_numpy(labels),
            position_ids=self._positions.of(input_ids, token_kinds, media),
            token_kinds=token_kinds,
            media=media,
            num_images=images if first else 0,
            num_videos=videos if first else 0,
            vision=counted if first else VisionCounts(),
            first=first,
        )

    def _media(self, sample: ProcessedRecord, start: int, end: int) -> dict[str, Tensor]:
        """What of the processor's tensors the model takes; of a later piece only what is as long as the text."""
        import torch

        media: dict[str, Tensor] = {}
        for name, join in self.contract.media.items():
            tensor = sample.outputs.get(name)
            if tensor is None and name == TOKEN_KINDS:
                tensor = torch.from_numpy(sample.kinds)[None]
            if tensor is None:
                continue
            if tensor.is_floating_point():
                tensor = tensor.float()  # some processors return half precision
            if join == "text":
                media[name] = tensor[:, start:end]
            elif start == 0:
                media[name] = tensor
        return media


def sample_encoder(
    request: Request, *, packing: bool = True, measured_settings: Mapping[str, Any] | None = None
) -> SampleEncoder | ProcessorEncoder:
    """The encoder for a model: by its rule where there is one, else by its processor."""
    settings = request.settings()
    if load_rule(settings, request.limits) is not None:
        contract = model_contract(settings, packing=packing)
        if not contract.unlisted:
            return SampleEncoder(request, measured_settings=measured_settings, contract=contract)
    elif not contract_for(settings, packing=packing).unlisted:
        raise ConfigError(
            settings.folder,
            got=f"{settings.model_type} with a processor whose costs are only known by running it",
            expected="the family's published image and video processors, with resizing",
            fix="change the processor's settings, then measure and pack again",
        )
    return ProcessorEncoder(request, packing=packing, measured_settings=measured_settings)


def cost_rule(request: Request) -> CostRule:
    """What knows the costs of a model's records: its rule, or its processor."""
    return FamilyRule(request) if load_rule(request.settings(), request.limits) is not None else ProcessorRule(request)
