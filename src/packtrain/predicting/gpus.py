"""The GPUs that plans can be made for, and finding one by the name that people or drivers give it.

Figures are the vendors': dense bf16 without sparsity, and where memory is concerned what a driver leaves to a process,
which is less than the number in the name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from packtrain.core.errors import ConfigError, nearest
from packtrain.core.numbers import GIB

_PCIE3, _PCIE4, _PCIE5 = 16.0, 32.0, 64.0  # GB/s in one direction


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU, or one die where a card has two that appear as two GPUs."""

    name: str
    memory_bytes: int  # that a process can use
    bf16_flops: float  # dense matrix products per second; fp16 where there is no bf16
    bandwidth: float  # bytes per second of its memory
    link_bandwidth: float  # bytes per second to its neighbours, in one direction
    notes: str = ""


def _gpu(name: str, gib: float, tera: float, memory: float, link: float, notes: str = "") -> Gpu:
    """Units as data sheets have them: GiB, TFLOP/s, GB/s, GB/s."""
    return Gpu(
        name=name,
        memory_bytes=int(gib * GIB),
        bf16_flops=tera * 1e12,
        bandwidth=memory * 1e9,
        link_bandwidth=link * 1e9,
        notes=notes,
    )


_NO_BF16 = "no bf16: the figure is fp16"
_CONSUMER = "bf16 with fp32 accumulation; no direct path between GPUs"
_ALL = (
    _gpu("h200", 139.8, 989, 4800, 450),
    _gpu("h100", 79.1, 989, 3350, 450, "SXM, 80 GB"),
    _gpu("h100-pcie", 79.1, 756, 2000, _PCIE5, "bridges between pairs are faster than PCIe"),
    _gpu("h100-nvl", 93.0, 835, 3900, 300, "the link is the bridge of a pair"),
    _gpu("h800", 79.1, 989, 3350, 200),
    _gpu("h20", 95.0, 148, 4000, 450),
    _gpu("b200", 178.3, 2250, 7700, 900),
    _gpu("b100", 178.3, 1750, 7700, 900, "announced figures"),
    _gpu("gb200", 184.0, 2500, 8000, 900, "one of the two GPUs of a superchip"),
    _gpu("a100-80", 79.1, 312, 2039, 300, "SXM; the PCIe card has 1,935 GB/s"),
    _gpu("a100-40", 39.4, 312, 1555, 300),
    _gpu("a800", 79.1, 312, 2039, 200),
    _gpu("l40s", 44.4, 362, 864, _PCIE4),
    _gpu("l40", 44.4, 181, 864, _PCIE4),
    _gpu("l4", 22.0, 121, 300, _PCIE4),
    _gpu("a10", 22.0, 125, 600, _PCIE4),
    _gpu("a10g", 22.0, 70, 600, _PCIE4),
    _gpu("a6000", 47.4, 155, 768, _PCIE4, "RTX A6000; a bridge joins pairs at 56 GB/s"),
    _gpu("rtx6000-ada", 47.4, 364, 960, _PCIE4),
    _gpu("rtx-pro-6000", 94.9, 504, 1792, _PCIE5, "Blackwell, 96 GB"),
    _gpu("4090", 23.5, 165, 1008, _PCIE4, _CONSUMER),
    _gpu("3090", 23.6, 71, 936, _PCIE4, "bf16 with fp32 accumulation; a bridge joins pairs at 56 GB/s"),
    _gpu("5090", 31.3, 210, 1792, _PCIE5, _CONSUMER),
    _gpu("v100-32", 31.7, 125, 900, 150, _NO_BF16),
    _gpu("v100-16", 15.7, 125, 900, 150, _NO_BF16),
    _gpu("t4", 14.6, 65, 320, _PCIE3, _NO_BF16),
    _gpu("mi300x", 191.6, 1307, 5300, 448),
    _gpu("mi325x", 255.6, 1307, 6000, 448),
    _gpu("mi250", 63.9, 181, 1638, 100, "one of the two dies of a card"),
)
CATALOGUE: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _ALL}
# What a GPU of one's own may have instead, in the units of data sheets.
_FIGURES: Mapping[str, tuple[str, float]] = {
    "memory_gib": ("memory_bytes", GIB),
    "tflops": ("bf16_flops", 1e12),
    "bandwidth_gbs": ("bandwidth", 1e9),
    "link_gbs": ("link_bandwidth", 1e9),
}
_MOST = 1e6
# Words that name a maker, a series or a form, not a GPU.
_NOISE = re.compile(
    r"nvidia|geforce|tesla|quadro|amd|instinct|generation|blackwell|workstation|server|edition"
    r"|sxm\d?|oam|hbm\d?e?|gpu|[\s_\-./()]"
)
# What is left of other names once those words are gone.
_ALIASES: Mapping[str, str] = {
    "h200141gb": "h200",
    "h10080gb": "h100",
    "h10080": "h100",
    "h10080gbpcie": "h100-pcie",
    "h100pcie80gb": "h100-pcie",
    "h100nvl94gb": "h100-nvl",
    "h10094gb": "h100-nvl",
    "h80080gb": "h800",
    "h2096gb": "h20",
    "a10080gb": "a100-80",
    "a10080gbpcie": "a100-80",
    "a100pcie80gb": "a100-80",
    "a10040gb": "a100-40",
    "a100pcie40gb": "a100-40",
    "a80080gb": "a800",
    "a80080gbpcie": "a800",
    "rtxa6000": "a6000",
    "rtx6000ada": "rtx6000-ada",
    "6000ada": "rtx6000-ada",
    "rtxpro6000": "rtx-pro-6000",
    "pro6000": "rtx-pro-6000",
    "rtxpro600096gb": "rtx-pro-6000",
    "rtx4090": "4090",
    "rtx3090": "3090",
    "rtx5090": "5090",
    "v10032gb": "v100-32",
    "v100pcie32gb": "v100-32",
    "v10016gb": "v100-16",
    "v100pcie16gb": "v100-16",
    "mi300": "mi300x",
    "mi325": "mi325x",
    "mi250x": "mi250",
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name: `h200`, `NVIDIA H200`, `H100-80GB` and what a driver reports are all understood.

    One that is not listed is described by what differs from one that is.

    >>> gpu = find_gpu("h100,memory_gib=64,tflops=400")
    >>> gpu.memory_bytes >> 30, gpu.bf16_flops, gpu.bandwidth == find_gpu("h100").bandwidth
    (64, 400000000000000.0, True)
    """
    name, *figures = str(name).split(",")
    if figures:
        return _changed(find_gpu(name), figures)
    plain = _plain(name)
    table = {**_ALIASES, **{_plain(known): known for known in CATALOGUE}}
    if plain in table:
        return CATALOGUE[table[plain]]
    several = [known for known in CATALOGUE if plain and known.startswith(f"{plain}-")]
    own = "or the one nearest to yours with your figures, as in h100,memory_gib=64,tflops=400"
    hint = f"there are several: {', '.join(several)}" if several else nearest(plain, CATALOGUE) or nearest(plain, table)
    raise ConfigError(
        "gpu",
        got=name,
        expected="one of " + ", ".join(sorted(CATALOGUE)),
        fix="; ".join(filter(None, (hint, own))),
    )


def _changed(gpu: Gpu, figures: Sequence[str]) -> Gpu:
    """This GPU with other figures, and with a name that finds them again."""
    given: dict[str, float] = {}
    for figure in figures:
        name, _, text = figure.strip().partition("=")
        with suppress(ValueError):
            if name in _FIGURES and name not in given and 0 < float(text) < _MOST:
                given[name] = float(text)
                continue
        raise ConfigError(
            "gpu",
            got=figure.strip(),
            expected=f"a positive number, once, for one of {', '.join(_FIGURES)}, as in tflops=400",
        )
    shown = ",".join((gpu.name, *(f"{name}={value:g}" for name, value in sorted(given.items()))))
    changed = {_FIGURES[name][0]: value * _FIGURES[name][1] for name, value in given.items()}
    memory = int(changed.pop("memory_bytes", gpu.memory_bytes))
    return replace(gpu, name=shown, notes=f"as {gpu.name} otherwise", memory_bytes=memory, **changed)


def _plain(name: str) -> str:
    return _NOISE.sub("", name.lower())
