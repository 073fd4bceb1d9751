"""Positions of one sample: counted from 0, and for M-RoPE models the three rows that the model itself computes.

restart  (1, tokens)  0 1 2 3 ...
mrope    (4, tokens)  0 1 2 3 ... and below it time, height and width of each token
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.modality import GRIDS
from packtrain.families.family import BatchContract

if TYPE_CHECKING:
    from torch import Tensor

_GRIDS = (*GRIDS, "second_per_grid_ts")
_DEPTHS = ("num_hidden_layers", "depth")


class Positions:
    """Positions for one model. Its shell is built when the first sample with media asks for it."""

    def __init__(self, folder: str, contract: BatchContract) -> None:
        self._folder = folder
        self._mrope = contract.positions == "mrope"
        self._shell: Any = None

    def warm_up(self) -> None:
        """Build the shell, where one is needed and not there yet."""
        if self._mrope and self._shell is None:
            self._shell = model_shell(self._folder)

    def of(self, input_ids: Tensor, token_kinds: Tensor, media: Mapping[str, Tensor]) -> Tensor:
        """The rows of positions of one whole sample, or of a first piece of one that holds all its media."""
        import torch

        counted = torch.arange(len(input_ids)).unsqueeze(0)
        if not self._mrope:
            return counted
        if not media:
            return counted.repeat(4, 1)
        self.warm_up()
        grids = {name: media[name] for name in _GRIDS if name in media}
        try:
            rows, _ = self._shell.get_rope_index(input_ids[None], mm_token_type_ids=token_kinds[None], **grids)
        except (RuntimeError, ValueError, IndexError, StopIteration) as error:
            detail = f"{type(error).__name__}: {error}"[:300]
            raise RecordError("positions", "the model cannot place the sample's media", detail) from None
        return torch.cat([counted, rows[:, 0]])


def model_shell(folder: str) -> Any:
    """A model without weights and with one layer in each part, for the sake of its methods."""
    try:
        import torch
        from transformers import AutoConfig, AutoModel
    except ImportError as error:
        raise ConfigError("encoding", got=str(error), fix="pip install 'packtrain[train]'") from error
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            folder, got=str(error), expected="a model's config.json", fix="put it next to the processor's files"
        ) from error
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        if part is not None:
            _flatten(part)
    with torch.device("meta"):
        return AutoModel.from_config(config).eval()


def _flatten(config: Any) -> None:
    """One layer."""
    for name in _DEPTHS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 1)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    if getattr(config, "deepstack_visual_indexes", None):
        config.deepstack_visual_indexes = [0]
    if getattr(config, "fullatt_block_indexes", None):
        config.fullatt_block_indexes = [0]
