"""What is wrong with a run's data, said of the key of its config that names them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from packtrain.config.run_config import RunConfig
from packtrain.core.errors import DataError, PacktrainError

_SETTING = "dataset_path"  # what whoever opens data calls them
_OPTIONS = {  # of `measure`, and the keys that say them in a config
    f"--{name.replace('_', '-')}": f"data.{name}"
    for name in ("max_failure_rate", "media_root", "allow_outside_root", "chat_template", "on_error", "schema")
}


@contextmanager
def data_of(config: RunConfig, key: str, path: str) -> Iterator[None]:
    """Errors inside name this key of section data, as the user wrote it, and the data that it stands for."""
    try:
        yield
    except PacktrainError as error:
        if not (isinstance(error, DataError) or error.where.startswith("dataset")):
            raise  # about the model, or the cache
        raise _renamed(error, _written(config, f"data.{key}"), path) from error


def _renamed(error: PacktrainError, key: str, path: str) -> PacktrainError:
    named = error.where.split(" ")[0] == _SETTING
    where = key + error.where.removeprefix(_SETTING) if named else f"{key} {path}: {error.where}"
    fix = error.fix
    for option, setting in _OPTIONS.items():
        fix = fix.replace(option, setting)
    return type(error)(where, got=error.got, expected=error.expected, fix=fix)


def _written(config: RunConfig, key: str) -> str:
    """The key by the name that the config has for it, where that is another system's."""
    name = dict(config.called).get(key)
    return f"{name} ({key})" if name else key
