"""Cost is reality: what the plan was made from equals what the model is given."""

from __future__ import annotations

from collections.abc import Sequence

from packtrain.batches.join import count_patches
from packtrain.core.values import Cost
from packtrain.packs.values import IGNORED, EncodedSample
from packtrain.proofs.values import Finding


def compare_costs(samples: Sequence[EncodedSample], costs: Sequence[Cost], patch_size: int) -> Finding:
    """Tokens, supervised tokens, images, videos and patches of every sample; the difference counts the wrong ones."""
    wrong = []
    for sample, cost in zip(samples, costs, strict=True):
        real = {
            "tokens": len(sample),
            "supervised_tokens": int((sample.labels != IGNORED).sum()),
            "images": sample.num_images,
            "videos": sample.num_videos,
            "patches": count_patches([sample], patch_size),
        }
        wrong += [
            f"{sample.id}: {value:,} {name.replace('_', ' ')}, computed as {getattr(cost, name):,}"
            for name, value in real.items()
            if value is not None and value != getattr(cost, name)
        ]
    return Finding(
        check="costs as computed", difference=float(len(wrong)), allowed=0.0, where=wrong[0] if wrong else ""
    )
