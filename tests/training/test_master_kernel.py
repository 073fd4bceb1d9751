"""The kernel that steps masters in one pass: by Triton's interpreter without a GPU, and compiled for real ones."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from packtrain.training import masters
from packtrain.training.masters import MASTER, make_optimizer

triton = pytest.importorskip("triton")

SHAPES = ((30, 70), (4_500,), (7, 3), (1,))  # whole spans and parts of one, and what is too small for a kernel
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernel as Python, for tensors that are not on a GPU."""
    import packtrain.training.master_kernel as kernel

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(masters, "_fit_kernel", lambda tensors: True)
    monkeypatch.setattr(masters, "WORTH_A_KERNEL", 10)
    loaded = importlib.reload(kernel)
    monkeypatch.setattr(loaded, "_CHUNK", 2 * loaded._BLOCK)  # Python takes its time
    yield loaded
    monkeypatch.delenv("TRITON_INTERPRET")
    importlib.reload(kernel)


def start(device: str = "cpu", times: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(times * first, *rest) for first, *rest in SHAPES]
    return [torch.randn(shape).bfloat16().to(device).requires_grad_() for shape in shapes]


def stepped(optimizer: Any, weights: list[Tensor], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        torch.manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape).to(weight)
        optimizer.step()


def in_fp64(weights: list[Tensor], steps: int, options: dict[str, Any]) -> list[Tensor]:
    """What AdamW makes of the same gradients with nothing rounded."""
    wide = [weight.detach().double().requires_grad_() for weight in weights]
    optimizer = AdamW(wide, **{**options, "fused": False})
    for step in range(steps):
        torch.manual_seed(step)
        for weight in wide:
            weight.grad = torch.randn(weight.shape).bfloat16().double()
        optimizer.step()
    return wide


def count_calls(monkeypatch: pytest.MonkeyPatch, kernel: ModuleType) -> list[int]:
    """How many weights each call of the kernel steps."""
    found, ordinary = list[int](), kernel.step_all
    monkeypatch.setattr(kernel, "step_all", lambda every, rates: (found.append(len(every)), ordinary(every, rates)))
    return found


@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.0}, {"betas": (0.0, 0.95)}, {"eps": 1e-3}])
def test_masters_are_those_of_fp64(
    monkeypatch: pytest.MonkeyPatch, interpreted: ModuleType, changes: dict[str, Any]
) -> None:
    weights, options = start(), {**OPTIONS, **changes}
    expected, calls = in_fp64(weights, 5, options), count_calls(monkeypatch, interpreted)
    optimizer = make_optimizer(AdamW, [{"params": weights}], options)
    stepped(optimizer, weights, 5)
    assert calls == [3] * 4, "one call a step for all that are large enough, from the second step on"
    for weight, right in zip(weights, expected, strict=True):
        master = optimizer.state[weight][MASTER]
        torch.testing.assert_close(master.double(), right.detach(), rtol=2e-6, atol=2e-6)
        # The interpreter cuts where a GPU rounds: one place further at most.
        torch.testing.assert_close(weight.detach().float(), master, rtol=2**-7, atol=0)
        assert float(optimizer.state[weight]["step"]) == 5


def test_its_states_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, interpreted: ModuleType) -> None:
    """So that a run goes on with one after the other, as after a resume on another machine."""
    ours, theirs = start(), start()
    optimizer = make_optimizer(AdamW, [{"params": ours}], OPTIONS)
    stepped(optimizer, ours, 3)
    saved = optimizer.state_dict()
    monkeypatch.setattr(masters, "WORTH_A_KERNEL", 2**60)
    other = make_optimizer(AdamW, [{"params": theirs}], OPTIONS)
    other.load_state_dict(saved)
    stepped(other, theirs, 2, first=3)
    for weight, right in zip(theirs, in_fp64(start(), 5, OPTIONS), strict=True):
        torch.testing.assert_close(other.state[weight][MASTER].double(), right.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("changes", [{"amsgrad": True}, {"maximize": True}, {"fused": False}])
def test_other_kinds_take_the_ordinary_way(
    monkeypatch: pytest.MonkeyPatch, interpreted: ModuleType, changes: dict[str, Any]
) -> None:
    weights, calls = start(), count_calls(monkeypatch, interpreted)
    stepped(make_optimizer(AdamW, [{"params": weights}], {**OPTIONS, **changes}), weights, 2)
    assert not calls


def test_gradients_wider_than_their_weights_take_the_ordinary_way(
    monkeypatch: pytest.MonkeyPatch, interpreted: ModuleType
) -> None:
    """Torch allows them; the kernel would read halves of numbers."""
    weights, calls = start(), count_calls(monkeypatch, interpreted)
    expected = in_fp64(weights, 3, OPTIONS)
    optimizer = make_optimizer(AdamW, [{"params": weights}], OPTIONS)
    for weight in weights[:2]:
        weight.grad_dtype = torch.float32
    for step in range(3):
        torch.manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape).bfloat16().to(weight.grad_dtype)
        optimizer.step()
    assert calls == [1] * 2
    for weight, right in zip(weights, expected, strict=True):
        torch.testing.assert_close(optimizer.state[weight][MASTER].double(), right.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_it_compiles_for_gpus_and_moves_several_numbers_at_once(capability: int, half: torch.dtype) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from packtrain.training import master_kernel as kernel

    constants = {"HALF": kernel._HALF[half], "COLUMNS": 7, "CHUNK": kernel._CHUNK, "BLOCK": kernel._BLOCK}
    kinds = {name: "constexpr" if name in constants else "fp32" for name in kernel._step.arg_names}
    kinds |= {"table": "*i64", "spans": "*i64"}
    source = ASTSource(fn=kernel._step, signature=kinds, constexprs=constants)
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert code.count("ld.global.v4") >= 4
    assert code.count("st.global.v4") >= 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_weights_are_masters_rounded() -> None:
    weights = start("cuda", times=32)
    optimizer = make_optimizer(AdamW, [{"params": weights}], OPTIONS)
    stepped(optimizer, weights, 5)
    for weight, right in zip(weights, in_fp64(start(times=32), 5, OPTIONS), strict=True):
        master = optimizer.state[weight][MASTER]
        torch.testing.assert_close(master.double().cpu(), right.detach(), rtol=2e-6, atol=2e-6)
        assert torch.equal(weight, master.bfloat16())
