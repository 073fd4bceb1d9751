"""`doctor`: what packtrain can use of this machine and its packages, and what each missing part is for."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote, urlsplit

import packtrain
from packtrain.core.cache_root import cache_dir
from packtrain.core.numbers import gib, memory

_TRAIN = "train"
# Packages, what they are for, and the extra that installs them.
_EXTRAS = (
    ("transformers", "training, verify, and the check of costs against the real processor", _TRAIN),
    ("torchvision", "the image processors of training", _TRAIN),
    ("accelerate", "training on several GPUs", _TRAIN),
    ("peft", "LoRA and DoRA", _TRAIN),
    ("datasets", "Hugging Face datasets by name or folder", _TRAIN),
    ("bitsandbytes", "QLoRA and 8-bit optimizers", "qlora"),
    ("deepspeed", "sharding zero1 and zero2; fsdp needs no package", "deepspeed"),
    ("fsspec", "remote data: http, s3 and others", "remote"),
    ("indexed_gzip", "reading from compressed shards without unpacking them", "shards"),
    ("ray", "measuring on a cluster", "ray"),
    ("tensorboard", "report_to: tensorboard", "loggers"),
    ("wandb", "report_to: wandb", "loggers"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One thing that may be available."""

    group: str  # machine, kernels, packages or places
    name: str
    details: str  # version or details; "" if it is missing
    gives: str = ""  # what it is for
    get: str = ""  # how to get it


def examine() -> list[Component]:
    """All components, the most important first."""
    return [*_machine(), *_kernels(), *_packages(), *_places()]


def _machine() -> Iterator[Component]:
    yield Component(group="machine", name="packtrain", details=packtrain.__version__)
    yield Component(group="machine", name="Python", details=f"{platform.python_version()} ({sys.executable})")
    yield Component(group="machine", name="cores", details=f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    torch = _torch()
    built = f" for CUDA {torch.version.cuda}" if torch is not None and torch.version.cuda else " without CUDA"
    version = f"{torch.__version__}{built}" if torch is not None else ""
    yield Component(group="machine", name="torch", details=version, gives="training and verify", get=_install(_TRAIN))
    yield Component(
        group="machine", name="driver", details=_driver(), gives="NVIDIA GPUs", get="install NVIDIA's driver"
    )
    gpus = _gpus(torch)
    missing = "training at full speed; tiny models also train on a CPU"
    get = "a torch with CUDA, a driver and a GPU" if torch is not None else _install(_TRAIN)
    yield Component(group="machine", name="GPUs", details=gpus, gives=missing, get=get)


def _kernels() -> Iterator[Component]:
    torch = _torch()
    gpu = bool(_gpus(torch))
    varlen = torch is not None and find_spec("torch.nn.attention.varlen") is not None
    flex = torch is not None and find_spec("torch.nn.attention.flex_attention") is not None
    where = "" if gpu else ", for use on a GPU"
    yield Component(
        group="kernels",
        name="varlen",
        details=f"of torch {torch.__version__}" if varlen else "",
        gives="padding-free packs without a mask",
        get="pip install 'torch>=2.11'",
    )
    yield Component(
        group="kernels",
        name="flex attention",
        details=f"of torch {torch.__version__}{where}" if flex else "",
        gives="compiled block masks for packs",
        get=_install(_TRAIN),
    )
    built = "build it from flash-attention's hopper folder"
    for name, package, number, get in (
        ("flash-attn", "flash_attn", 2, "pip install flash-attn --no-build-isolation"),
        ("flash-attn 3", "flash_attn_interface", 3, built),
    ):
        yield Component(
            group="kernels",
            name=name,
            details=_version(package, name.split(" ")[0]),
            gives=f"attn_implementation: flash_attention_{number}; varlen does the same without it",
            get=get,
        )
    yield Component(
        group="kernels",
        name="triton",
        details=_version("triton"),
        gives="compiled layers on a GPU",
        get=_install(_TRAIN),
    )


def _packages() -> Iterator[Component]:
    for name, gives, extra in _EXTRAS:
        yield Component(group="packages", name=name, details=_version(name), gives=gives, get=_install(extra))


def _places() -> Iterator[Component]:
    folder = cache_dir()
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = f"{memory(shutil.disk_usage(there).free)} free"
    writable = os.access(there, os.W_OK)
    yield Component(
        group="places",
        name="cache",
        details=f"{folder}, {free}" if writable else "",
        gives=f"reusing earlier results; {folder} is not writable",
        get="set PACKTRAIN_CACHE to a writable folder",
    )
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    yield Component(
        group="places",
        name="hub",
        details="" if offline else "used for models and datasets that are not local",
        gives="models and datasets by hub name; HF_HUB_OFFLINE uses local ones only",
        get="unset HF_HUB_OFFLINE",
    )


def _install(extra: str) -> str:
    """The command that installs an extra, from the source folder if packtrain was installed from one."""
    try:
        noted = json.loads(metadata.distribution("packtrain").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        noted = {}
    url = urlsplit(noted.get("url", ""))
    folder = unquote(url.path) if url.scheme == "file" else ""
    return f"pip install '{folder if os.path.exists(folder) else 'packtrain'}[{extra}]'"


def _torch() -> Any:
    try:
        import torch
    except (ImportError, OSError):  # OSError: a CUDA library that cannot be loaded
        return None
    return torch


def _gpus(torch: Any) -> str:
    if torch is None or not torch.cuda.is_available():
        return ""
    properties = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = [f"{one.name}, {gib(one.total_memory)}, capability {one.major}.{one.minor}" for one in properties]
    return "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.split()), "")


def _version(package: str, distribution: str | None = None) -> str:
    """The version of an installed package, without importing it."""
    if find_spec(package) is None:
        return ""
    try:
        return metadata.version(distribution or package)
    except metadata.PackageNotFoundError:
        return "of unknown version"
