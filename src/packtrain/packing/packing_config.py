"""How samples are packed: the user's choices, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np

from packtrain.core.errors import ConfigError, nearest
from packtrain.packing.arrays import WRAPPED, Effort, check_strategy

Overlong = Literal["drop", "truncate", "split", "error"]
Side = Literal["right", "left"]
# The limits of a pack: the setting's name, and the resource that it bounds.
LIMITS: Mapping[str, str] = {
    "packing_length": "tokens",
    "max_images_per_pack": "images",
    "max_patches_per_pack": "patches",
    "max_vision_tokens_per_pack": "vision_tokens",
    "max_videos_per_pack": "videos",
    "max_frames_per_pack": "frames",
    "max_samples_per_pack": "samples",
    "max_attention_per_pack": "attention",
}
SETTING_OF: Mapping[str, str] = {resource: setting for setting, resource in LIMITS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig:
    """Everything that decides which samples share a pack."""

    packing_length: int  # tokens of one pack
    packing_strategy: str = "best_fit"
    effort: Effort = "fast"  # with several limits: how long to look for better packs
    max_images_per_pack: int | None = None
    max_patches_per_pack: int | None = None
    max_vision_tokens_per_pack: int | None = None
    max_videos_per_pack: int | None = None
    max_frames_per_pack: int | None = None
    max_samples_per_pack: int | None = None
    max_attention_per_pack: int | None = None  # sum of squared lengths
    pack_alignment: int = 1  # each sample is padded to a multiple of this many tokens
    max_packs: int | None = None  # of an epoch; samples of the others wait in the ledger
    cutoff_len: int | None = None  # tokens of a sample: what is longer is cut, before anything is packed
    truncate_side: Side = "right"  # where it is cut
    overlong: Overlong = "drop"
    packing_window: int | None = None  # pack within windows of this many consecutive samples; None: all together
    packing_min_fill_ratio: float = 0.0  # packs of a window that are emptier are packed again with the next window
    packing_buffer: int = 1024  # look-ahead, in samples, of the packer for streams that cannot be measured first
    packing_drop_last: bool = False  # leave out the packs that do not make a whole step
    packs_per_step: int = 1  # what a whole step is, for packing_drop_last
    epochs: int = 1
    repack_each_epoch: bool = True
    shuffle: bool = True  # off: samples are taken in the dataset's order
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (*LIMITS, *_COUNTS):
            _check_count(name, getattr(self, name), optional=_DEFAULTS.get(name, 0) is None)
        check_strategy(self.packing_strategy)
        words = (("effort", get_args(Effort)), ("overlong", get_args(Overlong)), ("truncate_side", get_args(Side)))
        for name, allowed in words:
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(name, got=value, expected=", ".join(allowed), fix=nearest(str(value), allowed))
        for name in ("packing_drop_last", "repack_each_epoch", "shuffle"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, got=repr(getattr(self, name)), expected="true or false")
        ratio = self.packing_min_fill_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise ConfigError("packing_min_fill_ratio", got=ratio, expected="a share from 0 to 1")
        if self.pack_alignment > max(1, self.packing_length // 2):
            raise ConfigError("pack_alignment", got=self.pack_alignment, expected="at most half of packing_length")
        if self.packing_strategy == WRAPPED:
            self._check_wrapped()
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError("seed", got=self.seed, expected="an integer of at least 0")

    def _check_wrapped(self) -> None:
        """Packs are filled by tokens alone, and nothing is too long for them."""
        others = [name for name in LIMITS if name != "packing_length" and getattr(self, name) is not None]
        if self.pack_alignment > 1:
            others.append("pack_alignment")
        if self.overlong not in ("drop", "split"):
            others.append(f"overlong: {self.overlong}")
        if others:
            raise ConfigError(
                "packing_strategy",
                got=f"wrapped with {', '.join(others)}",
                expected="only packing_length: samples are cut where a pack is full",
                fix="leave these out, or choose best_fit",
            )

    def capacities(self) -> dict[str, int]:
        """The limits that are set, by resource; tokens first."""
        limits = {resource: getattr(self, setting) for setting, resource in LIMITS.items()}
        return {resource: limit for resource, limit in limits.items() if limit is not None}

    @property
    def cuts(self) -> bool:
        """May a pack hold a part of a sample?"""
        return self.cutoff_len is not None or self.overlong in ("truncate", "split") or self.packing_strategy == WRAPPED

    def aligned(self, tokens: np.ndarray) -> np.ndarray:
        """How much of a pack samples of these lengths take."""
        return -(-tokens // self.pack_alignment) * self.pack_alignment

    def limited(self, limits: Mapping[str, int]) -> PackingConfig:
        """The same with other limits, by the names of their settings."""
        return replace(self, **limits)  # type: ignore[arg-type]

    def describe(self) -> dict[str, Any]:
        """As plain values, for files."""
        return asdict(self)

    def given(self) -> dict[str, Any]:
        """The values that are not the defaults, for fingerprints: a setting that is new changes none."""
        return {name: value for name, value in asdict(self).items() if value != _DEFAULTS[name]}


_COUNTS = (
    *("pack_alignment", "max_packs", "cutoff_len", "packing_window", "packing_buffer", "packs_per_step", "epochs"),
)
_DEFAULTS = {field.name: field.default for field in fields(PackingConfig)}


def _check_count(name: str, value: object, *, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**62:
        fix = "leave it out for no limit" if optional else ""
        raise ConfigError(name, got=repr(value), expected="a positive integer", fix=fix)
