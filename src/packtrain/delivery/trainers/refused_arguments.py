"""The TrainingArguments that are refused on packs: one table, each row with who refuses it, and why.

Not in it: arguments that follow from a schedule (batch size, accumulation, steps), which `mixin` compares with it; and
settings of a config that contradict each other, which are in `config.arguments`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # configs are checked without transformers
    from transformers import TrainingArguments

RefusedBy = Literal["packs", "trainer", "config"]
PACKS: frozenset[RefusedBy] = frozenset(("packs",))  # every Trainer with `PackedTrainerMixin`
TRAINER: frozenset[RefusedBy] = frozenset(("trainer",))  # PackedTrainer only
CONFIG: frozenset[RefusedBy] = frozenset(("config",))  # the keys of a config, before anything is loaded
SHARDED = "SHARDED_STATE_DICT"


def _is_on(value: Any, default: Any) -> bool:
    return bool(value)


def _is_off(value: Any, default: Any) -> bool:
    return not value


def _is_changed(value: Any, default: Any) -> bool:
    """Differs from the default; "off" is a choice too."""
    return bool(value != default)


def _is_turned_on(value: Any, default: Any) -> bool:
    """Differs from the default and is not off."""
    return bool(value != default and value)


@dataclass(frozen=True, slots=True)
class RefusedArgument:
    """One argument; a name with a dot is an entry of an argument that holds several."""

    name: str
    why: str
    by: frozenset[RefusedBy] = PACKS
    wrong: Callable[[Any, Any], bool] = _is_on  # of its value and its default
    only_with: str = ""  # an argument without which this one does nothing
    only_packed: bool = False  # padded rows may have it
    only_ranks: bool = False  # a single process may have it; a config may be run by several

    def problem(self, value: Any) -> str:
        """The problem in words."""
        return f"{self.name}: {value} ({self.why})"


OWN_LOSS = "a custom loss does not see it: apply it there"
_LABELS = "labels come with the packs: the loss mask is set when the dataset is built"
_ROWS = "rows are packs of the dataset; its config decides their contents"
_ORDER = "the schedule sets the order"
_TEXTS = "texts were rendered when the dataset was built"
_COLLECTIVE = "it needs a loader that accelerate shards"
_LOADED = "ranks that share a batch would each get their own packs"

REFUSED: tuple[RefusedArgument, ...] = (
    # ---- what would lose data, or train it twice
    RefusedArgument(
        "ignore_data_skip", "a resumed run would train the first packs again and never the last", PACKS | CONFIG
    ),
    RefusedArgument(
        "dataloader_drop_last",
        "nothing is dropped at delivery; packing_drop_last decides it in the plan",
        PACKS | CONFIG,
    ),
    RefusedArgument("remove_unused_columns", "batches are made by the collator, not by columns", PACKS | CONFIG),
    RefusedArgument("logging_nan_inf_filter", "a NaN loss must be visible", PACKS | CONFIG),
    RefusedArgument("auto_find_batch_size", "a batch is a pack; use a shorter packing_length", PACKS | CONFIG),
    RefusedArgument(
        "n_gpu",
        "one process for several GPUs: a pack cannot be split; start one process per GPU, as torchrun does",
        wrong=lambda value, _: value > 1,
    ),
    RefusedArgument("accelerator_config.split_batches", _COLLECTIVE),
    RefusedArgument("accelerator_config.dispatch_batches", _COLLECTIVE),
    *(
        RefusedArgument(f"parallelism_config.{kind}_size", _LOADED, wrong=lambda value, _: (value or 1) > 1)
        for kind in ("tp", "cp", "sp")
    ),
    RefusedArgument("parallelism_config", "packs are not split across GPUs", CONFIG),
    RefusedArgument(
        "batch_eval_metrics", "the pack loader does not tell Trainer which batch is last", wrong=_is_turned_on
    ),
    # ---- what would change the order
    RefusedArgument(
        "train_sampling_strategy",
        "the schedule sets the order; its `balance` balances the work of ranks",
        wrong=lambda value, _: value not in (None, "random", "sequential"),
    ),
    RefusedArgument("data_seed", _ORDER, wrong=_is_changed),
    RefusedArgument("length_column_name", _ORDER, wrong=_is_turned_on),
    RefusedArgument("dataloader_in_order", _ORDER, wrong=_is_changed),
    # ---- what would change the loss
    RefusedArgument(
        "average_tokens_across_devices",
        "False would overweight tokens of ranks with short packs",
        PACKS | CONFIG,
        _is_off,
        only_ranks=True,
    ),
    RefusedArgument("label_smoothing_factor", "from 0 to below 1", wrong=lambda value, _: not 0 <= value < 1),
    RefusedArgument(
        "label_names", "the labels of packs are called labels", wrong=lambda value, _: value not in (None, ["labels"])
    ),
    RefusedArgument(
        "neftune_noise_alpha",
        "its noise shrinks with the length of a row, so packed samples get less; leave it out, or train padded rows "
        "(packing: false)",
        PACKS | TRAINER,  # whatever the collator is
        wrong=_is_turned_on,
        only_packed=True,
    ),
    RefusedArgument(
        "use_liger_kernel",
        "it replaces forward passes and the loss, which were not checked with packs; training.chunked_loss saves the "
        "same memory",
        PACKS | TRAINER | CONFIG,
    ),
    RefusedArgument("prediction_loss_only", "evaluation computes only the loss", CONFIG, _is_off),
    # ---- TRL's
    RefusedArgument(
        "dataset_kwargs",
        "only skip_prepare_dataset, since the dataset is already built",
        wrong=lambda value, _: bool(set(value or {}) - {"skip_prepare_dataset"}),
    ),
    RefusedArgument("loss_type", "the loss is token_loss; give a compute_loss_func for another", wrong=_is_turned_on),
    RefusedArgument("router_aux_loss_coef", "token_loss has no router loss", wrong=_is_turned_on),
    RefusedArgument("completion_only_loss", _LABELS, wrong=_is_changed),
    RefusedArgument("assistant_only_loss", _LABELS, wrong=_is_turned_on),
    *(
        RefusedArgument(name, _ROWS, wrong=_is_turned_on)
        for name in ("packing", "packing_strategy", "truncation_mode", "eval_packing", "padding_free", "max_length")
    ),
    RefusedArgument("shuffle_dataset", _ORDER, wrong=_is_turned_on),
    RefusedArgument("pad_to_multiple_of", "get_collator(pad_to_multiple=...) does it", wrong=_is_turned_on),
    *(
        RefusedArgument(name, _TEXTS, wrong=_is_turned_on)
        for name in ("chat_template_path", "dataset_text_field", "eos_token", "pad_token")
    ),
    # ---- what PackedTrainer does itself
    RefusedArgument(
        "torch_compile",
        "it recompiles the whole model for every shape; use `compile`, which compiles its layers",
        TRAINER | CONFIG,
    ),
    RefusedArgument(
        "enable_jit_checkpoint", "SIGTERM is handled already, with a checkpoint at the end of the step", TRAINER
    ),
    RefusedArgument("restore_callback_states_from_checkpoint", "everything needed is restored without it", TRAINER),
    RefusedArgument("resume_from_checkpoint", "use --resume", CONFIG),
    RefusedArgument(
        "gradient_checkpointing_kwargs",
        "adapters and frozen parts need non-reentrant checkpointing; leave it out",
        CONFIG,
        lambda value, _: value not in (None, {}, {"use_reentrant": False}),
    ),
    RefusedArgument(
        "fsdp_config.version",
        "only version 2 is supported",
        TRAINER,
        lambda value, _: value is not None and int(value) != 2,
        only_with="fsdp",
    ),
    RefusedArgument(
        "fsdp_config.state_dict_type",
        f"only {SHARDED}, which any number of ranks can load",
        TRAINER,
        lambda value, _: value not in (None, SHARDED),
        only_with="fsdp",
    ),
    RefusedArgument("fp16_full_eval", "it would cast the trained weights", TRAINER),
    RefusedArgument("bf16_full_eval", "it would cast the trained weights", TRAINER),
)

# What PackedTrainer refuses of what Trainer takes beside its TrainingArguments.
REFUSED_OPTIONS = {
    "compute_metrics": "there are no logits, only a loss",
    "preprocess_logits_for_metrics": "there are no logits, only a loss",
    "model_init": "pass a model prepared for packs",
}


def refused_arguments(args: TrainingArguments, by: RefusedBy, *, packing: bool = True) -> list[str]:
    """Problems with arguments, one sentence each. `packing`: rows may hold several samples."""
    defaults = {one.name: one.default for one in fields(args)}
    return [
        row.problem(value)
        for row, value in _values(args, by)
        if row.wrong(value, defaults.get(row.name))
        if not row.only_with or getattr(args, row.only_with)
        if packing or not row.only_packed
        if args.world_size > 1 or not row.only_ranks
    ]


def _values(args: TrainingArguments, by: RefusedBy) -> Iterator[tuple[RefusedArgument, Any]]:
    """The rows of arguments that this version, or kind, of TrainingArguments has."""
    for row in REFUSED:
        name, _, entry = row.name.partition(".")
        if by not in row.by or not hasattr(args, name):
            continue
        value = getattr(args, name)
        if entry:
            value = value.get(entry) if isinstance(value, Mapping) else getattr(value, entry, None)
        yield row, value


def refused_settings(settings: Mapping[str, object]) -> list[str]:
    """Problems with the keys that a config sets."""
    rows = (row for row in REFUSED if "config" in row.by and row.name in settings)
    return [row.problem(settings[row.name]) for row in rows if row.wrong(settings[row.name], None)]


NOT_IN_CONFIG = frozenset(row.name for row in REFUSED if "config" in row.by)
