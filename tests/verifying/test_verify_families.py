"""Every family with a contract is proved on every backend that it takes, with every kind of media that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from packtrain.app.verify import shaped_folder
from packtrain.core.errors import ConfigError
from packtrain.delivery.collate.collators import PackCollator
from packtrain.delivery.encode.encoded_sample import IMAGE, TEXT, VIDEO
from packtrain.families import tiny
from packtrain.families.contracts import contract_for
from packtrain.modeling.load import build_model
from packtrain.verifying.check_result import CheckReport
from packtrain.verifying.verification import verify_model

PROVED = tuple(family for family in tiny.tiny_families() if family != "nanovlm")
QUICK = ("llama", "qwen3", "gemma3_text", "qwen3_vl")
VIDEO_TOO = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "llava_onevision", "internvl")
NO_MEDIA = ("qwen2", "qwen3", "gemma3_text", "llama", "mistral", "smollm3")


WIDE = ("qwen3_vl", "smolvlm", "internvl", "gemma3")  # also built with heads of a size that GPU kernels take
# Through the kernel that flex compiles. It is the same code for all families; masks and heads are what differs.
COMPILED = ("qwen3_vl", "gemma3")


# Where backends and numbers differ and families do not: text, sliding windows, M-RoPE, tiles, whole images, and masks
# that see both ways inside images.
DIFFERENT = ("llama", "gemma3_text", "qwen3_vl", "smolvlm", "llava", "gemma3")


def families(*quick: str, of: tuple[str, ...] = PROVED) -> list[Any]:
    """All of them; only these in the quick suite."""
    return [family if family in quick else pytest.param(family, marks=pytest.mark.full) for family in of]


def prove(found: Any, backend: str, *, dtype: torch.dtype = torch.float32, folder: Any = None) -> CheckReport:
    model = build_model(folder or found.folder)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    side = getattr(getattr(model.config, "vision_config", None), "patch_size", 0)
    collate = PackCollator(
        found.contract, pad_id=found.pad_id, pad_to_multiple=64, dtype=dtype, boundaries=backend == "varlen"
    )
    return verify_model(
        model,
        found.samples,
        found.contract,
        collate,
        attn_implementation=backend,
        backward=backend != "flex",
        costs=found.costs,
        patch_size=side[0] if isinstance(side, (list, tuple)) else side,
    )


@pytest.mark.contract
@pytest.mark.parametrize("family", families(*QUICK))
def test_sdpa(subject: Callable[[str], Any], family: str) -> None:
    report = prove(subject(family), "sdpa")
    assert report.passed, report.failures
    assert report.attn_implementation == "sdpa"


@pytest.mark.parametrize("family", families("llama", of=DIFFERENT))
def test_varlen_through_the_loop(subject: Callable[[str], Any], family: str) -> None:
    if family == "gemma3":
        with pytest.raises(ConfigError, match="bidirectional attention inside images"):
            prove(subject(family), "varlen")
        return
    report = prove(subject(family), "varlen")
    assert report.passed, report.failures
    assert report.attn_implementation == "varlen-loop", "on CPU the kernel does not run, and the report says so"


@pytest.mark.parametrize("family", families(of=DIFFERENT))
def test_flex(subject: Callable[[str], Any], family: str) -> None:
    with torch.compiler.set_stance("default" if family in COMPILED else "force_eager"):
        report = prove(subject(family), "flex")
    assert report.passed, report.failures
    assert any("gradients" in line for line in report.left_out)
    assert not any("gradients" in finding.check for finding in report.checks)


@pytest.mark.parametrize("family", families("llama", of=DIFFERENT))
def test_half_precision(subject: Callable[[str], Any], family: str) -> None:
    report = prove(subject(family), "sdpa", dtype=torch.bfloat16)
    assert report.passed, report.failures
    exact = [finding for finding in report.checks if finding.check.startswith("neighbours")]
    assert exact
    assert all(finding.difference == 0 for finding in exact), "a neighbour moves nothing, bit for bit"


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in WIDE)])
def test_small_shapes(subject: Callable[[str], Any], family: str) -> None:
    """Wider models of every family can be built, have heads that kernels take, and are proved, too."""
    found = subject(family)
    assert shaped_folder(found.folder, "tiny") == found.folder
    folder = shaped_folder(found.folder, "small")
    assert shaped_folder(found.folder, "small") == folder != found.folder
    config = build_model(folder).config.get_text_config()
    assert (config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (
        *(256, 64),
        *(4, 2),
    )
    report = prove(found, "sdpa", folder=folder)
    assert report.passed, report.failures


@pytest.mark.parametrize("family", PROVED)
def test_synthetic_samples_are_of_every_kind(subject: Callable[[str], Any], family: str) -> None:
    samples = subject(family).samples
    kinds = {kind for sample in samples for kind in sample.token_kinds.unique().tolist()}
    assert TEXT in kinds
    assert (IMAGE in kinds) == (family not in NO_MEDIA)
    assert (VIDEO in kinds) == (family in VIDEO_TOO)
    assert any(sample.num_images > 1 for sample in samples) == (family not in NO_MEDIA)
    assert any(not sample.media for sample in samples)
    same = [sample for sample in samples if sample.id.startswith("image")]
    if same:
        one, again = (sample.media["pixel_values"] for sample in same)
        assert one.shape == again.shape
        assert not torch.equal(one, again), "swapping them would fit, and be seen"
    assert sum(map(len, samples)) < 5_000, "small enough for any machine"


def test_refused_families_say_why(tmp_path: Any) -> None:
    for model_type, reason in (("paligemma", "4-D mask"), ("qwen3_next", "leak into the next")):
        with pytest.raises(ConfigError, match=reason):
            contract_for({"model_type": model_type})
