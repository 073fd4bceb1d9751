"""Estimated lengths of samples against those they turned out to have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthError:
    """How far the lengths that packs were made with were from those of the encoded samples of this rank."""

    samples: int = 0
    differing: int = 0
    estimated_tokens: int = 0
    encoded_tokens: int = 0
    largest: int = 0  # difference of one sample, in tokens

    @property
    def relative(self) -> float:
        """Of all tokens: above 0 where samples are longer than estimated."""
        return self.encoded_tokens / self.estimated_tokens - 1 if self.estimated_tokens else 0.0

    def plus(self, estimated: int, encoded: int) -> LengthError:
        """With one more sample."""
        return LengthError(
            samples=self.samples + 1,
            differing=self.differing + (estimated != encoded),
            estimated_tokens=self.estimated_tokens + estimated,
            encoded_tokens=self.encoded_tokens + encoded,
            largest=max(self.largest, abs(encoded - estimated)),
        )

    def __str__(self) -> str:
        return (
            f"{self.differing:,} of {self.samples:,} samples differ from their estimate, "
            f"by at most {self.largest:,} tokens ({self.relative:+.2%} of all)"
        )
