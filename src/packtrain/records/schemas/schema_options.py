"""How records are turned into chats: the user's settings, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packtrain.core.errors import ConfigError, nearest
from packtrain.records.schemas.objects import NORM_SCALES, compile_template
from packtrain.records.schemas.recognise import SCHEMA_COLUMNS, known_columns

ORDERINGS = ("sorted", "random", "as_is")
EMIT_NORMS = ("none", *NORM_SCALES)
_SCHEMA_NAMES = "ShareGPT is conversations, Alpaca is instruction; leave it out to detect it from the columns"


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemaOptions:
    """The settings of one dataset's conversion. `columns` maps a column's name in the data to the name used here."""

    schema: str | None = None  # None: told by the columns
    object_ordering: str = "sorted"
    emit_norm: str = "none"
    object_template: str | None = None  # jinja2 over `objects`
    object_prompt: str | None = None  # what the user message asks about the image; "" for the image alone
    coord_tokens: bool = False
    formatting_func: str | None = None  # module:function
    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.schema is not None:
            _one_of("data.schema", self.schema, tuple(SCHEMA_COLUMNS), _SCHEMA_NAMES)
        _one_of("data.object_ordering", self.object_ordering, ORDERINGS, "")
        _one_of("data.emit_norm", self.emit_norm, EMIT_NORMS, "")
        if self.coord_tokens:
            raise ConfigError(
                "data.coord_tokens",
                got=self.coord_tokens,
                expected="false: special coordinate tokens are experimental, and not supported",
                fix="set it to false, as its own recommended config does, and choose emit_norm: norm1000",
            )
        if self.object_template is not None:
            compile_template(self.object_template)
        if self.formatting_func is not None and not all(self.formatting_func.partition(":")):
            raise ConfigError("data.formatting_func", got=self.formatting_func, expected="module:function", fix="")
        for theirs, ours in self.columns.items():
            if ours not in known_columns():
                raise ConfigError(
                    f"data.columns.{theirs}",
                    got=ours,
                    expected="the name of a column that a schema reads; written as {name in the data: name here}",
                    fix=nearest(ours, known_columns()) or "one of " + ", ".join(known_columns()),
                )


def _one_of(where: str, got: object, allowed: tuple[str, ...], fix: str) -> None:
    if got not in allowed:
        fix = nearest(str(got), allowed) or fix
        raise ConfigError(where, got=got, expected="one of " + ", ".join(allowed), fix=fix)
