"""How numbers read inside sentences."""

from __future__ import annotations

from collections.abc import Mapping


def gpu_memory(size: float) -> str:
    """Bytes of a GPU's memory.

    >>> gpu_memory(3 * 2**29)
    '1.5 GiB'
    """
    return f"{size / 2**30:,.1f} GiB"


def share_text(share: float) -> str:
    """A share; those near nothing or everything keep a digit that says something.

    >>> share_text(0.314), share_text(0.001), share_text(0.0), share_text(0.9998)
    ('31.4 %', '0.10 %', '0 %', '99.98 %')
    """
    if share == 0:
        return "0 %"
    near = abs(share) < 0.005 or 0.995 <= share < 1
    return f"{100 * share:.{2 if near else 1}f} %"


def whole_percent(share: float) -> str:
    """A share that is a round number.

    >>> whole_percent(0.7)
    '70 %'
    """
    return f"{100 * share:.0f} %"


def about(number: float) -> str:
    """A number that is a mean; small ones keep a digit.

    >>> about(2.47), about(2.0), about(131.4)
    ('2.5', '2', '131')
    """
    return f"{number:,.0f}" if number >= 10 or number == round(number) else f"{number:.1f}"


def signed_percent(share: float) -> str:
    """By how much something grows or shrinks.

    >>> signed_percent(0.046), signed_percent(-0.25)
    ('+4.6 %', '-25.0 %')
    """
    return f"{100 * share:+.1f} %"


def duration(seconds: float) -> str:
    """A time that one waits for.

    >>> duration(42), duration(600), duration(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.2f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def limits_text(length: int, limits: Mapping[str, int]) -> str:
    """A length and what else is limited.

    >>> limits_text(8192, {"max_images_per_pack": 8})
    'packing_length 8,192, max_images_per_pack 8'
    """
    return ", ".join(f"{name} {value:,}" for name, value in {"packing_length": length, **limits}.items())


def counted(number: int, one: str, several: str = "") -> str:
    """A number with its noun.

    >>> counted(1, "sample"), counted(1200, "sample"), counted(2, "batch", "batches")
    ('1 sample', '1,200 samples', '2 batches')
    """
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def clock(seconds: float | None) -> str:
    """A time as clocks show it.

    >>> clock(None), clock(72.4), clock(3725)
    ('0:00', '1:12', '1:02:05')
    """
    minutes, rest = divmod(int(seconds or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
