"""Which family serves a model type: one line for each folder here, and the families of users."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata

from packtrain.core.errors import ConfigError, nearest
from packtrain.core.fingerprint import digest
from packtrain.core.user_code import import_named
from packtrain.core.values import MediaLimits
from packtrain.families.family import Family, ModuleNames, NoRule, ProcessorSettings, Rule, TextOnly
from packtrain.families.shape import Config

# Lazy paths, each with the model types (transformers' names) that its FAMILIES describe.
BUILT_IN: Mapping[str, tuple[str, ...]] = {
    "packtrain.families.qwen_vl": (
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
    ),
    "packtrain.families.idefics3": ("idefics3", "smolvlm"),
    "packtrain.families.llava": ("llava", "llava_next", "llava_onevision"),
    "packtrain.families.internvl": ("internvl",),
    "packtrain.families.gemma3": ("gemma3", "gemma3_text", "paligemma"),
    "packtrain.families.nanovlm": ("nanovlm",),
}
_TEXT = "packtrain.families.text"  # where model types without a line are looked for
ENTRY_POINTS = "packtrain.families"  # model_type = "module:FAMILY"


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """A user's family, and the module that registered it."""

    family: Family
    module: str


_registered: dict[str, Registered] = {}


def find_family(model_type: str) -> Family | None:
    """What is known of a model type; an installed entry point of its name is loaded when it is first asked for."""
    if model_type in _registered:
        return _registered[model_type].family
    path = next((path for path, served in BUILT_IN.items() if model_type in served), _TEXT)
    family = _of(path).get(model_type)
    if family is None and (point := _entry_points().get(model_type)) is not None:
        family = _loaded(point)
        if model_type not in _registered:  # its module may do that itself
            _register(family, point.module)
    return family


def all_families() -> dict[str, Family]:
    """Those that are built in and registered, by model type."""
    built_in = (_of(path) for path in (*BUILT_IN, _TEXT))
    users = {name: one.family for name, one in _registered.items()}
    return {**{name: family for families in built_in for name, family in families.items()}, **users}


def tiny_families() -> tuple[str, ...]:
    """Model types that have a tiny model."""
    return tuple(name for name, family in all_families().items() if family.tiny is not None)


def register_family(family: Family) -> None:
    """Serve a model type that packtrain does not know. Call it in a module that `model.plugins` names.

    Measuring, packing, verifying and training import that module in each of their processes.
    """
    _register(family, sys._getframe(1).f_globals["__name__"])


def _register(family: Family, module: str) -> None:
    name = family.model_type
    if name in {served for names in BUILT_IN.values() for served in names} | set(_of(_TEXT)):
        raise ConfigError(
            f"register_family({name!r})",
            got="a model type that packtrain already supports",
            expected="a new model type",
            fix="set another model_type in the model's config.json",
        )
    earlier = _registered.get(name)
    if earlier is not None and earlier.module != module:
        raise ConfigError(
            f"register_family({name!r})",
            got=f"two families of this name, from {earlier.module} and {module}",
            expected="one",
            fix="remove one of the two plugins",
        )
    if family.contract is not None and family.contract.media and family.small_image is None:
        raise ConfigError(
            f"register_family({name!r})",
            got="a contract with media, and no small_image",
            expected="a function that makes the smallest image: ranks with text-only packs run the encoder on it",
            fix="see docs/guides/extending.md",
        )
    _registered[name] = Registered(family=family, module=module)


def registered_modules() -> list[ModuleNames]:
    """What the families of users call the parts of their models."""
    return [one.family.modules for one in _registered.values()]


def load_plugins(modules: Iterable[str]) -> None:
    """Import the modules that a config names, which register their families."""
    for name in modules:
        import_named(name, where="model.plugins")


def plugins_for(named: Iterable[str], model_type: str) -> tuple[str, ...]:
    """The plugins that other processes have to import for a model type; also one that nobody named, if it served."""
    code = family_code(model_type)
    if code is not None and code["module"] == "__main__":
        raise ConfigError(
            f"register_family({model_type!r})",
            got="a family defined in the script itself, which other processes cannot import",
            expected="a module",
            fix="move it to its own file, and list that in model.plugins",
        )
    return tuple(dict.fromkeys((*named, *([code["module"]] if code is not None else []))))


def plugin_code() -> dict[str, dict[str, str]]:
    """By model type, where the families of users come from that this process has."""
    return {name: code for name in sorted(_registered) if (code := family_code(name)) is not None}


def family_code(model_type: str) -> dict[str, str] | None:
    """The module that a user's family comes from and a hash of its source; None for what is built in."""
    registered = _registered.get(model_type)
    if registered is None:
        return None
    try:
        source = inspect.getsource(sys.modules[registered.module])
    except (OSError, TypeError, KeyError):  # typed into an interpreter
        source = ""
    return {"module": registered.module, "source": digest(source)}


def _of(path: str) -> Mapping[str, Family]:
    families: Mapping[str, Family] = importlib.import_module(path).FAMILIES
    return families


@functools.cache
def _entry_points() -> Mapping[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}


def _loaded(point: metadata.EntryPoint) -> Family:
    try:
        family, wrong = point.load(), ""
    except Exception as error:  # the package runs here and can fail in any way
        family, wrong = None, f"{type(error).__name__}: {error}"
    if getattr(family, "model_type", None) == point.name:
        return family  # type: ignore[no-any-return]
    raise ConfigError(
        f"entry point {point.name} = {point.value!r} of {ENTRY_POINTS}",
        got=wrong or f"a {type(family).__name__} instead of the family of {point.name}",
        expected=f"a packtrain.Family with model_type {point.name!r}",
        fix="update or uninstall the package that provides it",
    )


# ---- rules


def _rule_of(settings: ProcessorSettings) -> type[Rule] | None:
    family = find_family(settings.model_type)
    if family is not None and family.rule is not None:
        return family.rule
    return None if settings.image or settings.video or settings.processor else TextOnly


def is_text_only(settings: ProcessorSettings) -> bool:
    """Does the model take no media at all?"""
    return _rule_of(settings) is TextOnly


def require_processor_files(settings: ProcessorSettings) -> None:
    """Refuse a model that takes media and whose folder does not say how: transformers would not load it either."""
    sees = not is_text_only(settings) and "vision_config" in settings.config
    if sees and not (settings.processor or settings.image or settings.video):
        raise ConfigError(
            f"model folder {settings.folder}",
            got="no processor files",
            expected="preprocessor_config.json or processor_config.json",
            fix="copy them, and chat_template.jinja, from the original model",
        )


def load_rule(settings: ProcessorSettings, limits: MediaLimits) -> Rule | None:
    """The rule for these settings; None where no rule covers them and the processor itself has to be run."""
    rule = _rule_of(settings)
    if rule is None:
        return None
    try:
        return rule(settings, limits)
    except NoRule:
        return None


# ---- published sizes, for random models of a real shape: what calibration runs where no files are


def known_shapes() -> dict[str, Config]:
    """The configs that families have of published sizes, by name."""
    return {name: config for family in all_families().values() for name, config in family.published.items()}


def known_config(name: str) -> Config:
    """The config of a known shape."""
    known = known_shapes()
    if name not in known:
        fix = nearest(name, known) or "or name a model folder"
        raise ConfigError("model shape", got=name, expected=", ".join(known), fix=fix)
    return known[name]
