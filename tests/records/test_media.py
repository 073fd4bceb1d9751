"""Where media are found, and what a path may never do."""

from __future__ import annotations

import errno
import io
import os
import pickle
import socket
import tarfile
from pathlib import Path
from urllib.parse import quote

import pytest
from PIL import Image

from packtrain.core.errors import RecordError
from packtrain.core.values import MediaRef
from packtrain.records.media import MediaStore


def png(size: tuple[int, int] = (4, 3)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a b.png").write_bytes(png())
    (tmp_path / "outside.png").write_bytes(png((9, 9)))
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "a.png").write_bytes(png((9, 9)))
    return folder


def size(store: MediaStore, path: str) -> tuple[int, int]:
    header = store.header("image", MediaRef(name=path, path=path))
    with store.open(MediaRef(name=path, path=path)) as file:
        assert Image.open(file).size == (header.width, header.height)
    return header.width, header.height


def reason(store: MediaStore, path: str) -> str:
    """Why a path is refused, by header and by open alike."""
    with pytest.raises(RecordError) as by_header:
        store.header("image", MediaRef(name=path, path=path))
    with pytest.raises(RecordError) as by_open:
        store.open(MediaRef(name=path, path=path)).close()
    assert by_header.value.stage == by_open.value.stage == "media"
    assert by_header.value.reason == by_open.value.reason
    return by_header.value.reason


def test_paths_inside_the_root(root: Path) -> None:
    store = MediaStore(root)
    whole = str(root / "sub" / "a b.png")
    for path in (
        "sub/a b.png",
        "./sub/../sub/a b.png",
        whole,
        f"file://{quote(whole)}",
        f"file://localhost{quote(whole)}",
    ):
        assert size(store, path) == (4, 3), path


def test_the_root_may_be_reached_through_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert size(MediaStore(tmp_path / "link"), str(tmp_path / "link" / "sub" / "a b.png")) == (4, 3)


def test_paths_that_lead_outside(root: Path, tmp_path: Path) -> None:
    (root / "file_out.png").symlink_to(tmp_path / "outside.png")
    (root / "folder_out").symlink_to(tmp_path)
    (root / "chain.png").symlink_to("file_out.png")
    outside = [
        "../outside.png",
        "sub/../../outside.png",
        str(tmp_path / "outside.png"),
        f"file://{tmp_path}/outside.png",
        f"file://{tmp_path}/%6futside.png",
        "../root2/a.png",  # a name that begins like the root's
        "file_out.png",
        "folder_out/outside.png",
        "chain.png",
        "../does_not_exist/x.png",
    ]
    store, open_store = MediaStore(root), MediaStore(root, allow_outside_root=True)
    for _ in range(2):  # the second time from the cache of folders
        for path in outside:
            assert reason(store, path) == "path outside the media root", path
    for path in outside[:-1]:
        assert size(open_store, path) == (9, 9), path


def test_links_inside_the_root_are_followed(root: Path) -> None:
    (root / "inner.png").symlink_to("sub/a b.png")
    (root / "inner").symlink_to("sub")
    store = MediaStore(root)
    assert size(store, "inner.png") == (4, 3)
    assert size(store, "inner/a b.png") == (4, 3)


def test_files_that_are_none(root: Path) -> None:
    os.mkfifo(root / "fifo")
    (root / "to_fifo").symlink_to("fifo")
    (root / "empty.png").touch()
    (root / "loop").symlink_to("loop")
    (root / "dangling").symlink_to("nothing.png")
    server = socket.socket(socket.AF_UNIX)
    folder = os.open(root, os.O_RDONLY)
    server.bind(f"/proc/self/fd/{folder}/socket")  # the path of a socket must be short
    expected = {
        "missing.png": "file not found",
        "no_folder/x.png": "file not found",
        "sub/a b.png/x.png": "file not found",
        "dangling": "file not found",
        "empty.png": "empty file",
        "fifo": "not a regular file",
        "to_fifo": "not a regular file",
        "socket": "not a regular file",
        "sub": "not a regular file",
        "sub/": "not a regular file",
        ".": "not a regular file",
        "loop": "not a usable path",
        "a\0b.png": "not a usable path",
        "a\0b/x.png": "not a usable path",
        "\ud800.png": "not a usable path",
        "x" * 5000: "not a usable path",
        ("y" * 300) + "/x.png": "not a usable path",
        "file://[broken": "not a usable path",
        "file://server/share/x.png": "remote media are not fetched",
    }
    store = MediaStore(root)
    try:
        for path, words in expected.items():
            assert reason(store, path) == words, path[:40]
        device = MediaStore("/dev")
        assert reason(device, "zero") == "not a regular file"
    finally:
        server.close()
        os.close(folder)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_files_that_cannot_be_read(root: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    store = MediaStore(root)
    assert size(store, "sub/a b.png") == (4, 3)
    monkeypatch.setattr(os, "open", refuse)
    assert reason(store, "sub/a b.png") == "unreadable file"


def test_a_machine_without_descriptors_is_not_the_records_fault(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="too many open files"):
        MediaStore(root).header("image", MediaRef(name="a", path="sub/a b.png"))


def test_bytes_and_nothing(root: Path) -> None:
    store = MediaStore(root)
    assert store.header("image", MediaRef(name="x", data=png((7, 5)))).width == 7
    with store.open(MediaRef(name="x", data=b"abc")) as file:
        assert file.read() == b"abc"
    with pytest.raises(RecordError, match="empty file"):
        store.header("image", MediaRef(name="x", data=b""))
    with pytest.raises(RecordError, match="not a usable path"):
        store.open(MediaRef(name="x"))


def test_members_of_an_archive_are_read_in_their_bounds(root: Path, tmp_path: Path) -> None:
    archive = tmp_path / "shard.tar"
    contents = {"a.png": png((5, 6)), "b.png": png((50, 60)), "c.txt": b"the end"}
    with tarfile.open(archive, "w") as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    store = MediaStore(root)
    with tarfile.open(archive) as tar:
        refs = {m.name: MediaRef(name=m.name, archive=str(archive), offset=m.offset_data, size=m.size) for m in tar}
    for name, data in contents.items():
        with store.open(refs[name]) as file:
            assert file.read() == data
            assert file.read() == b""
            file.seek(-3, os.SEEK_END)
            assert file.read(100) == data[-3:]
            file.seek(2)
            assert (file.read(3), file.tell()) == (data[2:5], 5)
    header = store.header("image", refs["b.png"])
    assert (header.width, header.height) == (50, 60)

    cut = MediaRef(name="b.png", archive=str(archive), offset=archive.stat().st_size - 10, size=20)
    with pytest.raises(RecordError, match="archive ends before the file"):
        store.header("image", cut)
    with pytest.raises(RecordError, match="empty file"):
        store.header("image", MediaRef(name="x", archive=str(archive), offset=512, size=0))
    with pytest.raises(RecordError, match="file not found"):
        store.header("image", MediaRef(name="x", archive=str(tmp_path / "no.tar"), offset=0, size=5))


def test_errors_name_the_medium_and_leak_no_descriptor(root: Path) -> None:
    (root / "bad.png").write_bytes(b"this is no image at all")
    store = MediaStore(root)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        for kind in ("image", "video", "audio"):
            with pytest.raises(RecordError, match=r"bad\.png"):
                store.header(kind, MediaRef(name="bad.png", path="bad.png"))
        assert reason(store, "sub") == "not a regular file"
        size(store, "sub/a b.png")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_store_travels_to_workers(root: Path) -> None:
    store = MediaStore(root, max_image_pixels=10)
    again = pickle.loads(pickle.dumps(store))
    with pytest.raises(RecordError, match="image too large"):
        again.header("image", MediaRef(name="x", path="sub/a b.png"))
