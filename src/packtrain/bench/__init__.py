"""The benchmarks of `packtrain bench`: each compares alternatives within one run.

Takes sizes and a model's name, makes its own data, and gives a result of measured times, speed-ups and memory that
`printing` shows as tables. `bench_pack` needs no GPU and no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.bench.families import bench_families as bench_families
    from packtrain.bench.loader import bench_loader as bench_loader
    from packtrain.bench.measure import bench_measure as bench_measure
    from packtrain.bench.pack import bench_pack as bench_pack
    from packtrain.bench.train import bench_train as bench_train

__getattr__, __dir__, __all__ = lazy_names(__name__)
