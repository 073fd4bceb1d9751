"""Records and their media headers in, their exact costs out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from packtrain.core.errors import ConfigError, RecordError, nearest
from packtrain.core.modality import MODALITIES
from packtrain.core.values import Cost, Media, MediaHeader, Record, Supervision, TokenIds
from packtrain.families.family import ProcessorSettings, Rule, Run
from packtrain.families.layout import Layout, Layouter, LossOn
from packtrain.families.skeleton import MOST_SHAPES, Shape, Skeletons, shape_of
from packtrain.families.tokenizer import Counts, LightTokenizer, Runs, covered_by_all, tokens_behind

__all__ = ["LossOn", "Priced", "RecordEncoder", "Sized", "TooManyTokens"]

Priced = tuple[Cost, Supervision]

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
        layouts: list[Layout | Counts | RecordError] = []
        texts: dict[bool, dict[str, Any]] = {False: {}, True: {}}
        for sized in batch:
            try:
                layout = self._layout(sized)
                if isinstance(layout, Layout):
                    self._require_short(layout.text, most_tokens)
                    texts[layout.special][layout.text] = None
                layouts.append(layout)
            except RecordError as error:
                layouts.append(error)
        for special, wanted in texts.items():
            wanted.update(zip(wanted, self.tokenizer.encode_batch(list(wanted), special=special), strict=True))
        costs: list[Priced | RecordError] = []
        for sized, made in zip(batch, layouts, strict=True):
            try:
                costs.append(made if isinstance(made, RecordError) else self._price(sized, made, texts))
            except RecordError as error:
                costs.append(error)
        return costs

    def _require_short(self, text: str, most: int | None) -> None:
        """Refuse a text by its beginning. Where it is cut tokens may change, so only twice too many are too many."""
        look = FIRST_LOOK
        while most is not None and look < len(text):
            tokens = len(self.tokenizer.encode(text[:look], special=False))
            if tokens > 2 * most:
                raise TooManyTokens(f"{tokens:,} tokens in the first {look:,} of {len(text):,} characters")
            look *= 4

    def _layout(self, sized: Sized) -> Layout | Counts:
        """Counts where the record came as tokens, else its text."""
        record = sized.record
        if record.tokens is not None:
            return self._count_ids(record.tokens)
        key = shape_of(record)
        if len(self._seen) >= MOST_SHAPES:
            self._seen.clear()
        if self._seen[key] < self.patience:
            self._seen[key] += 1
            return self.layouter.layout(record, sized.headers)
        return self._skeletons.layout(record, sized.headers, key)

    def _price(self, sized: Sized, layout: Layout | Counts, texts: Mapping[bool, Mapping[str, Any]]) -> Priced:
        if isinstance(layout, Layout):
            counts = _count(layout, texts[layout.special][layout.text])
            expansions = layout.expansions
            supervision = Supervision(layout.media_supervised, layout.ended(self.tokenizer), layout.shortened)
        else:
            counts, expansions = layout, ()
            supervision = Supervision((), self._ends(sized.record.tokens))
        if counts.text_tokens < 1:
            raise RecordError("template", "no tokens")
        if counts.supervised_tokens < 1:
            raise RecordError("loss", "no supervised tokens", _silent(sized.record))
        media: Counter[str] = Counter()
        media_tokens = frames = patches = largest = 0
        for header, expansion in zip(sized.headers, expansions, strict=True):
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
        return cost, supervision

    # ---- tokens that came as such

    def require_usable(self, tokens: TokenIds) -> None:
        """Refuse ids that the model's tokenizer does not have, and those that stand for media."""
        if (largest := max(tokens.ids)) >= self.tokenizer.size:
            detail = f"{largest}; the tokenizer has ids up to {self.tokenizer.size - 1}"
            raise RecordError("schema", "an id outside the vocabulary", detail)
        reserved = {self.tokenizer.id_of(token): token for token in self.layouter.reserved}
        if (at := next((one for one in tokens.ids if one in reserved), None)) is not None:
            raise RecordError("schema", "a media placeholder id", f"{at}, {reserved[at]!a}: use messages")

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


def _silent(record: Record) -> str:
    """What is known of a record in which nothing carries loss."""
    answered = record.tokens is not None or any(message.role == "assistant" for message in record.messages)
    return "" if answered else "a prompt without an answer"


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
