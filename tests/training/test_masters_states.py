"""States of an optimizer with fp32 masters: saved, loaded, copied, and taken from one that has none."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from test_masters import KINDS, assert_equal, net, optimizer_for, train
from torch import Tensor, nn
from torch.optim import AdamW

from packtrain.training.masters import MASTER, MasterWeights, make_optimizer


def saved(optimizer: Any) -> Any:
    """Through a file, as checkpoints are read."""
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_goes_on_as_before(kind: str) -> None:
    model = net()
    optimizer = optimizer_for(model, kind)
    train(model, optimizer, 7)
    again = net()
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    other = optimizer_for(again, kind)
    other.load_state_dict(saved(optimizer))
    for weight, twin in zip(model.parameters(), again.parameters(), strict=True):
        assert optimizer.state[weight].keys() == other.state[twin].keys() >= {MASTER}
        for name, value in optimizer.state[weight].items():
            loaded = other.state[twin][name]
            if isinstance(value, Tensor):
                assert value.dtype == loaded.dtype == torch.float32
                assert torch.equal(value, loaded)
            else:
                assert value == loaded
    for trained, of in ((model, optimizer), (again, other)):
        train(trained, of, 7, first=7)
    assert_equal(model, again)
    for weight, twin in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(optimizer.state[weight][MASTER], other.state[twin][MASTER])


def test_a_state_without_masters_is_taken_and_said() -> None:
    model = net()
    plain = optimizer_for(model, masters=False)
    train(model, plain, 3)
    optimizer = optimizer_for(model)
    with pytest.warns(UserWarning, match="no fp32 masters of 4"):
        optimizer.load_state_dict(saved(plain))
    for weight in model.parameters():
        assert torch.equal(optimizer.state[weight][MASTER], weight.float())
        assert torch.equal(optimizer.state[weight]["exp_avg"], plain.state[weight]["exp_avg"].float())
    train(model, optimizer, 1)


def test_without_masters_those_of_a_state_are_left_out() -> None:
    model = net()
    optimizer = optimizer_for(model)
    train(model, optimizer, 3)
    plain = optimizer_for(model, masters=False)
    plain.load_state_dict(saved(optimizer))
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in plain.state.values())
    train(model, plain, 1)


def test_nothing_is_made_before_the_first_step() -> None:
    """Accelerate loads an empty state and puts other parameters into the groups, after the optimizer was made."""
    before, after = net(), net()
    optimizer = optimizer_for(before)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state
    assert not optimizer._masters, "whole parameters that are about to be sharded would stay alive"
    optimizer.param_groups[0]["params"] = list(after.parameters())
    train(after, optimizer, 3)
    assert set(optimizer.state) == set(after.parameters())
    assert_equal(before, net())


def test_masters_follow_weights_that_were_set() -> None:
    model = net()
    optimizer = optimizer_for(model)
    train(model, optimizer, 20)
    first, *others = model.parameters()
    kept = [optimizer.state[weight][MASTER].clone() for weight in others]
    with torch.no_grad():
        first.fill_(0.5)
    optimizer.follow_weights()
    assert bool((optimizer.state[first][MASTER] == 0.5).all())
    assert all(torch.equal(optimizer.state[weight][MASTER], was) for weight, was in zip(others, kept, strict=True))


def test_while_a_state_is_loaded_nothing_is_there_twice() -> None:
    """Masters are those of the state that is loaded, and those of before are gone."""
    model = net()
    optimizer = optimizer_for(model)
    train(model, optimizer, 3)
    loaded, before = saved(optimizer), weakref.ref(next(iter(optimizer._masters.values())))
    optimizer._inner.register_load_state_dict_pre_hook(lambda *_: gone.append(before() is None))
    gone: list[bool] = []
    optimizer.load_state_dict(loaded)
    assert gone == [True]
    for number, weight in enumerate(model.parameters()):
        assert optimizer.state[weight][MASTER].data_ptr() == loaded["state"][number][MASTER].data_ptr()


def test_a_state_of_before_the_first_step_begins_anew() -> None:
    model, other = net(), net()
    optimizer, reference = optimizer_for(model, lr=1e-2), optimizer_for(other, lr=1e-2)
    first = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 5)
    model.load_state_dict(net().state_dict())
    optimizer.load_state_dict(first)
    assert not optimizer.state
    for trained, of in ((model, optimizer), (other, reference)):
        train(trained, of, 2)
    assert_equal(model, other)
    for weight, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[weight][MASTER], reference.state[twin][MASTER])
        assert optimizer.state[weight]["step"] == 2


def test_masters_of_earlier_steps_do_not_outlive_a_state_without() -> None:
    model = net()
    plain = optimizer_for(model, masters=False)
    train(model, plain, 2)
    held, loaded = copy.deepcopy(model.state_dict()), saved(plain)
    optimizer = optimizer_for(model, lr=1e-2)
    train(model, optimizer, 5)
    model.load_state_dict(held)
    with pytest.warns(UserWarning, match="no fp32 masters of 4"):
        optimizer.load_state_dict(loaded)
    assert all(torch.equal(optimizer.state[weight][MASTER], weight.float()) for weight in model.parameters())


def test_masters_go_by_the_order_of_groups_now() -> None:
    first, second = (nn.Parameter(torch.full((2, 2), value).bfloat16()) for value in (1.0, 2.0))
    optimizer = make_optimizer(AdamW, [{"params": [first, second]}], {"lr": 0.0})
    first.grad = second.grad = torch.ones(2, 2, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.param_groups[0]["params"] = [second, first]
    optimizer.load_state_dict(saved(optimizer))
    assert [float(optimizer.state[one][MASTER].mean()) for one in (first, second)] == [1.0, 2.0]


@pytest.mark.parametrize("beside", [False, True], ids=["all fp32", "beside bf16"])
def test_weights_that_are_fp32_now_become_their_masters(beside: bool) -> None:
    model, wide = net(), net(torch.float32)
    optimizer = optimizer_for(model)
    train(model, optimizer, 20)
    wide.load_state_dict(model.state_dict())
    if beside:
        wide[2].to(torch.bfloat16)
    other = optimizer_for(wide)
    assert isinstance(other, MasterWeights) == beside
    other.load_state_dict(saved(optimizer))
    for weight, twin in zip(model.parameters(), wide.parameters(), strict=True):
        master, state = optimizer.state[weight][MASTER], other.state[twin]
        assert torch.equal(state.get(MASTER, twin), master)
        assert (MASTER in state) == (twin.dtype == torch.bfloat16)
        assert torch.equal(state["exp_avg"], optimizer.state[weight]["exp_avg"])


def test_as_before_masters_there_are_none() -> None:
    for kind, rest in (("adamw", {"step", "exp_avg", "exp_avg_sq"}), ("sgd", None)):
        model = net()
        optimizer = optimizer_for(model, kind, **({"momentum": 0.0} if kind == "sgd" else {}))
        train(model, optimizer, 1)
        with optimizer.as_before_masters():
            assert [set(state) for state in optimizer.state.values()] == ([rest] * 4 if rest else [])
        assert all(MASTER in optimizer.state[weight] for weight in model.parameters())


@pytest.mark.parametrize("way", ["copied", "pickled"])
def test_a_copy_goes_on_as_the_original(way: str) -> None:
    model = net()
    optimizer = optimizer_for(model)
    train(model, optimizer, 3)
    pair = (model, optimizer)
    again, other = copy.deepcopy(pair) if way == "copied" else pickle.loads(pickle.dumps(pair))
    for trained, of in ((model, optimizer), (again, other)):
        train(trained, of, 3, first=3)
    assert_equal(model, again)
    for weight, twin in zip(model.parameters(), again.parameters(), strict=True):
        assert weight is not twin
        assert torch.equal(optimizer.state[weight][MASTER], other.state[twin][MASTER])
