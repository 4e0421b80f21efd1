"""The page's own files: those of the package, found at the start. Requests choose among them and name no paths."""

import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from cohort.view.server.answers import compressed

STATIC = Path(__file__).parent.parent / "static"
_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A file's contents. The stamp changes when the file does, as while the page is being worked on."""

    stamp: tuple[int, int]
    content: bytes
    etag: str


class StaticFiles:
    """Serves the packaged files."""

    def __init__(self, folder: Path = STATIC):
        """Find the files of `folder`."""
        self._files = {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }
        self._loaded: dict[str, _Loaded] = {}

    def answer(self, request: Request, name: str) -> Response:
        """Answer with the file `name`, or with 304 if the browser has it."""
        path = self._files.get(name)
        if path is None:
            return Response("This file does not exist.\n", 404, media_type="text/plain")
        loaded = self._load(name, path)
        headers = {"etag": loaded.etag, "cache-control": "no-cache"}
        if loaded.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        media_type = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        return compressed(request, loaded.content, media_type=media_type, headers=headers)

    def _load(self, name: str, path: Path) -> _Loaded:
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        found = self._loaded.get(name)
        if found is None or found.stamp != stamp:
            content = path.read_bytes()
            found = _Loaded(stamp, content, f'"{hashlib.sha256(content).hexdigest()[:24]}"')
            self._loaded[name] = found
        return found
