"""One call makes a model ready for packs, or says why it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from packtrain.core.errors import ConfigError
from packtrain.modeling.load import load_model
from packtrain.modeling.preparation import prepare_model


def test_a_model_is_made_ready(tmp_path: Path) -> None:
    model = load_model("tiny:qwen3_vl", cache_dir=tmp_path)
    assert prepare_model(model) == "sdpa", "on a CPU"
    assert prepare_model(model, attn_implementation="varlen") == "varlen-loop"
    encoder_ran = []
    model.model.visual.register_forward_hook(lambda *_: encoder_ran.append(True))
    model.train()(input_ids=torch.arange(8)[None], position_ids=torch.arange(8).expand(4, 1, 8), use_cache=False)
    assert encoder_ran == [True], (
        "a batch without images must reach the vision encoder, and once, however often it is made ready"
    )


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    model = load_model("tiny:gemma3", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="bidirectional"):
        prepare_model(model, attn_implementation="varlen")


def test_tokens_that_are_learned_are_refused(tmp_path: Path) -> None:
    """They would stand in front of the first sample only, and with them positions no longer restart."""
    peft = pytest.importorskip("peft")
    model = load_model("tiny:llama", cache_dir=tmp_path)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ConfigError, match="PromptTuningConfig"):
        prepare_model(peft.get_peft_model(model, config))
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2)
    assert prepare_model(peft.get_peft_model(load_model("tiny:llama", cache_dir=tmp_path), lora)) == "sdpa"
