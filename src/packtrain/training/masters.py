"""Half-precision weights that are updated in fp32: an optimizer around another that keeps a master of each weight.

A weight in bf16 has 8 bits of precision: an update of less than about a 400th of it is rounded away, which at the
learning rates of fine-tuning is most of them. Here the model keeps and computes with its half-precision weights; the
wrapped optimizer owns fp32 masters of them, with fp32 states. A step hands it the gradients in fp32, lets it step, and
rounds the masters into the weights. Weights that are fp32 already are their own masters.

    optimizer = make_optimizer(torch.optim.AdamW, groups, {"lr": 1e-5}, masters=None)

Masters are made by the first step, or when a state is loaded: until then parameters may be moved, sharded or replaced
in the groups, as accelerate does for FSDP2. They are in the optimizer's state under the name `master`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from packtrain.core.errors import ConfigError
from packtrain.modeling.model_parts import HALF

if TYPE_CHECKING:
    from packtrain.training.master_kernel import Stepped

MASTER = "master"  # in the state of a parameter
AT_ONCE = 100_000_000  # numbers whose gradients are fp32 at the same time, where no single parameter has more
WORTH_A_KERNEL = 2**16  # numbers of a weight; smaller ones take torch's way, all at once
_KNOWN = ("torch", "transformers")  # packages whose optimizers step fp32 tensors, whatever the model is
_ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}
ParameterGroup = Mapping[str, Any]  # of an optimizer's parameters, with its options


def make_optimizer(
    kind: type[Optimizer], groups: Sequence[ParameterGroup], options: Mapping[str, Any], *, masters: bool | None = None
) -> Optimizer:
    """An optimizer of this kind, with masters where any of its weights are in half precision.

    `masters` None: where the optimizer can have them; False: never.
    """
    half = any(weight.dtype in HALF for group in groups for weight in group["params"])
    optimizer = kind([dict(group) for group in groups], **options)
    if half and masters is not False and can_have_masters(optimizer):
        return MasterWeights(optimizer)
    if half and masters:
        raise ConfigError(
            "training.master_weights",
            got=f"true with {kind.__module__}.{kind.__name__}, which keeps its own state",
            expected="an optimizer of torch or transformers that creates its state in its first step",
            fix="use adamw_torch_fused, or leave it out",
        )
    return without_masters(optimizer)


def can_have_masters(optimizer: Optimizer) -> bool:
    """Not those that are made with states of the weights they are given, or compute losses themselves.

    Optimizers of bitsandbytes and torchao quantize states, and are left alone too.
    """
    if type(optimizer).__module__.partition(".")[0] not in _KNOWN or optimizer.state:
        return False
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is None or closure.default is not inspect.Parameter.empty


def without_masters(optimizer: Optimizer) -> Optimizer:
    """An optimizer that keeps no masters of a state that it loads; those of weights that are fp32 now become them."""
    optimizer.register_load_state_dict_pre_hook(_leave_out_masters)
    return optimizer


@torch.no_grad()
def _leave_out_masters(optimizer: Optimizer, loaded: StateDict) -> StateDict:
    kept, saved = _without_masters(loaded["state"])
    for name, weight in zip(_in_groups(loaded["param_groups"]), _in_groups(optimizer.param_groups), strict=False):
        if name in saved and weight.dtype == torch.float32:  # torch refuses groups of other sizes after this
            weight.copy_(saved[name])
    return {**loaded, "state": kept}


class MasterWeights(Optimizer):
    """Steps fp32 masters of half-precision parameters with an optimizer of some kind, and rounds them back.

    `state` has what that optimizer keeps of each parameter, and its master. Groups are those of the parameters; their
    learning rates and other options are taken over at every step.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        super().__init__([dict(group) for group in self._inner.param_groups], self._inner.defaults)
        self._inner.param_groups = []  # or it would keep whole parameters alive that are about to be sharded
        self._masters: dict[Tensor, Tensor] = {}  # a parameter's; those in fp32 are their own
        self._shown = True

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: torch's own has only what every optimizer has."""
        own = {"_inner": self._inner, "_masters": self._masters, "_shown": self._shown}
        return {**super().__getstate__(), **own}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of the wrapped optimizer on the masters of all parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_groups()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for part in _spans(self._step_in_one_pass(group, weights)):
                self._step_part(group, part)
        self._show()
        return loss

    def _step_in_one_pass(self, group: ParameterGroup, weights: Sequence[Tensor]) -> list[Tensor]:
        """Step those that a kernel of ours can, and return the others.

        In its first step a weight is one of the others: the wrapped optimizer makes its states.
        """
        large = [weight for weight in weights if _local(weight).numel() >= WORTH_A_KERNEL]
        if not large or not _has_kernel(self._inner, group):
            return list(weights)
        from packtrain.training.master_kernel import AdamRates, Stepped, step_all

        first, second = group["betas"]
        decay = group["weight_decay"]
        rates = AdamRates(rate=group["lr"], first=first, second=second, epsilon=group["eps"], decay=decay)
        done: dict[Tensor, Stepped] = {}
        for weight in large:
            master = self._masters[weight]
            state = {name: _local(kept) for name, kept in self._inner.state.get(master, {}).items()}
            one = Stepped(weight=_local(weight), gradient=_local(weight.grad), master=_local(master), state=state)
            fusable = master is not weight and state.keys() == _ADAM_STATE and _has_known_dtypes(one)
            if fusable and _fit_kernel(one.tensors()):
                done[weight] = one
        if done:
            torch._foreach_add_([one.state["step"] for one in done.values()], 1)
        for place in {one.place for one in done.values()}:
            step_all([one for one in done.values() if one.place == place], rates)
        return [weight for weight in weights if weight not in done]

    def _step_part(self, group: ParameterGroup, weights: Sequence[Tensor]) -> None:
        if any(weight.grad.is_sparse for weight in weights if weight.grad is not None):
            raise ConfigError(
                "training.master_weights",
                got="sparse gradients",
                expected="dense gradients",
                fix="create embeddings with sparse=False, or set training.master_weights: false",
            )
        masters = [self._masters[weight] for weight in weights]
        half = [(weight, master) for weight, master in zip(weights, masters, strict=True) if master is not weight]
        for _, master in half:
            master.grad = torch.empty_like(master)
        _copy([master.grad for _, master in half], [weight.grad for weight, _ in half])
        self._inner.param_groups = [self._options(group, masters)]
        self._inner.step()
        self._inner.param_groups = []
        _copy([weight for weight, _ in half], [master for _, master in half])
        for _, master in half:
            master.grad = None

    def _options(self, group: ParameterGroup, masters: Sequence[Tensor]) -> dict[str, Any]:
        return {**self._inner.defaults, **group, "params": list(masters)}

    def _follow_groups(self) -> None:
        """A master for every parameter that is in a group now."""
        now = _in_groups(self.param_groups)
        if len(now) == len(self._masters) and all(weight in self._masters for weight in now):
            return
        masters = self._masters
        self._masters = {weight: masters[weight] if weight in masters else _make_master(weight) for weight in now}

    def _show(self) -> None:
        """Show the wrapped optimizer's state as that of the parameters; optimizers may replace it at every step."""
        for weight, master in self._masters.items():
            kept: dict[str, Any] = dict(self._inner.state.get(master, {}))
            if master is not weight and self._shown:
                kept[MASTER] = master
            if kept:
                self.state[weight] = kept
            else:
                self.state.pop(weight, None)

    # ---- states

    @contextmanager
    def as_before_masters(self) -> Iterator[None]:
        """The state has no masters meanwhile: for reading a sharded checkpoint that has none."""
        self._shown = False
        self._show()
        try:
            yield
        finally:
            self._shown = True
            self._show()

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Like torch's, but nothing is rounded to the precision of the parameters."""
        kept, saved = _without_masters(state_dict["state"])
        super().load_state_dict({**state_dict, "state": {}})
        self._masters = {}  # nothing of before stays, or it would be there beside what is loaded
        self._inner.state.clear()
        if not state_dict[
            "state"
        ]:  # a state before the first step; also accelerate's, before weights have their places
            return
        names, missing = _in_groups(state_dict["param_groups"]), 0
        for name, weight in zip(names, _in_groups(self.param_groups), strict=True):
            self._masters[weight] = _restore_master(weight, saved.get(name))
            missing += weight.dtype in HALF and name in kept and name not in saved
        groups = [self._options(group, [self._masters[one] for one in group["params"]]) for group in self.param_groups]
        self._inner.param_groups = groups
        self._inner.load_state_dict({"state": kept, "param_groups": state_dict["param_groups"]})
        self._inner.param_groups = []
        if missing:
            warnings.warn(
                f"the checkpoint has no fp32 masters of {missing} half-precision parameters: they are created from "
                "the weights, and updates that were rounded away are lost",
                stacklevel=2,
            )
        self._show()

    @torch.no_grad()
    def follow_weights(self) -> None:
        """Where a weight is no longer its master rounded, somebody has set it: the master follows."""
        for weight, master in self._masters.items():
            if master is not weight:
                here, wide = _local(weight), _local(master)
                wide.copy_(torch.where(wide.to(here.dtype) == here, wide, here.to(wide.dtype)))


def masters_of(optimizer: Any) -> MasterWeights | None:
    """An optimizer with masters, also where accelerate has put its own around it."""
    while not isinstance(optimizer, MasterWeights) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, MasterWeights) else None


def _make_master(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.float32) if weight.dtype in HALF else weight


def _restore_master(weight: Tensor, saved: Tensor | None) -> Tensor:
    """A saved master as it is, without a copy of it; a weight that is fp32 now becomes what its master was."""
    if saved is None:
        return _make_master(weight)
    if weight.dtype in HALF:
        return saved.detach().to(device=weight.device, dtype=torch.float32)
    return weight.copy_(saved)


def _has_kernel(optimizer: Optimizer, group: ParameterGroup) -> bool:
    """Is this AdamW as it is by default, asked to be fused?"""
    plain = type(optimizer) is torch.optim.AdamW and bool(group.get("fused")) and isinstance(group["lr"], float)
    return plain and not group["amsgrad"] and not group["maximize"] and find_spec("triton") is not None


def _has_known_dtypes(one: Stepped) -> bool:
    """Gradients as wide as their weight, states as wide as masters: the kernel goes by that; torch allows others."""
    weight, gradient, *wide = one.tensors()
    same = gradient.dtype == weight.dtype and gradient.numel() == weight.numel()
    return same and all(part.dtype == torch.float32 for part in wide)


def _fit_kernel(tensors: Sequence[Tensor]) -> bool:
    """Tensors that a kernel can go through side by side."""
    return all(
        one.is_cuda
        and one.device == tensors[0].device
        and one.layout == torch.strided
        and one.is_contiguous()
        and one.data_ptr() % 16 == 0
        for one in tensors
    )


def _in_groups(groups: Sequence[ParameterGroup]) -> list[Any]:
    """The members of all groups, in order: parameters, or their names in a saved state."""
    return list(chain.from_iterable(group["params"] for group in groups))


def _without_masters(state: Mapping[Any, Mapping[str, Any]]) -> tuple[dict[Any, dict[str, Any]], dict[Any, Tensor]]:
    """A saved state without masters, and they."""
    kept = {key: {name: one for name, one in values.items() if name != MASTER} for key, values in state.items()}
    return kept, {key: values[MASTER] for key, values in state.items() if MASTER in values}


def _spans(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Spans of parameters of not more numbers than are fp32 at once, or of one parameter."""
    part, numbers = list[Tensor](), 0
    for weight in weights:
        size = _local(weight).numel()
        if part and numbers + size > AT_ONCE:
            yield part
            part, numbers = [], 0
        part.append(weight)
        numbers += size
    if part:
        yield part


def _copy(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Into tensors of another precision; of sharded ones, what is here."""
    if targets:
        torch._foreach_copy_([_local(one) for one in targets], [_local(one) for one in sources])


def _local(tensor: Any) -> Tensor:
    """The tensor, or this rank's shard of it."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
