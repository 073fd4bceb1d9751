"""Where units are measured: in this process, in workers, on Ray; the same bytes, and words when a worker is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from measuring import chats, command, hashes, write_image, write_lines

from packtrain.app.measure import measure_outcome
from packtrain.core.errors import ConfigError, PacktrainError
from packtrain.measuring.engines import Engine, InProcess, LocalProcesses, RayCluster, in_processes
from packtrain.measuring.measurement import Policy, run_measurement
from packtrain.measuring.request import Request
from packtrain.measuring.work import Task, work_items
from packtrain.records.open import open_sources
from packtrain.records.schemas.converters import SchemaOptions

UNITS = 12
# Its first call on the record r3 ends the process; the marker file says that it has happened.
DEADLY = '''"""A formatting function whose process dies once."""

import os
from pathlib import Path


def to_messages(record):
    marker = Path(os.environ["DEADLY_MARKER"])
    if record["id"] == "r3" and not marker.exists():
        marker.write_text(str(os.getpid()))
        os._exit(9)
    return record["messages"]


def always(record):
    os._exit(9)


def harmless(record):
    return record["messages"]
'''


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A dataset of several units with images."""
    write_image(tmp_path / "parts" / "a.png", 120, 70)
    made = chats(UNITS * 25, images=("a.png",))
    for part in range(UNITS):
        write_lines(tmp_path / "parts" / f"{part:02}.jsonl", made[part * 25 : part * 25 + 25])
    return tmp_path / "parts"


def task_of(data: Path, model: Path, **schema: str) -> Task:
    return Task(Request(specs=tuple(open_sources(str(data))), model=str(model), schema=SchemaOptions(**schema)))


def measured(data: Path, model: Path, out: Path, engine: Engine, **schema: str) -> dict[str, str]:
    """The result's hashes after a run on this engine."""
    run_measurement(task_of(data, model, **schema), out, engine, Policy(check=0), lambda: "", lambda _: None)
    return hashes(out)


def test_engines_give_the_same_bytes(tmp_path: Path, parts: Path, qwen: Path) -> None:
    expected = measured(parts, qwen, tmp_path / "in process", InProcess())
    for workers in (1, 3):  # two of them: see test_run
        assert measured(parts, qwen, tmp_path / str(workers), LocalProcesses(workers)) == expected


def test_few_units_are_in_flight(parts: Path, qwen: Path) -> None:
    """However large a dataset is, only a few units beyond those at work have been handed out."""
    task = task_of(parts, qwen)
    items, total = work_items(task.request)
    assert total == UNITS
    handed = finished = 0

    def counted() -> Iterator[object]:
        nonlocal handed
        for item in items:
            handed += 1
            yield item
            assert handed - finished <= 6, "more than two units for each worker and what has just come back"

    for _ in LocalProcesses(2).run(task, counted()):  # type: ignore[arg-type]
        finished += 1
    assert handed == finished == UNITS


def test_an_error_of_the_user_keeps_its_kind(tmp_path: Path, parts: Path, qwen: Path) -> None:
    """A worker that cannot begin (here: a model that has gone) says so as it would in this process."""
    for engine in (InProcess(), LocalProcesses(2)):
        task = task_of(parts, tmp_path / "gone")
        with pytest.raises(ConfigError, match="gone"):
            list(engine.run(task, work_items(task.request)[0]))


@pytest.mark.parametrize(
    ("how", "fix"), [(signal.SIGSEGV, "check or remove that file"), (signal.SIGKILL, "probably out of memory")]
)
def test_a_dead_worker_names_what_it_had_in_hand(how: signal.Signals, fix: str) -> None:
    items = [signal.SIGURG, signal.SIGURG, how, signal.SIGURG, signal.SIGURG]  # that one does nothing
    with pytest.raises(PacktrainError, match=rf"(?s)ended with {how.name} while it read file-{int(how)}\n.*{fix}"):
        list(in_processes(2, signal.raise_signal, items, stage="measure", name=lambda item: f"file-{int(item)}"))


@pytest.mark.full
def test_a_dead_worker_is_said_in_words(tmp_path: Path, parts: Path, qwen: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "deadly.py").write_text(DEADLY)
    marker = tmp_path / "marker"
    monkeypatch.setenv("DEADLY_MARKER", str(marker))
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"model": str(qwen), "out": tmp_path / "out", "check": 0}
    formatting = "deadly:to_messages"
    said = r"(?s)ended with exit code 9 while it read \S+/00\.jsonl\n.*check or remove that file.*the same command"
    with pytest.raises(PacktrainError, match=said):
        measure_outcome(parts, workers=2, formatting_func=formatting, **options)  # type: ignore[arg-type]
    assert int(marker.read_text()) != os.getpid()
    outcome = measure_outcome(parts, workers=2, formatting_func=formatting, **options)  # type: ignore[arg-type]
    assert not outcome.reused
    assert hashes(tmp_path / "out") == measured(
        parts, qwen, tmp_path / "calm", InProcess(), formatting_func="deadly:to_messages"
    )


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Ray of two CPUs on this machine whose workers can import the deadly function."""
    ray = pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("ray")
    (folder / "deadly.py").write_text(DEADLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, "deadly", raising=False)  # of another test, whose folder may be gone
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=100 << 20,
            runtime_env={"env_vars": {"PYTHONPATH": str(folder), "DEADLY_MARKER": str(folder / "marker")}},
        )
        patch.setenv("DEADLY_MARKER", str(folder / "marker"))
        yield folder
        ray.shutdown()


@pytest.mark.ray
@pytest.mark.full
def test_ray_gives_the_same_bytes(tmp_path: Path, parts: Path, qwen: Path, ray_cluster: Path) -> None:
    expected = measured(parts, qwen, tmp_path / "here", InProcess())
    assert measured(parts, qwen, tmp_path / "ray", RayCluster()) == expected


@pytest.mark.ray
@pytest.mark.full
def test_ray_runs_a_lost_task_again(tmp_path: Path, parts: Path, qwen: Path, ray_cluster: Path) -> None:
    marker = ray_cluster / "marker"
    found = measured(parts, qwen, tmp_path / "ray", RayCluster(), formatting_func="deadly:to_messages")
    assert int(marker.read_text()) != os.getpid(), "no worker process has died"
    assert found == measured(parts, qwen, tmp_path / "here", InProcess(), formatting_func="deadly:to_messages")


@pytest.mark.ray
@pytest.mark.full
def test_ray_gives_up_in_words(tmp_path: Path, parts: Path, qwen: Path, ray_cluster: Path) -> None:
    with pytest.raises(PacktrainError, match=r"(?s)Ray lost a task.*run the same command again"):
        measured(parts, qwen, tmp_path / "out", RayCluster(max_retries=1), formatting_func="deadly:always")
    task = task_of(parts, tmp_path / "gone")
    with pytest.raises(ConfigError, match="gone"):
        list(RayCluster().run(task, work_items(task.request)[0]))


@pytest.mark.ray
@pytest.mark.full
def test_ray_notices_an_edited_template(tmp_path: Path, parts: Path, qwen: Path, ray_cluster: Path) -> None:
    """Ray's workers live on between runs of one driver, and must not go on with what they had read."""
    import shutil

    model = shutil.copytree(qwen, tmp_path / "model")
    before = measured(parts, model, tmp_path / "out", RayCluster())
    template = model / "chat_template.jinja"
    template.write_text("{{ '<|im_start|>' }}" + template.read_text())
    after = measured(parts, model, tmp_path / "out", RayCluster())
    assert after["costs.parquet"] != before["costs.parquet"]
    assert after == measured(parts, model, tmp_path / "here", InProcess())


@pytest.mark.ray
@pytest.mark.full
def test_ray_from_the_command_line(tmp_path: Path, parts: Path, qwen: Path) -> None:
    """It starts a cluster of its own where no address is given."""
    pytest.importorskip("ray")
    expected = measured(parts, qwen, tmp_path / "here", InProcess())
    arguments = ("measure", parts, "-m", qwen, "--check", 0, "--engine", "ray", "--json")
    code, _, err = command(*arguments, "-o", tmp_path / "ray", log=tmp_path / "log")
    assert code == 0, err
    assert hashes(tmp_path / "ray") == expected


LISTENING = """
import psutil
from packtrain.measuring import engines
cluster = engines.RayCluster()
def items():
    own = {one.pid for one in psutil.Process().children(recursive=True)} | {psutil.Process().pid}
    for one in psutil.net_connections("tcp"):
        if one.status == "LISTEN" and one.pid in own:
            print(one.laddr.ip.rpartition(":")[2])
    return
    yield
list(cluster.run(None, items()))
"""


@pytest.mark.ray
@pytest.mark.full
def test_a_cluster_of_our_own_cannot_be_reached_from_outside(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", LISTENING], capture_output=True, text=True, env=environment, check=True, cwd=tmp_path
    )
    found = done.stdout.split()
    assert len(found) > 2, "nothing listens, so nothing was tested"
    assert set(found) == {"127.0.0.1"}


def test_ray_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, parts: Path, qwen: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"packtrain\[ray\]"):
        list(RayCluster().run(task_of(parts, qwen), []))
