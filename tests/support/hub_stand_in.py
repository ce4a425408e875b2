"""A hub of one model over real HTTP on loopback: what `huggingface_hub` asks for, and nothing else.

Counts requests and bytes, and breaks a file off half-way when told to.
"""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


class HubStandIn:
    """Serves the files of `folder` as `repo_id`.

    requests     "METHOD path" of each, in order
    bytes_sent   of files
    break_after  a GET of a weight file ends after so many bytes, once
    """

    def __init__(self, repo_id: str, folder: Path, *, break_after: int | None = None) -> None:
        self.repo_id = repo_id
        self.files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        self.break_after = break_after
        self.requests: list[str] = []
        self.bytes_sent = 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub._answer(self, with_body=False)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append(f"{request.command} {path}")
        api = f"/api/models/{self.repo_id}"
        resolve = re.fullmatch(rf"/{self.repo_id}/resolve/(main|{COMMIT})/(.+)", path)
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in self.files]
            self._json(request, {"id": self.repo_id, "sha": COMMIT, "siblings": siblings}, with_body)
        elif path.startswith(f"{api}/tree/"):
            self._json(request, [self._tree_entry(name) for name in self.files], with_body)
        elif path.startswith(f"{api}/revision/"):
            self._refuse(request, "RevisionNotFound")
        elif resolve is not None and resolve[2] in self.files:
            self._file(request, resolve[2], with_body)
        elif resolve is not None:
            self._refuse(request, "EntryNotFound")
        else:
            self._refuse(request, "RepoNotFound")

    def _tree_entry(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": _oid(self.files[name])}

    def _json(self, request: BaseHTTPRequestHandler, value: object, with_body: bool) -> None:
        body = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if with_body:
            request.wfile.write(body)

    def _refuse(self, request: BaseHTTPRequestHandler, code: str) -> None:
        request.send_response(404)
        request.send_header("X-Error-Code", code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def _file(self, request: BaseHTTPRequestHandler, name: str, with_body: bool) -> None:
        content = self.files[name]
        wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        if wanted:
            self.requests[-1] += f" from {start}"
        request.send_response(206 if wanted else 200)
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("ETag", f'"{_oid(content)}"')
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(len(content) - start))
        if wanted:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.end_headers()
        if not with_body:
            return
        body = content[start:]
        if self.break_after is not None and name.endswith(".safetensors"):
            body, self.break_after = body[: self.break_after], None
            request.close_connection = True
        self.bytes_sent += len(body)
        request.wfile.write(body)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
