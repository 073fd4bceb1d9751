"""A record and its media headers in, its exact cost out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from packtrain.core.errors import ConfigError, RecordError, nearest
from packtrain.core.values import Cost, Media, MediaHeader, Record
from packtrain.families.base import Family, ProcessorSettings, Run
from packtrain.families.layout import Layout, Layouter, LossOn
from packtrain.families.skeleton import Skeletons
from packtrain.families.tokenizer import LightTokenizer

__all__ = ["LossOn", "RecordEncoder"]


class RecordEncoder:
    """Costs of records for one model, one set of media limits and one rule of what carries loss."""

    def __init__(
        self,
        settings: ProcessorSettings,
        family: Family,
        *,
        loss_on: LossOn | None = None,
        add_eos: bool = False,
        typed: bool = False,
    ) -> None:
        names = get_args(LossOn)
        if loss_on is not None and loss_on not in names:
            raise ConfigError("loss_on", got=loss_on, expected=", ".join(names), fix=nearest(loss_on, names))
        self.tokenizer = LightTokenizer(settings)
        self.layouter = Layouter(settings, family, self.tokenizer, loss_on=loss_on, add_eos=add_eos, typed=typed)
        self._skeletons = Skeletons(self.layouter)

    def layout(self, record: Record, headers: Sequence[MediaHeader]) -> Layout:
        """The text that will be tokenized, where its media runs stand and which characters carry loss."""
        return self._skeletons.layout(record, headers)

    def cost(self, record: Record, headers: Sequence[MediaHeader]) -> tuple[Cost, tuple[bool, ...]]:
        """The record's cost, and for each medium whether it stands where loss is taken."""
        layout = self.layout(record, headers)
        return self.cost_of(record, headers, layout, self.tokenizer.encode(layout.text, special=layout.special))

    def cost_of(
        self, record: Record, headers: Sequence[MediaHeader], layout: Layout, encoding: Any
    ) -> tuple[Cost, tuple[bool, ...]]:
        """As `cost`, for a layout that has been tokenized already."""
        text_tokens = len(encoding) - len(layout.runs)
        if text_tokens < 1:
            raise RecordError("template", "no tokens")
        supervised = self._supervised(layout, encoding, text_tokens)
        if supervised < 1:
            raise RecordError("loss", "no supervised tokens")
        counted = {"image": 0, "video": 0}
        for run in layout.runs:
            counted[run.kind] += run.count
        images = sum([header.kind == "image" for header in headers])
        expansions = layout.expansions
        cost = Cost(
            tokens=text_tokens + counted["image"] + counted["video"],
            text_tokens=text_tokens,
            image_tokens=counted["image"],
            video_tokens=counted["video"],
            images=images,
            videos=len(headers) - images,
            frames=sum([expansion.frames for expansion in expansions]),
            objects=record.objects,
            patches=sum([expansion.patches for expansion in expansions]),
            max_patches_per_image=max([expansion.max_patches for expansion in expansions], default=0),
            supervised_tokens=supervised,
        )
        return cost, layout.media_supervised

    def supervised_text(self, record: Record) -> int | None:
        """Text tokens that carry loss, for a family whose media are counted by its processor; None means all text."""
        if any(isinstance(part, Media) for m in record.messages if m.role == "assistant" for part in m.parts):
            raise RecordError("processor", "media in an assistant message")
        layout = self.layouter.rendered(record)
        if layout.supervised is None:
            return None
        return self._supervised(layout, self.tokenizer.encode(layout.text, special=layout.special), 0)

    def token_count(self, pieces: Sequence[str | Run]) -> int:
        """Tokens of an expansion on its own; differences of two such counts are exact in any context."""
        runs = [piece for piece in pieces if isinstance(piece, Run) and piece.count]
        text = "".join(piece if isinstance(piece, str) else piece.token if piece.count else "" for piece in pieces)
        return len(self.tokenizer.encode(text, special=False)) + sum(run.count - 1 for run in runs)

    @staticmethod
    def _supervised(layout: Layout, encoding: Any, text_tokens: int) -> int:
        """Text tokens that carry loss; a sample's first token is predicted from nothing, so it never does."""
        if layout.supervised is None:
            first_is_media = bool(layout.runs) and encoding.char_to_token(layout.runs[0].at) == 0
            return text_tokens - (not first_is_media)
        total = 0
        for start, end in layout.supervised:
            first = _token_at(encoding, start, end, 1)
            last = _token_at(encoding, end - 1, start - 1, -1)
            if first is None or last is None:
                continue
            total += last - first + 1 - (first == 0)
            total -= sum([start <= run.at < end for run in layout.runs])
        return total


def _token_at(encoding: Any, at: int, stop: int, step: int) -> int | None:
    """The token that covers a character, or the next character that any token covers, before `stop`."""
    while at != stop:
        token = encoding.char_to_token(at)
        if token is not None:
            return int(token)
        at += step
    return None
