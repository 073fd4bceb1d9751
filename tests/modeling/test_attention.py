"""Attention backends on tiny models: a packed sample gets what it gets alone, and what cannot be done is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from encoded import (
    PAD_ID,
    TEXT_ONLY,
    VISION,
    alone,
    contract,
    cut,
    difference,
    folder,
    fresh_model,
    gradients,
    logits,
    loss_of,
    packed,
    row,
    sample,
    samples,
)

from packtrain.core.errors import ConfigError, DataError
from packtrain.delivery.collate.collators import PaddedCollator, StaticShapes
from packtrain.families.family import BatchContract
from packtrain.modeling import varlen
from packtrain.modeling.attention import BACKENDS, VARLEN_LOOP, choose_backend, set_attention
from packtrain.modeling.model_parts import model_parts

SLOW = ("idefics3", "smolvlm", "llava_next", "llava_onevision", "internvl", "qwen2_vl")
FAMILIES = [
    pytest.param(family, marks=pytest.mark.more) if family in SLOW else family for family in (*VISION, *TEXT_ONLY)
]
CLOSE = 1e-5
CUDA = torch.device("cuda")


def backends(family: str) -> list[str]:
    return [name for name in ("sdpa", "varlen") if name not in contract(family).refused_backends]


@pytest.mark.contract
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_padded_logits_equal_those_alone(family: str) -> None:
    model, members = fresh_model(family), samples(family)
    with torch.no_grad():
        wanted = alone(family, model, members)
        for backend in backends(family):
            set_attention(model, backend, contract(family))
            assert difference(cut(logits(model, packed(family, *members)), members), wanted) <= CLOSE
            bounded = packed(family, *members, boundaries=True, pad_to_multiple=sum(map(len, members)) + 3)
            assert bounded.info.padding == 3
            assert difference(cut(logits(model, bounded), members), wanted) <= CLOSE
            padded = logits(model, PaddedCollator(contract(family), pad_id=PAD_ID)([row(*members)]))
            rows = [padded[at, : len(member)] for at, member in enumerate(members)]
            assert difference(rows, wanted) <= CLOSE


@pytest.mark.contract
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_gradients_equal_those_alone(family: str) -> None:
    model, members = fresh_model(family).train(), samples(family)
    total = sum(int((member.labels >= 0).sum()) for member in members)
    for member in members:
        (loss_of(model, packed(family, member)) / total).backward()
    wanted = gradients(model)
    for backend in backends(family):
        set_attention(model, backend, contract(family))
        model.zero_grad()
        (loss_of(model, packed(family, *members)) / total).backward()
        found = gradients(model)
        assert set(found) == set(wanted)
        assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) <= CLOSE


@pytest.mark.full
@pytest.mark.contract
@pytest.mark.parametrize("family", ["qwen3_vl", "llava", "gemma3", "gemma3_text"])
def test_flex_logits_equal_those_alone(family: str) -> None:
    model, members = fresh_model(family), samples(family)[:3]
    # One family through the compiled kernel: it is the same code for all, and the masks are what differs.
    stance = "default" if family == "qwen3_vl" else "force_eager"
    with torch.no_grad(), torch.compiler.set_stance(stance):
        wanted = alone(family, model, members)
        assert set_attention(model, "flex", contract(family)) == "flex"
        assert model.config.get_text_config()._attn_implementation == "flex_attention", "flex was not what ran"
        assert difference(cut(logits(model, packed(family, *members)), members), wanted) <= CLOSE


def test_samples_would_see_each_other_without_restarts() -> None:
    """That the tests above can fail: positions that run on, or a cache, join the samples."""
    members = samples("qwen3")
    for backend in ("sdpa", "varlen"):
        model = fresh_model("qwen3")
        set_attention(model, backend, contract("qwen3"))
        with torch.no_grad():
            wanted = alone("qwen3", model, members)
            joined = packed("qwen3", *members)
            joined["position_ids"] = torch.arange(joined["input_ids"].shape[1])[None]
            assert difference(cut(logits(model, joined), members), wanted) > 0.05
            cached = packed("qwen3", *members)
            cached["use_cache"] = True
            assert difference(cut(logits(model, cached), members), wanted) > 0.05


# ---- varlen inside models


def test_varlen_says_where_it_is_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model = fresh_model("qwen3")
    assert set_attention(model, "varlen", contract("qwen3")) == VARLEN_LOOP
    assert set_attention(model, "varlen", contract("qwen3"), device=CUDA, dtype=torch.bfloat16) == "varlen"
    assert set_attention(model, "varlen", contract("qwen3"), device=CUDA, dtype=torch.float32) == VARLEN_LOOP


@pytest.mark.contract
def test_sliding_windows_are_those_of_transformers() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder("gemma3_text")))
    config.sliding_window = 8
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    members = samples("gemma3_text")
    assert min(map(len, members)) > 2 * config.sliding_window
    with torch.no_grad():
        wanted = alone("gemma3_text", model, members)
        wide = alone("gemma3_text", fresh_model("gemma3_text"), members)
        assert difference(wide, wanted) > 0.05
        set_attention(model, "varlen", contract("gemma3_text"))
        assert difference(cut(logits(model, packed("gemma3_text", *members)), members), wanted) <= CLOSE
        bounded = packed("gemma3_text", *members, boundaries=True)
        assert difference(cut(logits(model, bounded), members), wanted) <= CLOSE


@pytest.mark.contract
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_encoder_attends_to_all_its_images_in_one_call(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    segments: list[int] = []
    loop = varlen._loop
    monkeypatch.setattr(varlen, "_loop", lambda *args: segments.append(len(args[3]) - 1) or loop(*args))
    model = fresh_model(family)
    set_attention(model, "varlen", contract(family))
    members = (sample(family, "image", seed=1), sample(family, "image", "image", seed=3))
    with torch.no_grad():
        logits(model, packed(family, *members))
    depth, layers = model.config.vision_config.depth, model.config.text_config.num_hidden_layers
    assert len(segments) == depth + layers
    assert all(count >= 3 for count in segments[:depth])
    assert segments[depth:] == [2] * layers


@pytest.mark.contract
@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_boundaries_go_past_the_encoder_to_the_language_model(backend: str) -> None:
    model = fresh_model("qwen3_vl")
    for _ in range(2):  # switching again must not add hooks
        set_attention(model, backend, contract("qwen3_vl"))
    assert len(model.model._forward_pre_hooks) == len(model.model.language_model._forward_pre_hooks) == 1
    seen: dict[str, Any] = {}
    for name in ("visual", "language_model"):
        part = getattr(model.model, name)
        part.register_forward_pre_hook(lambda _, args, kw, name=name: seen.update({name: kw}), with_kwargs=True)
    members = samples("qwen3_vl")[:3]
    batch = packed("qwen3_vl", *members, boundaries=True)
    with torch.no_grad():
        logits(model, batch)
    assert not any(name.startswith(("cu_seq", "max_length")) for name in seen["visual"])
    assert seen["language_model"]["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_q"].tolist()
    assert seen["language_model"]["max_length_q"] == max(map(len, members))


def test_given_boundaries_are_used_and_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, members = fresh_model("qwen3"), samples("qwen3")
    set_attention(model, "varlen", contract("qwen3"))
    with torch.no_grad():
        wanted = logits(model, packed("qwen3", *members))
        batch = packed("qwen3", *members, boundaries=True)
        batch["position_ids"] = packed("qwen3", *members)["position_ids"]
        from transformers import AttentionMaskInterface

        monkeypatch.setitem(AttentionMaskInterface._global_mapping, varlen.VARLEN, _must_not_be_called)
        assert torch.equal(logits(model, batch), wanted)


def _must_not_be_called(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("boundaries were looked for")


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_static_shapes_change_nothing(backend: str) -> None:
    model, members = fresh_model("qwen3_vl"), samples("qwen3_vl")[:4]
    tokens = sum(map(len, members)) + 37
    set_attention(model, backend, contract("qwen3_vl"))
    with torch.no_grad():
        wanted = alone("qwen3_vl", model, members)
        batch = packed("qwen3_vl", *members, static_shapes=StaticShapes(tokens=tokens, segments=9))
        assert batch["input_ids"].shape == (1, tokens)
        assert difference(cut(logits(model, batch), members), wanted) <= CLOSE
        assert torch.isfinite(
            logits(model, packed("qwen3_vl", static_shapes=StaticShapes(tokens=64, segments=3)))
        ).all()


@pytest.mark.contract
@pytest.mark.parametrize("reentrant", [False, True])
def test_varlen_under_gradient_checkpointing(reentrant: bool) -> None:
    model, members = fresh_model("qwen3_vl").train(), samples("qwen3_vl")[:4]
    set_attention(model, "varlen", contract("qwen3_vl"))
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        for boundaries in (False, True):
            model.zero_grad()
            (loss_of(model, packed("qwen3_vl", *members, boundaries=boundaries)) / 100).backward()
            found.append(gradients(model))
    for other in found[1:]:
        assert set(other) == set(found[0])
        assert max(float((other[name] - found[0][name]).abs().max()) for name in other) <= CLOSE


@pytest.mark.contract
def test_generating_with_varlen_gives_the_tokens_of_sdpa() -> None:
    model = fresh_model("qwen3")
    ids = sample("qwen3", words=20).input_ids[None]
    options = {"max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    set_attention(model, "varlen", contract("qwen3"))
    assert torch.equal(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options), wanted)


def test_adapters_do_not_hide_the_hooks() -> None:
    """An adapter calls the outer model past its hooks; ours are inside."""
    peft = pytest.importorskip("peft")
    model, members = fresh_model("qwen3_vl"), samples("qwen3_vl")[:3]
    with torch.no_grad():
        wanted = alone("qwen3_vl", model, members)
    set_attention(model, "varlen", contract("qwen3_vl"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2)).eval()
    assert model_parts(adapted).language is model.model.language_model
    with torch.no_grad():
        batch = packed("qwen3_vl", *members, boundaries=True)
        assert difference(cut(logits(adapted, batch), members), wanted) <= CLOSE


# ---- choosing and refusing


def test_auto_takes_the_fastest_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.utils

    model, half = fresh_model("qwen3_vl"), torch.bfloat16
    own = contract("qwen3_vl")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for number in "23":
        monkeypatch.setattr(transformers.utils, f"is_flash_attn_{number}_available", lambda: False)
    assert choose_backend(model, own) == "sdpa"
    assert choose_backend(model, own, device=CUDA, dtype=half) == "varlen"
    assert choose_backend(model, own, device=CUDA, dtype=torch.float32) == "sdpa"
    assert choose_backend(fresh_model("gemma3"), contract("gemma3"), device=CUDA, dtype=half) == "sdpa"
    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: True)
    assert choose_backend(model, own, device=CUDA, dtype=half) == "flash_attention_2"
    assert choose_backend(model, own, dtype=half) == "sdpa"
    monkeypatch.setattr(transformers.utils, "is_flash_attn_3_available", lambda: True)
    assert choose_backend(model, own, device=CUDA, dtype=half) == "flash_attention_3"
    assert choose_backend(fresh_model("gemma3"), contract("gemma3"), device=CUDA, dtype=half) == "sdpa"
    model.config.text_config.attention_dropout = 0.1
    for number in "23":
        monkeypatch.setattr(transformers.utils, f"is_flash_attn_{number}_available", lambda: False)
    assert choose_backend(model, own, device=CUDA, dtype=half) == "sdpa"
    assert set_attention(model, "auto", own) == "sdpa"


def test_a_gpu_too_old_for_the_kernel_is_noticed_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own, half = fresh_model("qwen3"), contract("qwen3"), torch.float16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_backend(model, own, device=CUDA, dtype=half) == "sdpa"
    with pytest.raises(ConfigError, match=r"8\.0, and this GPU has 7\.5"):
        set_attention(model, "varlen", own, device=CUDA, dtype=half)


@pytest.mark.parametrize(
    ("family", "backend", "words"),
    [
        ("gemma3", "varlen", "bidirectional"),
        ("gemma3", "flash_attention_2", "bidirectional"),
        ("qwen3", "flash_attention_2", "needs a GPU"),
        ("qwen3", "flash_attention_3", "needs a GPU"),
        ("qwen3", "varlenn", "did you mean 'varlen'"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(family: str, backend: str, words: str) -> None:
    model = fresh_model(family)
    before = model.config.get_text_config()._attn_implementation
    with pytest.raises(ConfigError, match=words):
        set_attention(model, backend, contract(family))
    assert model.config.get_text_config()._attn_implementation == before


def test_what_the_kernel_cannot_express_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model = fresh_model("qwen3")
    model.config.attention_dropout = 0.1
    with pytest.raises(ConfigError, match="dropout"):
        set_attention(model, "varlen", contract("qwen3"))
    model = fresh_model("gemma3_text")
    model.config.attn_logit_softcapping = 50.0
    for backend in ("varlen", "sdpa"):
        with pytest.raises(ConfigError, match="caps its attention scores"):
            set_attention(model, backend, contract("gemma3_text"))
    with pytest.raises(ConfigError, match="needs bf16 or fp16"):
        set_attention(fresh_model("qwen3"), "flash_attention_2", contract("qwen3"), device=CUDA)
    with pytest.raises(ConfigError, match="not installed"):
        set_attention(fresh_model("qwen3"), "flash_attention_3", contract("qwen3"), device=CUDA, dtype=torch.bfloat16)


def test_a_contract_can_refuse_any_backend() -> None:
    for backend in set(BACKENDS) - {"auto"}:
        with pytest.raises(ConfigError, match="because"):
            set_attention(
                fresh_model("qwen3"), backend, BatchContract(model_type="qwen3", refused_backends={backend: "because"})
            )


# ---- images that see themselves in both directions


def piece(whole: Any, start: int, end: int) -> Any:
    """A span of a sample with its image, as no template writes it."""
    return replace(
        whole,
        input_ids=whole.input_ids[start:end],
        labels=whole.labels[start:end],
        position_ids=torch.arange(end - start)[None],
        token_kinds=whole.token_kinds[start:end],
    )


@pytest.mark.contract
def test_gemma3_takes_touching_images_of_two_samples_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the collator refuses them. When this fails, the model keeps them apart and the refusal can go."""
    model, whole = fresh_model("gemma3"), sample("gemma3", "image", seed=1)
    image = whole.token_kinds.nonzero().flatten().tolist()
    ends, begins = piece(whole, 0, image[-1] + 1), piece(whole, image[0], len(whole))
    with pytest.raises(DataError, match="as one image"):
        packed("gemma3", ends, begins)
    monkeypatch.setattr("packtrain.delivery.collate.collators.image_blocks_touch", lambda *_: False)
    with torch.no_grad():
        for members, leaks in (((ends, begins), True), ((begins, ends), False), ((whole, whole), False)):
            wanted = alone("gemma3", model, members)
            found = difference(cut(logits(model, packed("gemma3", *members)), members), wanted)
            assert found > 0.01 if leaks else found <= CLOSE
