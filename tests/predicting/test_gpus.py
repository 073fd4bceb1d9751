"""GPUs are found by the names that people and drivers use, and the catalogue is plausible."""

from __future__ import annotations

import pytest

from packtrain.core.errors import ConfigError
from packtrain.predicting.gpus import CATALOGUE, find_gpu

SPELLINGS = {
    "h200": ("H200", "NVIDIA H200", "nvidia-h200", "H200 SXM", "h200-141gb"),
    "h100": ("h100", "NVIDIA H100 80GB HBM3", "H100-80GB", "H100 SXM5", "h100_sxm_80gb"),
    "h100-pcie": ("NVIDIA H100 PCIe", "h100pcie"),
    "h100-nvl": ("NVIDIA H100 NVL",),
    "a100-80": ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "a100 80gb", "A100-80"),
    "a100-40": ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "a100-40gb"),
    "l4": ("NVIDIA L4",),
    "l40s": ("NVIDIA L40S",),
    "a10g": ("NVIDIA A10G",),
    "a6000": ("NVIDIA RTX A6000", "A6000"),
    "rtx6000-ada": ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    "rtx-pro-6000": ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Server Edition"),
    "4090": ("NVIDIA GeForce RTX 4090", "RTX 4090", "rtx4090"),
    "v100-32": ("Tesla V100-SXM2-32GB", "V100 32GB"),
    "v100-16": ("Tesla V100-SXM2-16GB",),
    "t4": ("Tesla T4",),
    "gb200": ("NVIDIA GB200",),
    "mi300x": ("AMD Instinct MI300X", "MI300X OAM"),
}


@pytest.mark.parametrize(("name", "spelling"), [(name, text) for name, texts in SPELLINGS.items() for text in texts])
def test_names_as_people_and_drivers_write_them(name: str, spelling: str) -> None:
    assert find_gpu(spelling) is CATALOGUE[name]


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_entry_is_found_by_its_own_name_and_plausible(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.name == name
    assert find_gpu(name.upper().replace("-", " ")) is gpu
    assert 10 * 2**30 < gpu.memory_bytes < 300 * 2**30
    assert 50e12 < gpu.bf16_flops < 5000e12
    assert 0.2e12 < gpu.bandwidth < 10e12
    assert 10e9 < gpu.link_bandwidth < gpu.bandwidth
    # FLOPs per byte: from cards made for inference to those made for training.
    assert 30 < gpu.bf16_flops / gpu.bandwidth < 450


def test_usable_memory_is_below_the_number_in_the_name() -> None:
    assert find_gpu("h200").memory_bytes == int(139.8 * 2**30)
    for name, gigabytes in {"h200": 141, "h100": 80, "a100-80": 80, "a100-40": 40, "l4": 24, "t4": 16}.items():
        assert 0.9 * gigabytes * 2**30 < find_gpu(name).memory_bytes < gigabytes * 2**30


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("hh200", "did you mean 'h200'"), ("rtx 4080", "did you mean"), ("a100", "a100-80, a100-40"), ("v100", "v100-32")],
)
def test_unknown_names_are_answered_with_the_nearest(wrong: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_gpu(wrong)
    assert hint in str(caught.value)
    assert "mi300x" in str(caught.value), "the list is missing"


def test_one_of_your_own_is_the_nearest_with_other_figures() -> None:
    own = find_gpu("NVIDIA L40S, tflops=400,memory_gib=64.5")
    assert (own.memory_bytes, own.bf16_flops) == (int(64.5 * 2**30), 400e12)
    assert (own.bandwidth, own.link_bandwidth) == (CATALOGUE["l40s"].bandwidth, CATALOGUE["l40s"].link_bandwidth)
    assert own.name == "l40s,memory_gib=64.5,tflops=400"
    assert find_gpu(own.name) == own, "what reports and commands say is understood"


@pytest.mark.parametrize(
    "wrong", ["memory=64", "tflops", "tflops=0", "tflops=nan", "tflops=1,tflops=2", "", "tflops=inf"]
)
def test_figures_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="memory_gib, tflops"):
        find_gpu(f"h100,{wrong}")


@pytest.mark.parametrize("wrong", ["", "  ", "NVIDIA", "toaster"])
def test_names_of_nothing_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="h200"):
        find_gpu(wrong)
