"""A small HTTP server with the file API of the Hugging Face Hub, for the real client: files, revisions, commits."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class HubServer(ThreadingHTTPServer):
    """The server; its attributes may be changed while it runs.

    Attributes:
        repositories: "org/name" → branch → file name → content.
        gated: repositories that need the token "hf_good".
        cut: file name → bytes after which the first download of it ends.
        short: names of files whose downloads end early and say so.
        requests: method and path of each request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.cut: dict[str, int] = {}
        self.short: set[str] = set()
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, name: str, branch: str) -> str:
        """The hash of a branch's files."""
        files = self.repositories[name][branch]
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of files, and the POST requests of an upload."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_) -> None:
        """Keeps stderr empty."""

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def answer(self, status: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body) if length is None else length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        branches = self.server.repositories.get(found[1]) if found else None
        if found is None or branches is None:
            return self.refuse(404, "RepoNotFound")
        if found[1] in self.server.gated and self.headers.get("Authorization") != "Bearer hf_good":
            return self.refuse(401 if "Authorization" not in self.headers else 403, "GatedRepo")
        commits = {self.server.commit(found[1], branch): branch for branch in branches}
        branch = commits.get(found[2], found[2])
        if branch not in branches:
            return self.refuse(404, "RevisionNotFound")
        commit, body = self.server.commit(found[1], branch), branches[branch].get(found[3])
        if body is None:
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(body).hexdigest()}"', "Accept-Ranges": "bytes"}
        if self.command == "GET" and found[3] in self.server.short:
            return self.answer(200, body[: len(body) // 2], headers)
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start:
            first = int(start[1])
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
            return self.answer(206, body[first:], headers)
        if self.command == "GET" and found[3] in self.server.cut:
            self.answer(200, body[: self.server.cut.pop(found[3])], headers, len(body))
            self.close_connection = True
            return None
        return self.answer(200, body, headers)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != "Bearer hf_good":
            return self.refuse(403 if self.headers.get("Authorization") == "Bearer hf_read" else 401, "")
        if path == "/api/repos/create":
            held = json.loads(body)
            if held.get("organization") not in (None, "me"):
                return self.refuse(404, "")
            name = f"me/{held['name']}"
            self.server.repositories.setdefault(name, {"main": {}})
            return self.json({"url": f"{self.server.url}/{name}", "id": name})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/(.+)", path)
        if found[2] == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            return self.json({"files": [dict(path=n, uploadMode="regular", shouldIgnore=False) for n in names]})
        files = self.server.repositories[found[1]][found[3]]
        for line in map(json.loads, body.decode().splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        commit = self.server.commit(found[1], found[3])
        return self.json({"commitUrl": f"{self.server.url}/{found[1]}/commit/{commit}", "commitOid": commit})

    def json(self, held: dict) -> None:
        self.answer(200, json.dumps(held).encode(), {"Content-Type": "application/json"})


@contextmanager
def serving() -> Iterator[HubServer]:
    """A running server."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
