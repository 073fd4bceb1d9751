"""Packed against alone: how far apart logits, loss and gradients are, and how far they may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from packtrain.core.values import Cost
from packtrain.delivery.collate.join import count_patches
from packtrain.delivery.encode.encoded_sample import IGNORED, EncodedSample
from packtrain.verifying.comparison_passes import Gradients, PassOutcome
from packtrain.verifying.verdict import Finding

FP32_TOLERANCE = 1e-5
TIMES_ALONE = 2.0  # in half precision: how much further from fp32 than the sample alone
# Gradients below this share of the largest tensor's are mostly rounding: they are measured against it instead.
GRADIENT_FLOOR = 1e-2


class Judge(Protocol):
    """A way to tell differences that mean something from rounding."""

    def describe(self) -> tuple[str, ...]:
        """How it judges, in sentences."""
        ...

    def logits(self, mode: str, found: Sequence[Tensor]) -> list[Finding]:
        """The logits of every sample."""
        ...

    def loss(self, mode: str, found: PassOutcome) -> Finding:
        """The loss of the whole row."""
        ...

    def gradients(self, mode: str, found: Gradients) -> list[Finding]:
        """The gradient of every parameter."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FullPrecision:
    """fp32: packed and alone are equal up to rounding."""

    samples: Sequence[EncodedSample]
    reference: PassOutcome

    def describe(self) -> tuple[str, ...]:
        return (
            f"logits: largest |packed - alone| of any token, over max(1, largest |alone|) of its sample; at most "
            f"{FP32_TOLERANCE:g}",
            f"loss (sum over supervised tokens / their number): |packed - alone| over max(1, alone); at most "
            f"{FP32_TOLERANCE:g}",
            "gradients: norm of packed - alone over the norm of alone, tensor by tensor (tensors with less than "
            f"{GRADIENT_FLOOR:.0%} of the largest norm: over that); at most {FP32_TOLERANCE:g}",
        )

    def logits(self, mode: str, found: Sequence[Tensor]) -> list[Finding]:
        each = [
            _worst_token(sample, one, ours)
            for sample, one, ours in zip(self.samples, self.reference.logits, found, strict=True)
        ]
        return [largest(f"logits ({mode})", each, FP32_TOLERANCE)]

    def loss(self, mode: str, found: PassOutcome) -> Finding:
        difference = abs(found.loss - self.reference.loss) / max(1.0, abs(self.reference.loss))
        where = f"{found.loss:.6f} packed, {self.reference.loss:.6f} alone"
        return Finding(check=f"loss ({mode})", difference=difference, allowed=FP32_TOLERANCE, where=where)

    def gradients(self, mode: str, found: Gradients) -> list[Finding]:
        each = gradient_differences(self.reference.gradients, found)
        return [largest(f"gradients ({mode})", each, FP32_TOLERANCE)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HalfPrecision:
    """bf16, fp16: packed is no further from fp32 than the sample alone is, up to a factor of two."""

    samples: Sequence[EncodedSample]
    reference: PassOutcome  # alone, in fp32
    yardstick: PassOutcome  # alone, in the precision that is judged

    def describe(self) -> tuple[str, ...]:
        return (
            f"reference: the same weights in fp32, every sample alone; packed may be {TIMES_ALONE:g} times as far from "
            "it as the sample alone is in the same precision",
            "logits: root mean square over each sample, and the largest of any token over all samples",
            "loss (sum over supervised tokens / their number): against the root mean square over the tokens' losses",
            "gradients: norm of the difference over the norm, of all parameters as one vector and of each tensor; "
            "where a tensor alone is closer than the average one, the average counts. On a CPU biases and scales are "
            "compared in the vector only: torch sums their gradients in half precision there",
        )

    def logits(self, mode: str, found: Sequence[Tensor]) -> list[Finding]:
        pairs = [
            (sample.id, _rms(ours.float() - one.float()), _rms(theirs.float() - one.float()))
            for sample, one, theirs, ours in zip(
                self.samples, self.reference.logits, self.yardstick.logits, found, strict=True
            )
        ]
        name, packed, alone = max(pairs, key=lambda pair: _ratio(pair[1], pair[2]))
        mean = Finding(check=f"logits ({mode})", difference=packed, allowed=TIMES_ALONE * alone, where=name)
        ours_worst = [_far(one, ours) for one, ours in zip(self.reference.logits, found, strict=True)]
        alone_worst = [_far(one, its) for one, its in zip(self.reference.logits, self.yardstick.logits, strict=True)]
        worst = Finding(
            check=f"logits, worst ({mode})",
            difference=_max(ours_worst),
            allowed=TIMES_ALONE * _max(alone_worst),
            where=self.samples[ours_worst.index(_max(ours_worst))].id,
        )
        return [mean, worst]

    def loss(self, mode: str, found: PassOutcome) -> Finding:
        alone = _rms(torch.cat(self.yardstick.losses) - torch.cat(self.reference.losses))
        return Finding(
            check=f"loss ({mode})",
            difference=abs(found.loss - self.reference.loss),
            allowed=TIMES_ALONE * alone,
            where=f"{found.loss:.5f} packed, {self.yardstick.loss:.5f} alone, {self.reference.loss:.5f} in fp32",
        )

    def gradients(self, mode: str, found: Gradients) -> list[Finding]:
        reference, yardstick = self.reference.gradients, self.yardstick.gradients
        whole = Finding(
            check=f"gradients ({mode})",
            difference=_whole_difference(reference, found),
            allowed=TIMES_ALONE * _whole_difference(reference, yardstick),
            where="all parameters as one vector",
        )
        alone = _judged_alone(reference, yardstick)
        average = (sum(value * value for value in alone.values()) / max(1, len(alone))) ** 0.5
        each = _judged_alone(reference, found)
        name = max(each, key=lambda name: _ratio(each[name], max(alone.get(name, 0.0), average)))
        allowed = TIMES_ALONE * max(alone.get(name, 0.0), average)
        worst = Finding(check=f"gradients, worst ({mode})", difference=each[name], allowed=allowed, where=name)
        return [whole, worst]


# ---- what is exact


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


def compare_labels(samples: Sequence[EncodedSample], labels: Tensor, firsts: Sequence[int]) -> Finding:
    """Every label in its place, none on a sample's first token: the token before it belongs to a neighbour."""
    expected = torch.full_like(labels, IGNORED)
    for start, sample in zip(firsts, samples, strict=True):
        expected[start : start + len(sample)] = sample.labels.to(labels.device)
    expected[list(firsts)] = IGNORED
    wrong = (labels != expected).nonzero().flatten().tolist()
    across = [at for at in wrong if at in firsts]
    where = ""
    if across:
        where = f"the first token of {samples[firsts.index(across[0])].id} is predicted from its neighbour (loss mask)"
    elif wrong:
        where = f"token {wrong[0]} of the row: {int(labels[wrong[0]])} instead of {int(expected[wrong[0]])}"
    return Finding(check="labels", difference=float(len(wrong)), allowed=0.0, where=where)


# ---- differences


def _judged_alone(reference: Gradients, found: Gradients) -> dict[str, float]:
    """The differences of tensors that can be judged one by one.

    Not those of norms on a CPU: the gradient of a bias was off by 2 % after 256 rows, by 30 % after 4,096.
    """
    shapes = {**reference, **found}
    return {
        name: gap
        for name, gap in gradient_differences(reference, found)
        if shapes[name].ndim > 1 or shapes[name].device.type != "cpu"
    }


def _whole_difference(reference: Gradients, found: Gradients) -> float:
    """The same over all parameters as one vector."""
    gap = sum(float((found.get(name, 0.0) - one).square().sum()) for name, one in reference.items()) + sum(
        float(other.square().sum()) for name, other in found.items() if name not in reference
    )
    return _ratio(gap**0.5, sum(float(one.square().sum()) for one in reference.values()) ** 0.5)


def gradient_differences(reference: Gradients, found: Gradients) -> list[tuple[str, float]]:
    """For each parameter the norm of the difference over that of the reference; no gradient counts as zero."""
    norms = {name: float(tensor.norm()) for name, tensor in reference.items()}
    floor = GRADIENT_FLOOR * max(norms.values(), default=0.0)
    differences = []
    for name in sorted(reference.keys() | found.keys()):
        one, other = reference.get(name), found.get(name)
        gap = other - one if one is not None and other is not None else other if one is None else one
        assert gap is not None
        differences.append((name, _ratio(float(gap.norm()), max(norms.get(name, 0.0), floor))))
    return differences


def largest_entry(tensor: Tensor) -> float:
    """The largest absolute value."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _rms(tensor: Tensor) -> float:
    return float(tensor.float().square().mean().sqrt()) if tensor.numel() else 0.0


def _far(one: Tensor, other: Tensor) -> float:
    return largest_entry(other.float() - one.float())


def _worst_token(sample: EncodedSample, reference: Tensor, found: Tensor) -> tuple[str, float]:
    gaps = (found - reference).abs().amax(-1)
    at = int(gaps.argmax())
    return f"{sample.id}, token {at}", float(gaps[at]) / max(1.0, largest_entry(reference))


def _ratio(value: float, scale: float) -> float:
    if value != value:  # not a number is worse than anything
        return float("inf")
    return value / scale if scale else (float("inf") if value else 0.0)


def _max(values: Iterable[float]) -> float:
    """The largest; not-a-number wins, where `max` would lose it."""
    found = list(values)
    return next((value for value in found if value != value), max(found, default=0.0))


def largest(check: str, each: Iterable[tuple[str, float]], allowed: float) -> Finding:
    """The finding of the largest of named differences."""
    pairs = list(each)
    worst = _max(value for _, value in pairs)
    where = next((name for name, value in pairs if value == worst or value != value), "") if worst else ""
    return Finding(check=check, difference=worst, allowed=allowed, where=where)
