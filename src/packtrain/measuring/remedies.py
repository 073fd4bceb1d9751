"""Fixes for unusable records, by reason: an option, another model, or other data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packtrain.measuring.request import Request

_BY_REASON = {
    "media: file not found": "set the folder that these paths start from (--media-root)",
    "media: path outside the media root": "set a folder that holds them all (--media-root), or allow any path "
    "(--allow-outside-root)",
    "media: remote media are not fetched": "download the media, and replace the URLs by their paths",
    "family: audio has no token rule yet": "leave the audio out: no model family here supports it",
    "template: the chat template refused the record": "change the records, or use another template "
    "(--chat-template FILE)",
}
_NOT_WRITTEN = "template: the chat template does not write "  # tools, their answers, reasoning
_OF_MODEL = ("template: ", "family: ")  # stages in which a model says what it takes
_PLACES = ("media: file not found", "media: path outside the media root")


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedies:
    """What is known of a measurement that helps to say what to do."""

    ledger: str = ""  # the file that names each record
    roots: tuple[str, ...] = ()  # where the media paths of each source start
    model: str = ""  # by its user's name
    lacks: Mapping[str, str] = field(default_factory=dict)  # of the model, by reason, with what to do

    def example(self, reason: str, entry: Mapping[str, object], source: int) -> str:
        """The first record with this fault, and where its media were looked for."""
        detail = f" {entry['detail']}" if entry["detail"] else ""
        if reason in _PLACES and source < len(self.roots):
            detail += f", from the media root {self.roots[source]}"
        elif reason.startswith(_OF_MODEL) and self.model:
            detail += f"{',' if detail else ''} with the model {self.model}"
        return f"{entry['origin']}:{detail}" if detail else str(entry["origin"])

    def to_do(self, reason: str) -> str:
        """The fix for this reason, unless the record itself is wrong."""
        if reason in self.lacks:
            return self.lacks[reason]
        if " takes no " in reason:
            kind = reason.rpartition(" ")[2]
            return f"use a model that takes {kind}s, or leave the {kind}s out"
        if reason.startswith(_NOT_WRITTEN):
            what = reason.removeprefix(_NOT_WRITTEN)
            return f"use a model whose chat template writes {what}, or such a template (--chat-template FILE)"
        return _BY_REASON.get(reason, "")

    def listed(self) -> str:
        """Where all of them are named."""
        return f"{self.ledger} lists each record" if self.ledger else "the ledger lists each record"


def remedies_of(request: Request, ledger: Path, model: str | None = None) -> Remedies:
    """For one measurement; `model` is the user's name of it."""
    settings = request.settings()
    name = model or request.model
    lacks = {}
    if settings.chat_template is None:
        own = "use your own (--chat-template FILE), or an instruction-tuned model"
        lacks["template: the model has no chat template"] = f"model {name} has no chat template: {own}"
    roots = tuple(spec.media_root for spec in request.specs)
    return Remedies(ledger=os.fspath(ledger), roots=roots, model=name, lacks=lacks)
