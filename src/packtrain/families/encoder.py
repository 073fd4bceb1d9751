"""Records and their media headers in, their exact costs out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from packtrain.core.errors import ConfigError, RecordError, nearest
from packtrain.core.modality import MODALITIES
from packtrain.core.values import Cost, Media, MediaHeader, Record, Supervision, TokenIds
from packtrain.families.base import Expansion, ProcessorSettings, Rule, Run
from packtrain.families.coverage import Runs, covered_by_all, tokens_behind
from packtrain.families.layout import SAMPLE_HEADERS, Layout, Layouter, LossOn
from packtrain.families.segments import Counts, Cutter, Draft, SegmentedShape
from packtrain.families.skeleton import MOST_SHAPES, Shape, Skeletons, shape_of, texts_of, with_texts
from packtrain.families.tokenizer import LightTokenizer

__all__ = ["LossOn", "Priced", "RecordEncoder", "Sized", "TooManyTokens"]

Priced = tuple[Cost, Supervision]

# Texts on which counting in pieces is compared with counting whole, beside those that try the template.
_AWKWARD = (
    "Hello world",
    " two  blanks ",
    "\n\nlines\n",
    "1234567",
    "don't <stop|> [INST]",
    "naïve 日本語 🙂\u200d🙂",
    "ends with a part of a tag <|im_",
    "_end|> begins with one",
    "a" * 40,
)


FIRST_LOOK = 1 << 16  # characters of a text that are tokenized to see whether it can be short enough


class TooManyTokens(RecordError):
    """A record that is known to have more tokens than are wanted before all of it is tokenized."""

    def __init__(self, detail: str) -> None:
        super().__init__("template", "too many tokens", detail)


@dataclass(frozen=True, slots=True)
class Sized:
    """A record whose media headers have been read."""

    record: Record
    headers: tuple[MediaHeader, ...]


class RecordEncoder:
    """Costs of records for one model, one set of media limits and one rule of what carries loss."""

    # Learning a shape costs as much as running the template for some hundred records, so rare shapes are not learned.
    patience: ClassVar[int] = 32

    def __init__(
        self,
        settings: ProcessorSettings,
        family: Rule,
        *,
        loss_on: LossOn | None = None,
        add_eos: bool | None = None,
        typed: bool = False,
    ) -> None:
        names = get_args(LossOn)
        if loss_on is not None and loss_on not in names:
            raise ConfigError("loss_on", got=loss_on, expected=", ".join(names), fix=nearest(loss_on, names))
        self.tokenizer = LightTokenizer(settings)
        self.layouter = Layouter(settings, family, self.tokenizer, loss_on=loss_on, add_eos=add_eos, typed=typed)
        self._skeletons = Skeletons(self.layouter)
        self._cutter = Cutter(self.tokenizer)
        self._shapes: dict[Shape, SegmentedShape | None] = {}
        self._seen: Counter[Shape] = Counter()

    def layout(self, record: Record, headers: Sequence[MediaHeader]) -> Layout:
        """The text that will be tokenized, where its media runs stand and which characters carry loss."""
        return self._skeletons.layout(record, headers)

    # ---- cost

    def cost(self, record: Record, headers: Sequence[MediaHeader]) -> Priced:
        """The record's cost."""
        (found,) = self.costs([Sized(record, tuple(headers))])
        if isinstance(found, RecordError):
            raise found
        return found

    def costs(self, batch: Sequence[Sized], most_tokens: int | None = None) -> list[Priced | RecordError]:
        """A cost, or an error, for each record; TooManyTokens where the beginning of a text has far more than allowed.

        All texts are tokenized together, at which a tokenizer is fastest, and those that come again only once.
        """
        prepared: list[_Prepared | RecordError] = []
        texts: dict[bool, dict[str, Any]] = {False: {}, True: {}}
        for sized in batch:
            try:
                one = self._prepare(sized)
                self._require_short(one, most_tokens)
            except RecordError as error:
                prepared.append(error)
                continue
            prepared.append(one)
            texts[one.special].update(dict.fromkeys(one.texts))
        for special, wanted in texts.items():
            wanted.update(zip(wanted, self.tokenizer.encode_batch(list(wanted), special=special), strict=True))
        found: list[Priced | RecordError] = []
        for sized, one_or_error in zip(batch, prepared, strict=True):
            if isinstance(one_or_error, RecordError):
                found.append(one_or_error)
                continue
            encodings = texts[one_or_error.special]
            try:
                found.append(self._price(sized, one_or_error, [encodings[text] for text in one_or_error.texts]))
            except RecordError as error:
                found.append(error)
        return found

    def _require_short(self, prepared: _Prepared, most: int | None) -> None:
        """Refuse a text by its beginning. Where it is cut tokens may change, so only twice too many are too many."""
        for text in prepared.texts if most is not None else ():
            look = FIRST_LOOK
            while most is not None and look < len(text):
                tokens = len(self.tokenizer.encode(text[:look], special=False))
                if tokens > 2 * most:
                    raise TooManyTokens(f"{tokens:,} tokens in the first {look:,} of {len(text):,} characters")
                look *= 4

    def _prepare(self, sized: Sized) -> _Prepared:
        record, headers = sized.record, sized.headers
        if record.tokens is not None:
            return _Prepared(self._count_ids(record.tokens), [], False, (), ())
        key = shape_of(record)
        if len(self._seen) >= MOST_SHAPES:
            self._seen.clear()
            self._shapes.clear()
        if self._seen[key] < self.patience:
            self._seen[key] += 1
            layout = self.layouter.layout(record, headers)
            return _Prepared(layout, [layout.text], layout.special, layout.expansions, layout.media_supervised)
        if not record.plain:
            shape = self._shape(record, key)
            if shape is not None:
                texts = texts_of(record)
                if not self._skeletons.hides_placeholder(texts):
                    expansions = self.layouter.expansions(headers)
                    draft = shape.draft(texts, expansions, self._cutter.pricer)
                    if draft is not None:
                        return _Prepared(draft, draft.segments, False, expansions, shape.media_supervised)
        layout = self._skeletons.layout(record, headers)
        return _Prepared(layout, [layout.text], layout.special, layout.expansions, layout.media_supervised)

    def _price(self, sized: Sized, prepared: _Prepared, encodings: list[Any]) -> Priced:
        found = prepared.found
        if isinstance(found, Counts):
            counts = found
        else:
            counts = found.counts(encodings) if isinstance(found, Draft) else _count(found, encodings[0])
        if counts.text_tokens < 1:
            raise RecordError("template", "no tokens")
        if counts.supervised_tokens < 1:
            raise RecordError("loss", "no supervised tokens")
        media: Counter[str] = Counter()
        media_tokens = frames = patches = largest = 0
        for header, expansion in zip(sized.headers, prepared.expansions, strict=True):
            kind = MODALITIES[header.kind]
            tokens = expansion.media_tokens
            media[kind.tokens] += tokens
            media_tokens += tokens
            if kind.counted is not None:
                media[kind.counted] += 1
            frames += expansion.frames
            patches += expansion.patches
            largest = max(largest, expansion.max_patches)
        cost = Cost(
            tokens=counts.text_tokens + media_tokens,
            text_tokens=counts.text_tokens,
            **media,
            frames=frames,
            objects=sized.record.objects,
            patches=patches,
            max_patches_per_image=largest,
            supervised_tokens=counts.supervised_tokens,
            tail_tokens=counts.tail_tokens,
            tail_runs=",".join(map(str, counts.tail_runs)),
        )
        if isinstance(found, Counts):
            return cost, Supervision((), self._ends(sized.record.tokens))
        if isinstance(found, Layout):
            return cost, Supervision(prepared.media_supervised, found.ended(self.tokenizer), found.shortened)
        return cost, Supervision(prepared.media_supervised, found.shape.ended)

    # ---- tokens that came as such

    def require_usable(self, tokens: TokenIds) -> None:
        """Refuse ids that the model's tokenizer does not have, and those that stand for media."""
        if (largest := max(tokens.ids)) >= self.tokenizer.size:
            detail = f"{largest}; the tokenizer has ids up to {self.tokenizer.size - 1}"
            raise RecordError("schema", "an id outside of the vocabulary", detail)
        reserved = {self.tokenizer.id_of(token): token for token in self.layouter.reserved}
        if (at := next((one for one in tokens.ids if one in reserved), None)) is not None:
            raise RecordError("schema", "an id that stands for a medium", f"{at}, {reserved[at]!a}: use messages")

    def _count_ids(self, tokens: TokenIds) -> Counts:
        self.require_usable(tokens)
        count = len(tokens.ids)
        spans = [
            (max(first, 1), end) for first, end in tokens.learned if end > 1
        ]  # the first is predicted from nothing
        runs = Runs()
        runs.add_text(count, spans)
        return Counts(count, sum([end - first for first, end in spans]), count, runs.lengths())

    def _ends(self, tokens: TokenIds | None) -> bool:
        """Does anything that carries loss end in an end token?"""
        ends = {self.tokenizer.id_of(token) for token in self.tokenizer.ends}
        return tokens is not None and any(tokens.ids[end - 1] in ends for _, end in tokens.learned)

    # ---- shapes

    def _shape(self, record: Record, key: Shape) -> SegmentedShape | None:
        """The record's shape cut at special tokens; None where its text has to be tokenized as a whole."""
        if key not in self._shapes:
            skeleton = self._skeletons.skeleton(record, key)
            shape = self._cutter.cut(skeleton) if skeleton is not None else None
            self._shapes[key] = shape if shape is not None and self._agrees(record, shape) else None
        return self._shapes[key]

    def _agrees(self, record: Record, shape: SegmentedShape) -> bool:
        """Does counting in pieces give what counting the whole text gives, on texts likely to show a difference?"""
        kinds = [medium.kind for medium in record.media()]
        if [slot.kind for slot in shape.media] != kinds:
            return False
        for size in SAMPLE_HEADERS[:2]:
            headers = [size if kind == "image" else SAMPLE_HEADERS[2] for kind in kinds]
            try:
                expansions = self.layouter.expansions(headers)
            except RecordError:
                return False
            for probe in (*self._skeletons.probes(), *_AWKWARD):
                texts = [probe] * len(texts_of(record))
                layout = self._skeletons.layout(with_texts(record, texts), headers)
                draft = shape.draft(texts, expansions, self._cutter.pricer)
                if draft is None or shape.ended != layout.ended(self.tokenizer):
                    return False
                whole = _count(layout, self.tokenizer.encode(layout.text, special=layout.special))
                if draft.counts([self.tokenizer.encode(text, special=False) for text in draft.segments]) != whole:
                    return False
        return True

    # ---- parts of costs

    def text_counts(self, record: Record) -> tuple[Counts | None, Supervision]:
        """Where text carries loss, for a family whose media are counted by its processor; None means all of it."""
        if any(isinstance(part, Media) for m in record.messages if m.role == "assistant" for part in m.parts):
            raise RecordError("processor", "media in an assistant message")
        layout = self.layouter.rendered(record)
        found = Supervision((False,) * len(list(record.media())), layout.ended(self.tokenizer), layout.shortened)
        if layout.supervised is None:
            return None, found
        return _count(layout, self.tokenizer.encode(layout.text, special=layout.special)), found

    def token_count(self, pieces: Sequence[str | Run]) -> int:
        """Tokens of an expansion on its own; differences of two such counts are exact in any context."""
        runs = [piece for piece in pieces if isinstance(piece, Run) and piece.count]
        text = "".join(piece if isinstance(piece, str) else piece.token if piece.count else "" for piece in pieces)
        return len(self.tokenizer.encode(text, special=False)) + sum(run.count - 1 for run in runs)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A record that waits for its texts to be tokenized: in pieces, or as a whole."""

    found: Draft | Layout | Counts
    texts: list[str]
    special: bool
    expansions: Sequence[Expansion]
    media_supervised: tuple[bool, ...]


def _count(layout: Layout, encoding: Any) -> Counts:
    """Text tokens of a whole layout; a sample's first token is predicted from nothing, so it never carries loss."""
    text_tokens = len(encoding) - len(layout.runs)
    tail_tokens = tokens_behind(encoding, layout.runs[-1].at) if layout.runs else text_tokens
    if layout.supervised is None:
        first_is_media = bool(layout.runs) and encoding.char_to_token(layout.runs[0].at) == 0
        return Counts.all_supervised(text_tokens, text_tokens - (not first_is_media), tail_tokens)
    spans = covered_by_all(encoding, layout.supervised, behind=1)
    supervised = sum([end - first for first, end in spans])
    for run in layout.runs:
        inside = any(start <= run.at < end for start, end in layout.supervised)
        supervised -= inside and encoding.char_to_token(run.at) != 0
    runs = Runs()
    runs.add_text(len(encoding), spans, begin=len(encoding) - tail_tokens)
    return Counts(text_tokens, supervised, tail_tokens, runs.lengths())
