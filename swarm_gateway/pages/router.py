"""Serves the pages and their files over HTTP, with headers that restrict what the pages may do in browsers."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_DIRECTORY = Path(__file__).parent / "static"
_TYPES = {  # fixed here, because the system's own table may differ
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "font-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # cached, but revalidated each time: another version of the server has other files
    "Content-Security-Policy": "; ".join(f"{directive} {sources}" for directive, sources in _POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_pages(app: FastAPI) -> None:
    """Add the pages, which need no key. The API may require one, and the pages read all their data from the API."""
    files = _Files(directory=_DIRECTORY)

    @app.api_route("/", methods=["GET", "HEAD"])
    async def chat(request: Request) -> Response:
        return await files.get_response("chat.html", request.scope)

    @app.api_route("/monitor", methods=["GET", "HEAD"])
    async def monitor(request: Request) -> Response:
        return await files.get_response("monitor.html", request.scope)

    app.mount("/static", files)


class _Files(StaticFiles):
    """The static files, with the headers of the pages."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_HEADERS)
        # A response of status 304 has no body, and so no type.
        if response.status_code == status_code and (kind := _TYPES.get(Path(full_path).suffix)):
            response.headers["Content-Type"] = kind
        return response
