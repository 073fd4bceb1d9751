"""What each option would save of the worst case, and the worst case in plain sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from packtrain.core.errors import ConfigError
from packtrain.predicting.memory import DEFAULT_COEFFICIENTS, MemoryCoefficients, estimate_memory
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

# Options that train the same weights in the same way.
CHEAP = (
    *("gradient checkpointing", "vision checkpointing", "vision sub-batches"),
    *("chunked loss", "attention", "sharding"),
)
_NAMED = 3  # samples of the worst pack that a sentence names
NOTHING = 0.002  # of the memory: an option that saves less saves nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """One change alone, everything else as it is; negative bytes are what it would need on top."""

    option: str
    change: str
    bytes: int
    total_after: int
    cost: str  # what it costs, or gives back, in time or elsewhere; why it saves nothing, where it does not
    seconds: float | None = None  # an epoch with it, predicted
    lost: int = 0  # samples that it leaves out beside those that are left out anyway


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """What packs use of one resource, and what the settings allow."""

    name: str  # in the plural: images, tiles, patches, vision tokens
    worst_pack: int  # the most that one pack of the plan has
    worst_pass: int  # the most that one forward pass has; as worst_pack where a pass sees one pack
    setting: str = ""  # the limit's name, as users write it
    limit: int | None = None  # of one pack
    tokens_each: int | None = None  # the fewest tokens that one of these takes up
    multiplied: int | None = None  # of one pack, by multiplying other limits, where it has none of its own

    def __post_init__(self) -> None:
        if self.tokens_each is not None and self.tokens_each < 1:
            raise ConfigError(f"tokens of {self.name}", got=self.tokens_each, expected="at least 1, or none")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstPack:
    """The pack that needs the most memory."""

    number: int
    tokens: int
    patches: int
    images: int
    samples: tuple[str, ...]  # ids, the heaviest first


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """How much of a resource a forward pass can meet, beside what the product of the limits would say."""

    resource: str
    reachable: int
    product_of_limits: int | None
    binding: bool  # False: the limit can never be what stops a pack
    sentence: str


def savings(
    shape: ModelShape,
    setup: TrainingSetup,
    load: Load,
    coefficients: MemoryCoefficients = DEFAULT_COEFFICIENTS,
    seconds: Callable[[TrainingSetup], float | None] = lambda _: None,
) -> tuple[Saving, ...]:
    """Every option that is not yet taken, the largest saving first; `seconds` says how long an epoch takes with one."""
    now = estimate_memory(shape, setup, load, coefficients)

    def saving(option: str, change: str, cost: str, then: TrainingSetup) -> Saving:
        total = estimate_memory(shape, then, load, coefficients).total
        saved = now.total - total
        if saved == 0:
            cost += f"; saves nothing, since memory peaks during {now.moment}, when this is not held"
        return Saving(
            option=option, change=change, bytes=saved, total_after=total, cost=cost, seconds=seconds(then), lost=0
        )

    found = [saving(*option) for option in _options(shape, setup, load)]
    return tuple(sorted(found, key=lambda one: (-one.bytes, one.option, one.change)))


_Option = tuple[str, str, str, TrainingSetup]  # option, change, cost, the setup with it


def _options(shape: ModelShape, setup: TrainingSetup, load: Load) -> Iterator[_Option]:
    if setup.gradient_checkpointing:
        then = replace(setup, gradient_checkpointing=False)
        yield "gradient checkpointing", "on -> off", "gives back about a quarter of the decoder's time", then
    else:
        then = replace(setup, gradient_checkpointing=True)
        yield "gradient checkpointing", "off -> on", "each layer runs forward twice: about a third more time", then
    if shape.vision is not None and load.patches:
        yield from _vision_options(setup, load)
    if not setup.chunked_loss:
        then = replace(setup, chunked_loss=True)
        change = f"logits at supervised positions only, {setup.loss_chunk:,} at once"
        yield "chunked loss", change, "none worth mentioning; logits are not returned", then
    kernels = {"eager": ("sdpa", "varlen"), "sdpa": ("varlen",), "varlen": ()}[setup.attention]
    for kernel in kernels:
        cost = "none, it is faster" if kernel == "varlen" else "none"
        yield "attention", f"{setup.attention} -> {kernel}", cost, replace(setup, attention=kernel)  # type: ignore[arg-type]
    yield from _state_options(setup)


def _vision_options(setup: TrainingSetup, load: Load) -> Iterator[_Option]:
    if setup.train_vision:
        on = setup.vision_checkpointing
        cost = "gives back about a quarter of the encoder's time" if on else "the encoder runs forward twice"
        then = replace(setup, vision_checkpointing=not on)
        yield "vision checkpointing", "on -> off" if on else "off -> on", cost, then
        yield (
            "frozen vision encoder",
            "trained -> frozen",
            "the encoder learns nothing; it also runs no backward pass",
            replace(setup, train_vision=False),
        )
    if setup.train_vision and not setup.vision_checkpointing:
        return  # then everything is kept for the backward pass, in however many parts it was computed
    whole = min(load.patches, setup.vision_batch_patches or load.patches)
    for name, share in (("half", 2), ("a quarter", 4), ("an eighth", 8)):
        patches = max(whole // share, load.largest_patches, 1)
        if patches < whole:
            then = replace(setup, vision_batch_patches=patches)
            yield "vision sub-batches", f"{name}: {patches:,} patches at once", "smaller kernels, a little slower", then


def _state_options(setup: TrainingSetup) -> Iterator[_Option]:
    if setup.weights_dtype == "fp32":
        cost = "less exact updates; faster on GPUs with bf16"
        yield "weights in bf16", "fp32 -> bf16", cost, replace(setup, weights_dtype="bf16")
    if setup.method == "full":
        cost = f"only adapters of rank {setup.lora_rank} learn in the decoder"
        yield "LoRA", f"full -> lora, rank {setup.lora_rank}", cost, replace(setup, method="lora")
    if setup.method != "qlora":
        cost = "adapters only, over weights in 4 bits that are unpacked in every micro-batch: slower"
        yield "QLoRA", f"{setup.method} -> qlora, rank {setup.lora_rank}", cost, replace(setup, method="qlora")
    whole = setup.method == "full" or setup.train_vision or setup.train_projector
    if whole and setup.has_masters and not setup.sharding.startswith("zero"):
        cost = "updates below the precision of the weights are lost, most of them at low learning rates"
        yield "master weights", "fp32 -> none", cost, replace(setup, master_weights=False)
    if setup.optimizer == "adamw":
        then = replace(setup, optimizer="adamw_8bit")
        cost = "needs bitsandbytes; states are rounded, and weights have no fp32 masters"
        yield "8-bit optimizer", "adamw -> adamw_8bit", cost, then
        then = replace(setup, optimizer="adafactor")
        yield "factored optimizer", "adamw -> adafactor", "another optimizer: tune its learning rate", then
    if setup.gpus > 1:
        costs = {
            "zero2": "needs DeepSpeed; about the same communication",
            "zero3": "needs DeepSpeed; weights are gathered in every micro-batch",
            "fsdp": "weights are gathered in every micro-batch",
        }
        for sharding, cost in costs.items():
            if sharding != setup.sharding:
                then = replace(setup, sharding=sharding)  # type: ignore[arg-type]
                yield "sharding", f"{setup.sharding} -> {sharding} over {setup.gpus} GPUs", cost, then


def reach(resource: Resource, *, packing_length: int, packs_at_once: int = 1) -> Reach:
    """What one forward pass can meet of a resource, and whether its limit can ever stop a pack."""
    each = resource.limit if resource.limit is not None else resource.multiplied
    held = None if resource.tokens_each is None else packing_length // resource.tokens_each
    can_bind = resource.limit is not None and (held is None or held >= resource.limit)
    return Reach(
        resource=resource.name,
        reachable=resource.worst_pass,
        product_of_limits=None if each is None else each * packs_at_once,
        binding=can_bind,
        sentence=_limit_sentence(resource, held, packing_length),
    )


def _limit_sentence(resource: Resource, held: int | None, packing_length: int) -> str:
    name, limit = resource.name, resource.limit
    if limit is None:
        return f"no limit on {name} is set"
    setting = f"{resource.setting or 'the limit on ' + name} {limit:,}"
    if held is not None and held < limit:
        tokens = resource.tokens_each
        return f"{packing_length:,} tokens hold at most {held:,} {name} of {tokens:,} tokens, so {setting} never binds"
    if resource.worst_pack >= limit:
        return f"{setting} binds"
    return f"{setting} does not bind in this plan"


def explain_worst(
    pack: WorstPack, resources: Iterable[Resource], *, packing_length: int, packs_at_once: int = 1
) -> tuple[str, ...]:
    """The worst case in sentences: which samples make it, how far a pass can go, and which limits matter."""
    passes = "A micro-batch" if packs_at_once == 1 else f"A micro-batch of {packs_at_once} packs"
    sentences = [_pack_sentence(pack, packing_length)]
    for one in resources:
        found = reach(one, packing_length=packing_length, packs_at_once=packs_at_once)
        product = found.product_of_limits
        own = packs_at_once == 1 and one.limit is not None  # then the limit itself, which is said anyway
        whole = "" if product is None or own else f"; the product of the limits is {product:,}"
        sentences.append(f"{passes} has at most {found.reachable:,} {found.resource}{whole}; {found.sentence}.")
    return tuple(sentences)


def _pack_sentence(pack: WorstPack, packing_length: int) -> str:
    named = ", ".join(pack.samples[:_NAMED])
    more = len(pack.samples) - _NAMED
    samples = f"{len(pack.samples)} {'sample' if len(pack.samples) == 1 else 'samples'}"
    return (
        f"Pack {pack.number:,} needs the most memory: {pack.tokens:,} of {packing_length:,} tokens, {pack.patches:,} "
        f"patches and {pack.images:,} images from {samples} ({named}{f' and {more} more' if more > 0 else ''})."
    )
