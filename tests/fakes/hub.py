"""A fake Hugging Face hub on loopback, with the part of its HTTP API that downloads a snapshot.

    with Hub({"owner/name": folder}) as hub:
        ...  # with HF_ENDPOINT=hub.url

It serves local folders, records every request, and can be set to truncate or corrupt files.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from feedmill.testing.loopback import Handler, Loopback

API = re.compile(
    r"/api/models/(?P<name>[^/]+(?:/[^/]+)?)(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?"
)
RESOLVE = re.compile(
    r"/(?P<name>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)"
)
#: Suffixes of files that the hub stores outside git and identifies by SHA-256.
LARGE = (".safetensors", ".bin", ".onnx", ".h5")


class Request(NamedTuple):
    method: str
    path: str
    #: The Authorization header.
    authorization: str | None


class Hub(Loopback):
    """A fake model hub. repositories: name -> folder of the revision `main`, or name -> {revision:
    folder}.
    """

    def __init__(self, repositories: Mapping[str, Path | Mapping[str, Path]]) -> None:
        super().__init__(_Answers)
        self.folders = {
            name: {"main": folders} if isinstance(folders, Path) else dict(folders)
            for name, folders in repositories.items()
        }
        self.requests: list[Request] = []
        #: File name -> number of bytes after which each of its next downloads is cut.
        self.cuts: dict[str, list[int]] = {}
        #: Files sent with one byte changed.
        self.damaged: set[str] = set()

    def commit(self, name: str, revision: str = "main") -> str:
        """Return the commit hash of a revision, which is derived from its files."""
        return _commit(self.folders[name][revision])

    def files_asked(self) -> set[str]:
        """Return the repository paths of the requested files."""
        found = [RESOLVE.fullmatch(unquote(request.path)) for request in self.requests]
        return {match["file"] for match in found if match}

    def folder(self, name: str, revision: str) -> Path | None:
        """Return the folder of a revision or commit."""
        folders = self.folders[name]
        return folders.get(revision) or {
            _commit(folder): folder for folder in folders.values()
        }.get(revision)


class _Answers(Handler):
    server: Hub

    def respond(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(
            Request(self.command, path, self.headers["Authorization"])
        )
        api, file = API.fullmatch(path), RESOLVE.fullmatch(path)
        match = api or file
        if match is None or match["name"] not in self.server.folders:
            return self._refuse(
                404 if self.headers["Authorization"] else 401, "RepoNotFound"
            )
        name, revision = match["name"], unquote(match["revision"] or "main")
        folder = self.server.folder(name, revision)
        if folder is None:
            return self._refuse(404, "RevisionNotFound")
        if file:
            return self._file(folder, unquote(file["file"]))
        if match["what"] == "tree":
            return self._json([_entry(path, folder) for path in _files(folder)])
        return self._json(
            {
                "id": name,
                "sha": _commit(folder),
                "private": False,
                "tags": [],
                "siblings": [],
            }
        )

    def _file(self, folder: Path, file: str) -> None:
        if not (folder / file).is_file():
            return self._refuse(404, "EntryNotFound")
        content = (folder / file).read_bytes()
        headers = {
            "X-Repo-Commit": _commit(folder),
            "ETag": f'"{_digest(folder / file)}"',
            "Accept-Ranges": "bytes",
        }
        if self.command == "GET" and file in self.server.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or ""):
            start = int(wanted[1])
            headers["Content-Range"] = (
                f"bytes {start}-{len(content) - 1}/{len(content)}"
            )
            return self._send(206, content[start:], headers, file)
        return self._send(200, content, headers, file)

    def _json(self, answer: object) -> None:
        self._send(
            200, json.dumps(answer).encode(), {"Content-Type": "application/json"}
        )

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], file: str = ""
    ) -> None:
        self.send(status, headers, len(body))
        if self.command == "HEAD":
            return
        cuts = self.server.cuts.get(file)
        self.wfile.write(body[: cuts.pop(0)] if cuts else body)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _commit(folder: Path) -> str:
    content = hashlib.sha1(usedforsecurity=False)
    for path in _files(folder):
        content.update(f"{path.relative_to(folder)} {_digest(path)}\n".encode())
    return content.hexdigest()


def _digest(path: Path) -> str:
    """Return the hub's identifier of a file: its SHA-256, or its git blob id."""
    content = path.read_bytes()
    if path.name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(
        b"blob %d\0" % len(content) + content, usedforsecurity=False
    ).hexdigest()


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    """Return a file's entry in the hub's listing."""
    size = path.stat().st_size
    entry = {
        "type": "file",
        "path": path.relative_to(folder).as_posix(),
        "size": size,
        "oid": _digest(path)[:40],
    }
    if path.name.endswith(LARGE):
        entry["lfs"] = {"oid": _digest(path), "size": size, "pointerSize": 134}
    return entry
