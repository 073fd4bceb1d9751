"""How numbers, sizes, times and names read, in sentences, tables and pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

MIB, GIB = 1 << 20, 1 << 30
MISSING = "–"
_BYTES = (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10))
_LARGE = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


def count(value: float) -> str:
    """A whole number.

    >>> count(132555558)
    '132,555,558'
    """
    return f"{round(value):,}"


def decimal(value: float) -> str:
    """A mean or another number that need not be whole; small ones keep more digits.

    >>> decimal(1333.72), decimal(15.3), decimal(0.0421)
    ('1,334', '15.3', '0.042')
    """
    size = abs(value)
    if value == round(value) or size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def large(value: float) -> str:
    """A large count, shortened.

    >>> large(132555558), large(950), large(999_950)
    ('132.6 M', '950', '1.0 M')
    """
    for unit, size in _LARGE:
        if abs(value) >= size * 0.99995:
            return f"{value / size:.1f} {unit}"
    return decimal(value)


def tick(value: float) -> str:
    """A number along an axis, shortened only where nothing is lost.

    >>> tick(20_000), tick(2_500), tick(16_384), tick(1_500_000)
    ('20,000', '2,500', '16,384', '1.5 M')
    """
    return decimal(value) if abs(value) < 1e6 else large(value).replace(".0 ", " ")


def percent(value: float) -> str:
    """A share; what is not everything never reads as 100 %, and what is not nothing never as 0 %.

    >>> percent(0.4321), percent(0.99996), percent(1.0), percent(0.00001), percent(0.9987)
    ('43.2 %', '> 99.99 %', '100 %', '< 0.01 %', '99.87 %')
    """
    if value in (0, 1):
        return f"{value:.0%}".replace("%", " %")
    if 0 < value < 0.00005:
        return "< 0.01 %"
    if 0.99995 <= value < 1:
        return "> 99.99 %"
    digits = 2 if abs(value) < 0.01 or 0.99 <= value < 1 else 1
    return f"{100 * value:.{digits}f} %"


def memory(value: float) -> str:
    """Bytes in the unit that fits.

    >>> memory(41 * 2**30), memory(300 * 2**20), memory(0)
    ('41.0 GiB', '300.0 MiB', '0 B')
    """
    for unit, size in _BYTES:
        if abs(value) >= size * 0.99995:
            return f"{value / size:,.1f} {unit}"
    return f"{value:.0f} B"


def gib(value: float) -> str:
    """Bytes in GiB, so that a column can be compared; less than 0.1 GiB, as of tiny models, in smaller units.

    >>> gib(41 * 2**30), gib(3 * 2**20), gib(-(2**10)), gib(0)
    ('41.0 GiB', '3.0 MiB', '−1.0 KiB', '0 GiB')
    """
    if not value:
        return "0 GiB"
    return (f"{value / GIB:,.1f} GiB" if abs(value) >= 0.1 * GIB else memory(value)).replace("-", "−")


def times(value: float) -> str:
    """A ratio of speeds.

    >>> times(4.2987)
    '4.30×'
    """
    return f"{value:,.2f}×"


def ratio(value: float) -> str:
    """A ratio close to one, such as slowest rank over mean.

    >>> ratio(1.0312)
    '1.031'
    """
    return f"{value:.3f}"


def loss(value: float) -> str:
    """A loss or a gradient norm: four digits that say something.

    >>> loss(11.93512), loss(0.0412345), loss(2.0), loss(1234567.0)
    ('11.94', '0.04123', '2.000', '1.235e+06')
    """
    return f"{value:#.4g}" if 1e-4 <= abs(value) < 1e4 else f"{value:.3e}" if value else "0"


def rate(value: float) -> str:
    """A learning rate.

    >>> rate(2e-5), rate(0.001), rate(0), rate(1.23456e-5)
    ('2e-5', '0.001', '0', '1.235e-5')
    """
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e+")


def duration(seconds: float) -> str:
    """A time in the unit that fits: of a step, of a run, or the age of a file.

    >>> duration(0), duration(0.0421), duration(2.0412), duration(600), duration(9000), duration(300_000)
    ('0 s', '42.1 ms', '2.04 s', '10 min', '2.5 h', '3.5 d')
    """
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{1000 * seconds:.3g} ms"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def elapsed(value: float) -> str:
    """A time that has passed, to the second.

    >>> elapsed(0.4), elapsed(42.2), elapsed(143), elapsed(9000)
    ('400 ms', '42.2 s', '2 min 23 s', '2 h 30 min')
    """
    whole = round(value)
    if whole < 120:
        return duration(value)
    return f"{whole // 60} min {whole % 60} s" if whole < 7200 else f"{whole // 3600:,} h {whole % 3600 // 60} min"


FORMATS: dict[str, Callable[[float], str]] = {
    function.__name__: function
    for function in (
        count,
        decimal,
        large,
        percent,
        memory,
        gib,
        times,
        ratio,
        duration,
        loss,
        rate,
        elapsed,
    )
}


def format_number(kind: str, value: float | None) -> str:
    """A number in one of the formats; a dash where there is none."""
    return MISSING if value is None else FORMATS[kind](value)


def shown(text: object, limit: int = 80) -> str:
    """A name from data as one safe line: no control characters or direction marks, the middle of long ones left out.

    >>> shown("a" * 50 + "b" * 50, 11), shown("two\\nlines")
    ('aaaaa…bbbbb', 'two�lines')
    """
    line = str(text)
    if len(line) > limit:
        half = (limit - 1) // 2
        line = f"{line[:half]}…{line[-half:]}"
    return "".join(char if char.isprintable() else "\ufffd" for char in line)


def isolate(text: object, limit: int = 80) -> str:
    """A name inside a sentence that may run in the other direction: it does not turn the text around it."""
    return f"\u2068{shown(text, limit)}\u2069"


def exact_percent(share: float) -> str:
    """A share that was set, such as a limit or a tick, with all its digits.

    >>> exact_percent(0.7), exact_percent(0.005)
    ('70 %', '0.5 %')
    """
    return f"{100 * share:g} %"


def signed_percent(share: float) -> str:
    """Relative growth or decrease.

    >>> signed_percent(0.046), signed_percent(-0.25)
    ('+4.6 %', '-25.0 %')
    """
    return f"{100 * share:+.1f} %"


def clock(seconds: float | None) -> str:
    """A time as clocks show it.

    >>> clock(None), clock(72.4), clock(3725)
    ('0:00', '1:12', '1:02:05')
    """
    minutes, rest = divmod(int(seconds or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counted(number: int, one: str, several: str = "") -> str:
    """A number with its noun.

    >>> counted(1, "sample"), counted(1200, "sample"), counted(2, "batch", "batches")
    ('1 sample', '1,200 samples', '2 batches')
    """
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def limits_text(length: int, limits: Mapping[str, int]) -> str:
    """A length and what else is limited.

    >>> limits_text(8192, {"max_images_per_pack": 8})
    'packing_length 8,192, max_images_per_pack 8'
    """
    return ", ".join(f"{name} {value:,}" for name, value in {"packing_length": length, **limits}.items())
