"""A tokenizer as transformers builds it, written down for workers that have no transformers.

Some tokenizer classes take only vocabulary and merges from tokenizer.json and bring rules of their own. For those the
file alone does not give the ids that training will see, so the finished tokenizer is saved once, by another process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from packtrain.core.artifacts import made_once
from packtrain.core.errors import ConfigError
from packtrain.core.fingerprint import digest, files_state
from packtrain.families.family import ProcessorSettings

# Classes that take the file as it is, and classes whose own rules are those of their published files (tested).
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
AS_PUBLISHED = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast")
_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "config.json")
_VOCABULARIES = ("vocab*", "merges.txt", "*.model", "*.tiktoken")  # where there is no tokenizer.json


def finished_tokenizer(settings: ProcessorSettings, cache: Path) -> str | None:
    """The folder of the saved tokenizer; None where the model's own files give the same ids, or are all there is."""
    if _file_is_enough(settings) or importlib.util.find_spec("transformers") is None:
        return None
    source = Path(settings.folder)
    vocabularies = {path.name for pattern in _VOCABULARIES for path in source.glob(pattern)}
    state = files_state({name: source / name for name in sorted({*_FILES, *vocabularies})}, content=True)
    folder = cache / digest({"files": state, "transformers": importlib.metadata.version("transformers")})
    return str(made_once(folder, lambda fresh: _save_in_another_process(settings.folder, fresh)))


def _file_is_enough(settings: ProcessorSettings) -> bool:
    config, folder = settings.tokenizer_config, Path(settings.folder)
    name = config.get("tokenizer_class")
    if not (folder / "tokenizer.json").exists() or "eos_token" not in settings.special_tokens:
        return False
    if (folder / "added_tokens.json").exists() and not config.get("added_tokens_decoder"):
        return False
    return name in GENERIC or (name in AS_PUBLISHED and not config.get("add_prefix_space"))


def in_another_process(module: str, *arguments: str) -> str:
    """What a module of ours prints that loads transformers; RuntimeError with the last line of what went wrong."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout


def _save_in_another_process(source: str, folder: Path) -> None:
    try:
        in_another_process("packtrain.delivery.encode.finished_tokenizer", source, str(folder))
    except RuntimeError as error:
        raise ConfigError(
            source,
            got=str(error),
            expected="a fast tokenizer (of the tokenizers library) that transformers can load",
            fix="check the folder with AutoTokenizer.from_pretrained",
        ) from None


def _save(source: str, folder: str) -> None:
    """What the other process does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    (Path(folder) / "special_tokens.json").write_text(json.dumps(dict(tokenizer.special_tokens_map)))
    (Path(folder) / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str())


if __name__ == "__main__":
    _save(*sys.argv[1:])
