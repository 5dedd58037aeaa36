"""A hub on the loopback, of the folders models/OWNER/NAME and datasets/OWNER/NAME below one."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "0" * 40


@contextmanager
def hub_of(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the paths that were asked for."""
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            asked.append(self.path)

        def do_GET(self) -> None:
            found, headers = answer(root, unquote(urlparse(self.path).path).strip("/").split("/"))
            self.send_response(200 if found is not None else 404)
            for name, value in {**headers, "Content-Length": str(len(found or b""))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(found or b"")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def answer(root: Path, path: list[str]) -> tuple[bytes | None, dict[str, str]]:
    """Of the calls for what a repository has, and for a file of it."""
    if path[0] == "api":
        folder, rest = root.joinpath(*path[1:4]), path[4:]
        if not folder.is_dir():
            return None, {"X-Error-Code": "RepoNotFound"}
        files = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
        listed = [{"type": "file", "path": file, "size": (folder / file).stat().st_size, "oid": ""} for file in files]
        about = {"id": "/".join(path[2:4]), "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
        return json.dumps(listed if rest[:1] == ["tree"] else about).encode(), {"Content-Type": "application/json"}
    kind, (owner, name, *rest) = ("datasets", path[1:]) if path[0] == "datasets" else ("models", path)
    file = root.joinpath(kind, owner, name, *rest[2:])
    if rest[:1] != ["resolve"] or not file.is_file():
        return None, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
    data = file.read_bytes()
    return data, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
