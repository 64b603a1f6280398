"""A Hub on this machine, with the few answers that a download needs, and caches made by hand."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put(
    cache: Path, model: str, files: Mapping[str, bytes], commit: str = COMMIT, ref: str = "main"
) -> Path:
    """Puts files into a cache as the library does, as links to blobs; returns their folder."""
    home = cache / f"models--{model.replace('/', '--')}"
    folder = home / "snapshots" / commit
    for parent in (folder, home / "blobs", home / "refs"):
        parent.mkdir(parents=True, exist_ok=True)
    (home / "refs" / ref).write_text(commit)
    for name, data in files.items():
        blob = home / "blobs" / f"{commit[:6]}-{name}"
        blob.write_bytes(data)
        (folder / name).symlink_to(os.path.relpath(blob, folder))
    return folder


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves models that have one commit, `COMMIT`, on the branch main.

    Args:
        models: files by path, by model.
        refused: status and error code by model that nobody may read.

    Attributes:
        address: for HF_ENDPOINT.
        fetched: paths of files whose content was asked for.
    """

    def __init__(
        self, models: Mapping[str, Mapping[str, bytes]], refused: Mapping[str, tuple[int, str]]
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.models = models
        self.refused = refused
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.fetched: set[str] = set()

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _Answer(http.server.BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        # api/models/ORG/NAME/{revision,tree}/REVISION or ORG/NAME/resolve/REVISION/PATH
        path = self.path.partition("?")[0].strip("/").removeprefix("api/models/")
        parts = [*path.split("/", 4), "", "", ""]
        model, kind, revision, name = "/".join(parts[:2]), *parts[2:5]
        hub = self.server
        if model in hub.refused:
            self.answer(*hub.refused[model])
        elif model not in hub.models:
            self.answer(404, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self.answer(404, "RevisionNotFound")
        elif kind == "resolve":
            self.file(hub.models[model].get(name), name)
        else:
            files = hub.models[model].items()
            tree = [{"type": "file", "path": n, "size": len(d), "oid": _tag(d)} for n, d in files]
            info = {"id": model, "sha": COMMIT, "siblings": [{"rfilename": n} for n, _ in files]}
            self.answer(200, data=json.dumps(tree if kind == "tree" else info).encode())

    def file(self, data: bytes | None, name: str) -> None:
        if data is None:
            self.answer(404, "EntryNotFound")
            return
        if self.command == "GET":
            self.server.fetched.add(name)
        self.answer(200, data=data, ETag=f'"{_tag(data)}"', X_Repo_Commit=COMMIT)

    def answer(self, status: int, code: str = "", data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in {"X_Error_Code": code, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
