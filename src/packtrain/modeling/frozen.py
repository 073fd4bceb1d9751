"""By what the weights are known that adapters stand beside: their checkpoints do not have them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

_TAKEN = 16  # numbers of a weight, from all over it


@torch.no_grad()
def frozen_state(model: Any) -> dict[str, str]:
    """A hash of some numbers of every frozen weight, by its precision: that may be another elsewhere.

    Names and order of weights are left to the library, and weights of 4 bits to the GPU: neither is part of it.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for weight in model.parameters():
        if not (weight.requires_grad or weight.is_meta) and weight.is_floating_point() and weight.numel():
            flat = weight.detach().reshape(-1)
            kept = flat[:: max(1, len(flat) // _TAKEN)][:_TAKEN].float()
            found.setdefault(str(weight.dtype).removeprefix("torch."), []).append(kept)
    return {dtype: _hash(parts) for dtype, parts in sorted(found.items())}


def _hash(parts: list[torch.Tensor]) -> str:
    values = torch.cat(parts).cpu().numpy()  # waits for the GPU once
    stops = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    each = sorted(values[stop - len(part) : stop].tobytes() for part, stop in zip(parts, stops, strict=True))
    return hashlib.sha256(b"".join(each)).hexdigest()[:20]
