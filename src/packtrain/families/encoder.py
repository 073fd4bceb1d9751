"""Records and their media headers in, their exact costs out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from packtrain.core.errors import ConfigError, RecordError, nearest
from packtrain.core.modality import MODALITIES
from packtrain.core.values import Cost, MediaHeader, Record, Supervision, TokenIds
from packtrain.families.family import ProcessorSettings, Rule, Run
from packtrain.families.layout import Layout, Layouter, LossOn
from packtrain.families.skeleton import Skeletons
from packtrain.families.tokenizer import LightTokenizer, Runs, TokenCounts, covered_by_all, tokens_after

if TYPE_CHECKING:
    from tokenizers import Encoding


SupervisedCost = tuple[Cost, Supervision]

FIRST_LOOK = 1 << 16  # characters of a text that are tokenized to see whether it can be short enough


class TooManyTokens(RecordError):
    """A record that is known to have more tokens than are wanted before all of it is tokenized."""

    def __init__(self, detail: str) -> None:
        super().__init__("template", "too many tokens", detail)


@dataclass(frozen=True, slots=True)
class SizedRecord:
    """A record whose media headers have been read."""

    record: Record
    headers: tuple[MediaHeader, ...]


class RecordEncoder:
    """Costs of records for one model, one set of media limits and one rule of what carries loss."""

    def __init__(
        self,
        settings: ProcessorSettings,
        rule: Rule,
        *,
        loss_on: LossOn | None = None,
        add_eos: bool | None = None,
        typed: bool = False,
    ) -> None:
        names = get_args(LossOn)
        if loss_on is not None and loss_on not in names:
            raise ConfigError("loss_on", got=loss_on, expected=", ".join(names), fix=nearest(loss_on, names))
        self.tokenizer = LightTokenizer(settings)
        self.layouter = Layouter(settings, rule, self.tokenizer, loss_on=loss_on, add_eos=add_eos, typed=typed)
        self.skeletons = Skeletons(self.layouter)

    def layout(self, record: Record, headers: Sequence[MediaHeader]) -> Layout:
        """The text that will be tokenized, where its media runs stand and which characters carry loss."""
        return self.skeletons.layout(record, headers)

    # ---- cost

    def cost(self, record: Record, headers: Sequence[MediaHeader]) -> SupervisedCost:
        """The record's cost."""
        (cost,) = self.costs([SizedRecord(record, tuple(headers))])
        if isinstance(cost, RecordError):
            raise cost
        return cost

    def costs(self, batch: Sequence[SizedRecord], most_tokens: int | None = None) -> list[SupervisedCost | RecordError]:
        """A cost, or an error, for each record; TooManyTokens where the beginning of a text has far more than allowed.

        All texts are tokenized together, at which a tokenizer is fastest, and those that come again only once.
        """
        layouts = [self._layout(sized, most_tokens) for sized in batch]
        encodings: dict[tuple[bool, str], Encoding] = {}
        for special in (False, True):
            wanted = dict.fromkeys(one.text for one in layouts if isinstance(one, Layout) and one.special == special)
            encoded = self.tokenizer.encode_batch(list(wanted), special=special)
            encodings.update(zip(((special, text) for text in wanted), encoded, strict=True))
        return [self._cost_of_layout(sized, layout, encodings) for sized, layout in zip(batch, layouts, strict=True)]

    def _require_short(self, text: str, most: int | None) -> None:
        """Refuse a text by its beginning. Where it is cut tokens may change, so only twice too many are too many."""
        look = FIRST_LOOK
        while most is not None and look < len(text):
            tokens = len(self.tokenizer.encode(text[:look], special=False))
            if tokens > 2 * most:
                raise TooManyTokens(f"{tokens:,} tokens in the first {look:,} of {len(text):,} characters")
            look *= 4

    def _layout(self, sized: SizedRecord, most_tokens: int | None) -> Layout | TokenCounts | RecordError:
        """Counts where the record came as tokens, else its text."""
        try:
            if sized.record.tokens is not None:
                return self._count_ids(sized.record.tokens)
            layout = self.layout(sized.record, sized.headers)
            self._require_short(layout.text, most_tokens)
        except RecordError as error:
            return error
        return layout

    def _cost_of_layout(
        self,
        sized: SizedRecord,
        layout: Layout | TokenCounts | RecordError,
        encodings: Mapping[tuple[bool, str], Encoding],
    ) -> SupervisedCost | RecordError:
        if isinstance(layout, RecordError):
            return layout
        if isinstance(layout, Layout):
            counts = _count(layout, encodings[layout.special, layout.text])
            expansions = layout.expansions
            supervision = Supervision(layout.media_supervised, layout.ended(self.tokenizer), layout.shortened)
        else:
            counts, expansions = layout, ()
            supervision = Supervision((), self._ends(sized.record.tokens))
        if counts.text_tokens < 1:
            return RecordError("template", "no tokens")
        if counts.supervised_tokens < 1:
            return RecordError("loss", "no supervised tokens", _silent(sized.record))
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

    def token_ids(self, record: Record, headers: Sequence[MediaHeader]) -> list[int] | None:
        """As the model gets them, runs of media repeated; None where a media token is merged with its neighbours."""
        if record.tokens is not None:
            return list(record.tokens.ids)
        layout = self.layout(record, headers)
        encoding = self.tokenizer.encode(layout.text, special=layout.special)
        repeats = {encoding.char_to_token(run.at): run.count for run in layout.runs}
        if None in repeats or len(repeats) < len(layout.runs):
            return None
        return [one for at, token in enumerate(encoding.ids) for one in [token] * repeats.get(at, 1)]

    # ---- tokens that came as such

    def require_usable(self, tokens: TokenIds) -> None:
        """Refuse ids that the model's tokenizer does not have, and those of media."""
        if (largest := max(tokens.ids)) >= self.tokenizer.size:
            detail = f"{largest}; the tokenizer has ids up to {self.tokenizer.size - 1}"
            raise RecordError("schema", "an id outside the vocabulary", detail)
        reserved = {self.tokenizer.id_of(token): token for token in self.layouter.reserved}
        if (at := next((one for one in tokens.ids if one in reserved), None)) is not None:
            raise RecordError("schema", "a media placeholder id", f"{at}, {reserved[at]!a}: use messages")

    def _count_ids(self, tokens: TokenIds) -> TokenCounts:
        self.require_usable(tokens)
        count = len(tokens.ids)
        spans = [
            (max(first, 1), end) for first, end in tokens.supervised if end > 1
        ]  # the first is predicted from nothing
        runs = Runs()
        runs.add_text(count, spans)
        return TokenCounts(count, sum([end - first for first, end in spans]), count, runs.lengths())

    def _ends(self, tokens: TokenIds | None) -> bool:
        """Does anything that carries loss end in an end token?"""
        ends = {self.tokenizer.id_of(token) for token in self.tokenizer.ends}
        return tokens is not None and any(tokens.ids[end - 1] in ends for _, end in tokens.supervised)

    # ---- parts of costs

    def token_count(self, pieces: Sequence[str | Run]) -> int:
        """Tokens of an expansion on its own; differences of two such counts are exact in any context."""
        runs = [piece for piece in pieces if isinstance(piece, Run) and piece.count]
        text = "".join(piece if isinstance(piece, str) else piece.token if piece.count else "" for piece in pieces)
        return len(self.tokenizer.encode(text, special=False)) + sum(run.count - 1 for run in runs)


def _silent(record: Record) -> str:
    """What is known of a record in which nothing carries loss."""
    answered = record.tokens is not None or any(message.role == "assistant" for message in record.messages)
    return "" if answered else "a prompt without an answer"


def _count(layout: Layout, encoding: Encoding) -> TokenCounts:
    """Text tokens of a whole layout; a sample's first token is predicted from nothing, so it never carries loss."""
    text_tokens = len(encoding) - len(layout.runs)
    tail_tokens = tokens_after(encoding, layout.runs[-1].at) if layout.runs else text_tokens
    if layout.supervised is None:
        first_is_media = bool(layout.runs) and encoding.char_to_token(layout.runs[0].at) == 0
        return TokenCounts.all_supervised(text_tokens, text_tokens - (not first_is_media), tail_tokens)
    spans = covered_by_all(encoding, layout.supervised, after=1)
    supervised = sum([end - first for first, end in spans])
    for run in layout.runs:
        inside = any(start <= run.at < end for start, end in layout.supervised)
        supervised -= inside and encoding.char_to_token(run.at) != 0
    runs = Runs()
    runs.add_text(len(encoding), spans, begin=len(encoding) - tail_tokens)
    return TokenCounts(text_tokens, supervised, tail_tokens, runs.lengths())
