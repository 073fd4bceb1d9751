"""Samples through the model, alone and packed, and how far apart logits, loss and gradients are and may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from packtrain.core.numbers import exact_percent
from packtrain.core.values import Cost
from packtrain.delivery.collate.batch_values import LOSS_WEIGHTS
from packtrain.delivery.collate.collators import sample_offsets
from packtrain.delivery.collate.join import count_patches
from packtrain.delivery.encode.encoded_sample import IGNORED, EncodedSample, PackedRow, PackKey
from packtrain.families.family import BatchContract
from packtrain.verifying.check_result import CheckResult

FP32_TOLERANCE = 1e-5
TIMES_ALONE = 2.0  # in half precision: how much further from fp32 than the sample alone
# Gradients below this share of the largest tensor's norm are mostly rounding: they are compared with that share.
GRADIENT_FLOOR = 1e-2
Collate = Callable[[Sequence[PackedRow]], Mapping[str, Any]]
Gradients = dict[str, Tensor]  # by parameter, without those that have none


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassOutcome:
    """Results of running the samples in one way."""

    logits: tuple[Tensor, ...]  # of each sample: (tokens, vocabulary)
    losses: tuple[Tensor, ...]  # of each sample: (supervised tokens,), in fp32
    loss: float  # sum over all supervised tokens / their number
    gradients: Gradients  # of that loss


def with_media_as(sample: EncodedSample, dtype: torch.dtype) -> EncodedSample:
    """The sample with its pixels in one precision, so that every run sees the same ones."""
    return replace(sample, media={name: _cast(name, tensor, dtype) for name, tensor in sample.media.items()})


def alone_inputs(sample: EncodedSample, contract: BatchContract) -> dict[str, Any]:
    """The inputs of one sample as its processor gives them: without positions, which the model computes."""
    inputs: dict[str, Any] = {"input_ids": sample.input_ids[None], "use_cache": False, **sample.media}
    if contract.unlisted:  # some models compute positions of images only where there is a mask
        inputs["attention_mask"] = torch.ones_like(sample.input_ids)[None]
    if contract.positions == "mrope" and sample.media:
        inputs["mm_token_type_ids"] = sample.token_kinds[None].int()
    if contract.token_types is not None:
        inputs[contract.token_types] = sample.token_kinds[None]
    if contract.per_sample_images is not None and sample.num_images:
        inputs[contract.per_sample_images] = torch.tensor([sample.num_images])
    return inputs


def pack_row(samples: Sequence[EncodedSample], collate: Collate) -> tuple[dict[str, Any], Tensor]:
    """The inputs of one packed row, without its labels, and the labels."""
    batch = dict(as_trained(samples, collate))
    batch.pop(LOSS_WEIGHTS, None)
    return batch, batch.pop("labels")


def as_trained(samples: Sequence[EncodedSample], collate: Collate) -> Mapping[str, Any]:
    """The batch of one packed row, as the trainer gets it."""
    return collate([PackedRow(key=PackKey(0, 0), samples=tuple(samples))])


def forward(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The logits of the one row, (tokens, vocabulary); pixels in the precision of the model."""
    weight = next(model.parameters())
    arguments = {
        name: _cast(name, value.to(weight.device), weight.dtype) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    logits: Tensor = model(**arguments).logits
    return logits[0]


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if is_pixels(name) else tensor


def is_pixels(name: str) -> bool:
    """Is this argument pixels, and not a mask or the seconds between frames?"""
    return "pixel_values" in name


def sample_starts(samples: Sequence[EncodedSample], collate: Collate) -> list[int]:
    """The first token of each sample in their row."""
    return sample_offsets(samples, getattr(collate, "alignment", 1))


def split(row: Tensor, samples: Sequence[EncodedSample], collate: Collate) -> tuple[Tensor, ...]:
    """A packed row split into its samples, without padding."""
    starts = sample_starts(samples, collate)
    return tuple(row[start : start + len(sample)] for start, sample in zip(starts, samples, strict=True))


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of every token with a label, predicted from the token before it."""
    targets = labels[1:].to(logits.device)
    carries = targets != IGNORED
    return cross_entropy(logits[:-1][carries].float(), targets[carries], reduction="none")


def collect_gradients(model: Any) -> Gradients:
    """The gradients of the parameters in fp32, removed from the model: half precision cannot hold differences."""
    gradients = {name: weight.grad.float() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def run_alone(model: Any, samples: Sequence[EncodedSample], contract: BatchContract, *, backward: bool) -> PassOutcome:
    """Every sample alone; gradients add up to those of the common loss."""
    supervised = sum(int((sample.labels[1:] != IGNORED).sum()) for sample in samples)
    logits, losses = [], []
    model.zero_grad(set_to_none=True)
    for sample in samples:
        with torch.set_grad_enabled(backward):
            row = forward(model, alone_inputs(sample, contract))
            values = token_losses(row, sample.labels)
        if backward:
            (values.sum() / supervised).backward()  # type: ignore[no-untyped-call]
        logits.append(row.detach())
        losses.append(values.detach())
    loss = float(torch.cat(losses).double().sum()) / supervised
    return PassOutcome(logits=tuple(logits), losses=tuple(losses), loss=loss, gradients=collect_gradients(model))


def run_packed(model: Any, samples: Sequence[EncodedSample], collate: Collate, *, backward: bool) -> PassOutcome:
    """All samples in one row."""
    inputs, labels = pack_row(samples, collate)
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(backward):
        row = forward(model, inputs)
        values = token_losses(row, labels.flatten())
        loss = values.sum() / len(values)
    if backward:
        loss.backward()  # type: ignore[no-untyped-call]
    logits = split(row.detach(), samples, collate)
    return PassOutcome(
        logits=logits,
        losses=tuple(token_losses(one, sample.labels) for one, sample in zip(logits, samples, strict=True)),
        loss=float(values.detach().double().mean()),
        gradients=collect_gradients(model),
    )


class Comparison(Protocol):
    """Packed against a reference, with tolerances that tell errors from rounding."""

    def describe(self) -> tuple[str, ...]:
        """Its tolerances, in sentences."""
        ...

    def logits(self, mode: str, packed_logits: Sequence[Tensor]) -> list[CheckResult]:
        """The logits of every sample."""
        ...

    def loss(self, mode: str, outcome: PassOutcome) -> CheckResult:
        """The loss of the whole row."""
        ...

    def gradients(self, mode: str, packed_gradients: Gradients) -> list[CheckResult]:
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
            f"{exact_percent(GRADIENT_FLOOR)} of the largest norm: over that); at most {FP32_TOLERANCE:g}",
        )

    def logits(self, mode: str, packed_logits: Sequence[Tensor]) -> list[CheckResult]:
        each = [
            _worst_token(sample, one, ours)
            for sample, one, ours in zip(self.samples, self.reference.logits, packed_logits, strict=True)
        ]
        return [largest(f"logits ({mode})", each, FP32_TOLERANCE)]

    def loss(self, mode: str, outcome: PassOutcome) -> CheckResult:
        difference = abs(outcome.loss - self.reference.loss) / max(1.0, abs(self.reference.loss))
        where = f"{outcome.loss:.6f} packed, {self.reference.loss:.6f} alone"
        return CheckResult(check=f"loss ({mode})", difference=difference, allowed=FP32_TOLERANCE, where=where)

    def gradients(self, mode: str, packed_gradients: Gradients) -> list[CheckResult]:
        each = gradient_differences(self.reference.gradients, packed_gradients)
        return [largest(f"gradients ({mode})", each, FP32_TOLERANCE)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HalfPrecision:
    """bf16, fp16: packed is at most twice as far from fp32 as the sample alone."""

    samples: Sequence[EncodedSample]
    reference: PassOutcome  # alone, in fp32
    yardstick: PassOutcome  # alone, in the precision of the packed row

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

    def logits(self, mode: str, packed_logits: Sequence[Tensor]) -> list[CheckResult]:
        pairs = [
            (sample.id, _rms(ours.float() - one.float()), _rms(theirs.float() - one.float()))
            for sample, one, theirs, ours in zip(
                self.samples, self.reference.logits, self.yardstick.logits, packed_logits, strict=True
            )
        ]
        name, packed, alone = max(pairs, key=lambda pair: _ratio(pair[1], pair[2]))
        mean = CheckResult(check=f"logits ({mode})", difference=packed, allowed=TIMES_ALONE * alone, where=name)
        ours_worst = [_far(one, ours) for one, ours in zip(self.reference.logits, packed_logits, strict=True)]
        alone_worst = [_far(one, its) for one, its in zip(self.reference.logits, self.yardstick.logits, strict=True)]
        worst = CheckResult(
            check=f"logits, worst ({mode})",
            difference=_max(ours_worst),
            allowed=TIMES_ALONE * _max(alone_worst),
            where=self.samples[ours_worst.index(_max(ours_worst))].id,
        )
        return [mean, worst]

    def loss(self, mode: str, outcome: PassOutcome) -> CheckResult:
        alone = _rms(torch.cat(self.yardstick.losses) - torch.cat(self.reference.losses))
        return CheckResult(
            check=f"loss ({mode})",
            difference=abs(outcome.loss - self.reference.loss),
            allowed=TIMES_ALONE * alone,
            where=f"{outcome.loss:.5f} packed, {self.yardstick.loss:.5f} alone, {self.reference.loss:.5f} in fp32",
        )

    def gradients(self, mode: str, packed_gradients: Gradients) -> list[CheckResult]:
        reference, yardstick = self.reference.gradients, self.yardstick.gradients
        whole = CheckResult(
            check=f"gradients ({mode})",
            difference=_whole_difference(reference, packed_gradients),
            allowed=TIMES_ALONE * _whole_difference(reference, yardstick),
            where="all parameters as one vector",
        )
        alone = _comparable_tensors(reference, yardstick)
        average = (sum(value * value for value in alone.values()) / max(1, len(alone))) ** 0.5
        each = _comparable_tensors(reference, packed_gradients)
        name = max(each, key=lambda name: _ratio(each[name], max(alone.get(name, 0.0), average)))
        allowed = TIMES_ALONE * max(alone.get(name, 0.0), average)
        worst = CheckResult(check=f"gradients, worst ({mode})", difference=each[name], allowed=allowed, where=name)
        return [whole, worst]


# ---- what is exact


def compare_costs(samples: Sequence[EncodedSample], costs: Sequence[Cost], patch_size: int) -> CheckResult:
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
    return CheckResult(
        check="costs as computed", difference=float(len(wrong)), allowed=0.0, where=wrong[0] if wrong else ""
    )


def compare_labels(samples: Sequence[EncodedSample], labels: Tensor, firsts: Sequence[int]) -> CheckResult:
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
    return CheckResult(check="labels", difference=float(len(wrong)), allowed=0.0, where=where)


# ---- differences


def _comparable_tensors(reference: Gradients, other: Gradients) -> dict[str, float]:
    """The differences of tensors that can be compared one by one.

    Not those of norms on a CPU: the gradient of a bias was off by 2 % after 256 rows, by 30 % after 4,096.
    """
    shapes = {**reference, **other}
    return {
        name: gap
        for name, gap in gradient_differences(reference, other)
        if shapes[name].ndim > 1 or shapes[name].device.type != "cpu"
    }


def _whole_difference(reference: Gradients, others: Gradients) -> float:
    """The same over all parameters as one vector."""
    gap = sum(float((others.get(name, 0.0) - one).square().sum()) for name, one in reference.items()) + sum(
        float(other.square().sum()) for name, other in others.items() if name not in reference
    )
    return _ratio(gap**0.5, sum(float(one.square().sum()) for one in reference.values()) ** 0.5)


def gradient_differences(reference: Gradients, others: Gradients) -> list[tuple[str, float]]:
    """For each parameter the norm of the difference over that of the reference; no gradient counts as zero."""
    norms = {name: float(tensor.norm()) for name, tensor in reference.items()}
    floor = GRADIENT_FLOOR * max(norms.values(), default=0.0)
    differences = []
    for name in sorted(reference.keys() | others.keys()):
        one, other = reference.get(name), others.get(name)
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


def _worst_token(sample: EncodedSample, reference: Tensor, logits: Tensor) -> tuple[str, float]:
    gaps = (logits - reference).abs().amax(-1)
    at = int(gaps.argmax())
    return f"{sample.id}, token {at}", float(gaps[at]) / max(1.0, largest_entry(reference))


def _ratio(value: float, scale: float) -> float:
    if value != value:  # not a number is worse than anything
        return float("inf")
    return value / scale if scale else (float("inf") if value else 0.0)


def _max(values: Iterable[float]) -> float:
    """The largest; not-a-number wins, where `max` would lose it."""
    numbers = list(values)
    return next((value for value in numbers if value != value), max(numbers, default=0.0))


def largest(check: str, each: Iterable[tuple[str, float]], allowed: float) -> CheckResult:
    """The check whose difference is the largest of these."""
    pairs = list(each)
    worst = _max(value for _, value in pairs)
    where = next((name for name, value in pairs if value == worst or value != value), "") if worst else ""
    return CheckResult(check=check, difference=worst, allowed=allowed, where=where)
