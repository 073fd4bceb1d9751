"""`packtrain verify`: exit codes, a table for people, JSON for machines, the user's own data and weights."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import packtrain.app.verify as app_verify
from packtrain.app.verify import verify
from packtrain.cli.terminal import Terminal
from packtrain.cli.verify import show_report
from packtrain.families import tiny
from packtrain.modeling.load import build_model
from packtrain.verifying import isolate, samples
from packtrain.verifying.check_result import CheckReport, CheckResult

Run = Callable[..., tuple[int, str, str]]


def chat(number: int, *media: str, words: int = 4) -> dict[str, Any]:
    said = " ".join(f"word{number + word}" for word in range(words))
    user = [{"type": "image", "image": name} for name in media] + [{"type": "text", "text": f"What is {number}?"}]
    return {
        "id": f"r{number}",
        "messages": [{"role": "user", "content": user}, {"role": "assistant", "content": said}],
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Text first, then images, and some that cannot be used."""
    for name, size in (("a.png", (96, 64)), ("b.png", (64, 64))):
        Image.effect_noise(size, 60).convert("RGB").save(tmp_path / name)
    records = [chat(number) for number in range(5)]
    records += [chat(5, "missing.png"), chat(6, "a.png"), {"nonsense": 1}, chat(7, "a.png", "b.png"), chat(8)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_json_says_what_the_table_says(run: Run) -> None:
    code, out, err = run("verify", "--model", "tiny:llama", "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["passed"] is True
    assert (said["model"], said["attn_implementation"], said["device"], said["dtype"]) == (
        "tiny:llama",
        "sdpa",
        "cpu",
        "float32",
    )
    assert said["samples"][0].startswith("text (")
    assert all(check["passed"] and check["difference"] <= check["allowed"] for check in said["checks"])
    assert said["tolerances"]
    code, out, err = run("verify", "--model", "tiny:llama", "--device", "cpu")
    assert (code, err) == (0, "")
    for check in said["checks"]:
        assert check["check"] in out
    assert f"passed: all {len(said['checks'])} checks, in " in out
    assert "Tolerances" in out
    assert "next: packtrain train" in out


def test_the_loop_on_cpu_is_named(run: Run) -> None:
    code, out, _ = run("verify", "--model", "tiny:llama", "--attn-implementation", "varlen", "--device", "cpu")
    assert code == 0
    assert "varlen-loop" in out
    assert "not checked: torch's varlen kernel" in out


def test_a_failed_check_is_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from packtrain.delivery.collate.collators import PackCollator

    right = PackCollator.__call__
    monkeypatch.setattr(PackCollator, "__call__", lambda self, rows: {**right(self, rows), "use_cache": True})
    code, out, err = run("verify", "--model", "tiny:llama", "--device", "cpu", "--json")
    said = json.loads(out)
    assert (code, err, said["passed"]) == (1, "", False)
    code, out, _ = run("verify", "--model", "tiny:llama", "--device", "cpu")
    assert code == 1
    assert "FAIL" in out
    assert "would be wrong" in out
    assert "next: try" in out


def test_a_check_that_could_not_fail_is_exit_code_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "needed_effect", lambda *_: 100.0)
    code, out, err = run("verify", "--model", "tiny:llama", "--device", "cpu", "--json")
    said = json.loads(out)
    assert (code, err, said["outcome"], said["passed"]) == (3, "", "inconclusive", False)
    weak = [check for check in said["checks"] if check["outcome"] == "inconclusive"]
    assert [check["check"] for check in weak] == ["neighbours, other text"]
    assert 0 < weak[0]["effect"] < weak[0]["needed"]
    code, out, _ = run("verify", "--model", "tiny:llama", "--device", "cpu")
    assert code == 3
    assert "inconclusive: " in out
    assert "nothing follows for its neighbours" in out


def test_the_config_of_the_loaded_model_decides(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that transformers derives are not in published files."""
    right = app_verify._load

    def load(*args: Any) -> Any:
        model = right(*args)
        model.config.layer_types = ["indexed_attention"] * model.config.num_hidden_layers
        return model

    monkeypatch.setattr(app_verify, "_load", load)
    code, _, err = run("verify", "--model", "tiny:llama", "--device", "cpu")
    assert code == 2
    assert "indexed_attention layers" in err


def test_synthetic_samples_are_longer_than_windows(run: Run) -> None:
    code, out, err = run("verify", "--model", "tiny:gemma3_text", "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    (longest,) = [name for name in said["samples"] if name.startswith("longest")]
    assert int(longest.split(", ")[1].split()[0].replace(",", "")) > 512, "its window"
    assert {"hidden states (longest)", "hidden states (static shape)", "training loss", "training gradients"} <= {
        check["check"] for check in said["checks"]
    }
    assert said["seconds"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "tiny:nanovlm"], ["cannot be trained here", "not in transformers"]),
        (
            ["--model", "tiny:gemma3", "--attn-implementation", "varlen"],
            ["bidirectional attention inside images", "sdpa"],
        ),
        (["--model", "tiny:llama", "--attn-implementation", "flash_attention_2"], ["flash_attention_2", "GPU"]),
        (["--model", "tiny:llama", "--attn-implementation", "sdp"], ["did you mean 'sdpa'?"]),
        (["--model", "tiny:lama"], ["did you mean 'tiny:llama'?"]),
        (["--model", "tiny:llama", "--dtype", "bf61"], ["dtype", "did you mean 'bf16'?"]),
        (["--model", "tiny:llama", "--device", "gpu"], ["device", "cpu, cuda"]),
        (["--model", "tiny:llama", "--shape", "smal"], ["did you mean 'small'?"]),
        (["--model", "org/name", "--shape", "small"], ["shape", "tiny:FAMILY"]),
        (["--model", "tiny:llama", "--samples", "1"], ["at least two samples"]),
        (["--model", "tiny:llama", "--data", "nowhere.jsonl"], ["nowhere.jsonl', which does not exist"]),
        ([], ["--model"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_bad_usage_is_exit_code_2(run: Run, options: list[str], words: list[str]) -> None:
    device = [] if "--device" in options else ["--device", "cpu"]
    code, out, err = run("verify", *options, *device, "--json")
    assert (code, out) == (2, ""), err
    for word in words:
        assert word in err


def test_refused_models_give_the_reason(run: Run, tmp_path: Path) -> None:
    folder = tiny.write("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for model_type, reason in (("paligemma", "4-D mask"), ("qwen3_next", "leak into the next")):
        (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        code, _, err = run("verify", "--model", folder, "--device", "cpu")
        assert code == 2
        assert reason in err


def test_samples_of_the_users_data(run: Run, data: Path) -> None:
    arguments = ("verify", "--model", "tiny:qwen3_vl", "--device", "cpu", "--data", data, "--json")
    code, out, err = run(*arguments, "--samples", 4)
    assert (code, err) == (0, "")
    said = json.loads(out)
    named = [name.split()[0] for name in said["samples"]]
    assert named[:4] == ["r0", "r6", "r7", "r1"], "one of each kind first, and no record that cannot be used"
    assert "costs as computed" in {check["check"] for check in said["checks"]}


def test_data_with_too_few_usable_records(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(chat(0)) + "\n" + json.dumps({"nonsense": 1}) + "\n")
    code, _, err = run("verify", "--model", "tiny:llama", "--device", "cpu", "--data", path)
    assert code == 1
    assert "1 usable among the first 2 records" in err


def test_reading_data_is_bounded(monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(samples, "MOST_LOOKED_AT", 3)
    report = verify("tiny:llama", data=data, device="cpu", attn_implementation="sdpa")
    assert [name.split()[0] for name in report.samples] == ["r0", "r1", "r2"]
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps(chat(n, words=100 if n == 1 else 3)) + "\n" for n in range(4)))
    monkeypatch.setattr(samples, "MOST_LOOKED_AT", 500)
    monkeypatch.setattr(samples, "MOST_TOKENS", 500)
    report = verify("tiny:llama", data=long, device="cpu", attn_implementation="sdpa")
    named = [name.split()[0] for name in report.samples]
    assert named == ["r0", "r2", "r3", "r1"], "what is too long comes last"
    assert "forward only" in report.samples[-1]
    assert report.tokens <= samples.MOST_TOKENS


def test_a_folder_with_weights(run: Run, tmp_path: Path) -> None:
    folder = tiny.write("llama", tmp_path / "model")
    code, _, err = run("verify", "--model", folder, "--device", "cpu")
    assert code == 2
    assert "no weights" in err
    build_model(folder, seed=3).save_pretrained(folder)
    code, out, _ = run("verify", "--model", folder, "--device", "cpu", "--json")
    assert code == 0
    other = json.loads(out)["checks"]
    code, out, _ = run("verify", "--model", "tiny:llama", "--device", "cpu", "--json")
    assert json.loads(out)["checks"] != other, "other weights, other rounding"


def test_a_verdict_needs_findings() -> None:
    about: dict[str, Any] = {
        "model": "",
        "attn_implementation": "",
        "device": "",
        "dtype": "",
        "samples": (),
        "tokens": 0,
    }
    assert not CheckReport(**about, checks=()).passed
    good = CheckResult(check="a", difference=1e-6, allowed=1e-5)
    bad = CheckResult(check="b", difference=float("inf"), allowed=0.0)
    nan = CheckResult(check="c", difference=float("nan"), allowed=1.0)
    assert CheckReport(**about, checks=(good,)).passed
    report = CheckReport(**about, checks=(good, bad, nan))
    assert [check.check for check in report.failures] == ["b", "c"]
    assert [check["difference"] for check in json.loads(json.dumps(report.as_json()))["checks"]] == [
        *(1e-6, "inf", "nan"),
    ]


def test_the_next_command_names_the_data() -> None:
    check = CheckResult(check="logits", difference=0.0, allowed=1.0)
    about: dict[str, Any] = {
        "model": "m",
        "attn_implementation": "sdpa",
        "device": "cpu",
        "dtype": "float32",
        "samples": ("a",),
    }
    out = io.StringIO()
    show_report(CheckReport(**about, tokens=9, checks=(check,)), Terminal(file=out, width=160), "my data.jsonl")
    assert "next: packtrain train --model m --data 'my data.jsonl'" in out.getvalue()


def test_names_from_data_steer_no_terminal() -> None:
    name = "one\x1b[2J\x1b]0;title\x07" + "x" * 1_000
    check = CheckResult(check="logits", difference=1.0, allowed=0.0, where=f"{name}, token 3")
    report = CheckReport(
        model=name,
        attn_implementation="sdpa",
        device="cpu",
        dtype="float32",
        samples=(name,),
        tokens=9,
        checks=(check,),
    )
    out = io.StringIO()
    show_report(report, Terminal(file=out, width=160))
    assert "one" in out.getvalue()
    assert all(char.isprintable() or char == "\n" for char in out.getvalue())
    assert len(out.getvalue()) < 4_000
