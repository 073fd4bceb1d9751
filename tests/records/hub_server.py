"""A stand-in of the Hugging Face hub on loopback: datasets are folders, and each has one commit."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_NAME = r"([^/]+/[^/]+)"


class Hub(ThreadingHTTPServer):
    """Serves the datasets below a folder and keeps what it was asked for."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.asked: list[str] = []

    def environment(self, home: Path) -> dict[str, str]:
        """What makes a process take this hub for the real one."""
        url = f"http://127.0.0.1:{self.server_port}"
        return {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}

    def about(self, repo: str, path: str) -> dict[str, Any]:
        """What the hub says of one path."""
        there = self.root / repo / path
        if there.is_dir():
            return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "path": path, "size": 0}
        oid = hashlib.sha1(there.read_bytes()).hexdigest()
        return {"type": "file", "oid": oid, "path": path, "size": there.stat().st_size}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.server.asked.append(f"POST {self.path} {body}")
        found = re.fullmatch(rf"/api/datasets/{_NAME}/paths-info/[^/]+", urlparse(self.path).path)
        if found is None:
            return self._missing()
        paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        there = [path for path in paths if (self.server.root / found[1] / path).exists()]
        self._say([self.server.about(found[1], path) for path in there])

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        address, root = urlparse(self.path), self.server.root
        path = unquote(address.path)
        if found := re.fullmatch(rf"/datasets/{_NAME}/resolve/[^/]+/(.*)", path):
            file = root / found[1] / found[2]
            return self._content(file.read_bytes()) if file.is_file() else self._missing("EntryNotFound")
        if found := re.fullmatch(rf"/api/datasets/{_NAME}/tree/[^/]+(?:/(.*))?", path):
            folder = root / found[1] / (found[2] or "")
            if not folder.is_dir():
                return self._missing("EntryNotFound")
            deep = parse_qs(address.query).get("recursive", [""])[0].lower() == "true"
            inside = sorted(folder.rglob("*") if deep else folder.iterdir())
            names = [str(file.relative_to(root / found[1])) for file in inside]
            return self._say([self.server.about(found[1], name) for name in names])
        found = re.fullmatch(rf"/api/datasets/{_NAME}(/revision/[^/]+)?", path)
        if found is None or not (root / found[1]).is_dir():
            return self._missing()
        files = [{"rfilename": str(f.relative_to(root / found[1]))} for f in sorted((root / found[1]).rglob("*"))]
        self._say({"id": found[1], "sha": COMMIT, "private": False, "tags": [], "siblings": files})

    def _content(self, data: bytes) -> None:
        first, last = 0, len(data) - 1
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(part[1]), min(int(part[2] or last), last)
        self.send_response(206 if part else 200)
        if part:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self._body(data[first : last + 1])

    def _say(self, value: object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self._body(json.dumps(value).encode())

    def _missing(self, code: str = "RepoNotFound") -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self._body(b"{}")

    def _body(self, data: bytes) -> None:
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def hub(root: Path) -> Iterator[Hub]:
    """A hub for the length of a block."""
    server = Hub(root)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
