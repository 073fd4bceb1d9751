"""Text models: whatever has no folder of its own. Only those are listed of which something is known."""

from __future__ import annotations

from packtrain.families.family import BatchContract, Family, TextOnly
from packtrain.families.text.model import DECODERS, NOT_CAUSAL, PUBLISHED, REFUSED, TINY

_OWN_SCORES = "the model adds its own scores to the mask, which this backend does not support"
_CONTRACTS = {
    "doge": BatchContract(refused_backends={"varlen": _OWN_SCORES, "flex": _OWN_SCORES}),
    "gpt_oss": BatchContract(given_masks=True),
}

FAMILIES = {
    "text": Family(model_type="text", rule=TextOnly),
    **{
        name: Family(
            model_type=name,
            contract=_CONTRACTS.get(name),
            refused=REFUSED.get(name, ""),
            causal=name not in NOT_CAUSAL,
            shape=DECODERS.get(name),
            tiny=TINY.get(name),
            published=PUBLISHED.get(name, {}),
        )
        for name in dict.fromkeys((*DECODERS, *TINY, *_CONTRACTS, *REFUSED))
    },
}
