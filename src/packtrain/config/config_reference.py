"""The settings of a config as a page of documentation; `python -m packtrain.config.config_reference FILE` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from packtrain.config.section import Key, Section
from packtrain.config.sections import MEDIA_LIMITS, MONITOR_LIMITS, SECTIONS, TRAINER_KEYS

BEGIN, END = "<!-- settings: written from the code -->", "<!-- end of settings -->"


def reference() -> str:
    """Every setting with its default and meaning, by section."""
    return "\n".join([BEGIN, "", *_pages(), END])


def written(page: str) -> str:
    """A page of documentation with the settings as they are now."""
    before, _, rest = page.partition(BEGIN)
    return before + reference() + rest.partition(END)[2]


def _pages() -> Iterator[str]:
    for name, section in SECTIONS.items():
        own = {key: one for key, one in section.known().items() if one.help}
        yield from (f"## {name}", "", *_table(own), "")
        if name == "data":
            yield from ("In `processor_config`, or anywhere in the file:", "", *_table(MEDIA_LIMITS), "")
        if name == "training":
            yield from (*_passed_on(section), "", "In `monitors`:", "", *_table(MONITOR_LIMITS), "")


def _table(keys: Mapping[str, Key]) -> Iterator[str]:
    yield from ("| key | default | |", "|---|---|---|")
    for name, one in keys.items():
        also = f" Also: {', '.join(f'`{alias}`' for alias in one.aliases)}." if one.aliases else ""
        yield f"| `{name}` | {one.default_words} | {one.help}{also} |"


def _passed_on(section: type[Section]) -> Iterator[str]:
    known = section.known()
    others = [f"`{name}`" for name in TRAINER_KEYS if not known[name].help]
    yield "Passed on to transformers.TrainingArguments, which describes them: " + ", ".join(others) + "."


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(written(file.read_text(encoding="utf-8")), encoding="utf-8")
