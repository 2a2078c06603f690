"""The server of the page that shows a run. It serves the page, the newest view as JSON, and the loss curve as SVG."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any

from swarm_protocol.net.hosts import called_host, host_port, is_loopback_host, split_address
from swarm_training.contract.views import RunView
from swarm_training.losses.curve import HELD_OUT, TRAINING, LossCurve
from swarm_training.losses.drawing import draw

_DEFAULT_PORT = 8090
_PAGE = Path(__file__).with_name("page.html")
_IDLE_S = 30.0  # a connection that sends no request for so long is closed
_NOTHING_YET = b"null"
_SVG = "image/svg+xml"
Body = tuple[str, bytes]  # its media type and its bytes


class WatchServer:
    """The server of one run's page, in threads of its own.

    Attributes:
        url: the URL of the page.
        is_local: whether only this machine reaches the page. Requests must then name its loopback as their host, which
            keeps out pages that a browser has loaded from other sites.
    """

    def __init__(self, address: str) -> None:
        """Listen at an address, ``HOST`` or ``HOST:PORT``; port 0 stands for any free port. Raise ValueError if
        ``address`` is no address, or nobody can listen there."""
        host, port = _split(address)
        self.is_local = is_loopback_host(host)
        self._bodies: Mapping[str, Body] = {
            "/": ("text/html; charset=utf-8", _PAGE.read_bytes()),
            "/view.json": ("application/json", _NOTHING_YET),
        }
        self._curve = LossCurve()
        try:
            self._server = _Server((host, port), self)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"--web cannot listen at {address}: {reason}") from None
        self.url = f"http://{host_port(host, self._server.server_address[1])}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="watch page", daemon=True)
        self._thread.start()

    def body(self, path: str) -> Body | None:
        """Return the body at a path; None if there is none."""
        return self._bodies.get(path)

    def show(self, view: RunView, facts: Mapping[str, Any]) -> None:
        """Show this view until the next call. ``facts``: the same view as values for JSON."""
        self._curve.discard_after(view.step)
        self._curve.add(view.step, {TRAINING: view.loss})
        if view.held_out is not None:
            self._curve.add(view.held_out.step, {HELD_OUT: view.held_out.loss})
        bodies = {**self._bodies, "/view.json": ("application/json", json.dumps(facts).encode())}
        if self._curve.series:
            bodies["/loss.svg"] = (_SVG, draw(self._curve, view.run).encode())
        self._bodies = bodies  # one assignment, because the threads of requests read it at any time

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _split(address: str) -> tuple[str, int]:
    if address.endswith(":0"):  # which `split_address` refuses
        return split_address(address[:-2], 0)
    return split_address(address, _DEFAULT_PORT)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], shown: WatchServer) -> None:
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        self.shown = shown
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "swarm", ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        assert isinstance(self.server, _Server)
        found, shown = None, self.server.shown
        status, reason = 403, b"The host of the request is no name of this machine's loopback.\n"
        if not shown.is_local or is_loopback_host(called_host(self.headers.get_all("Host", []))):
            found = shown.body(self.path.partition("?")[0])
            status, reason = 200 if found else 404, b"There is nothing here: the page is at /.\n"
        kind, body = found or ("text/plain; charset=utf-8", reason)
        self.send_response(status)
        policy = _SVG_POLICY if kind == _SVG else _POLICY
        own = {"Content-Type": kind, "Content-Length": str(len(body)), "Content-Security-Policy": policy}
        for name, value in {**own, **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the terminal may show something else."""


def _hashes(tag: str) -> str:
    """Return the hashes of the page's inline elements with this tag, as a content security policy names them."""
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


_POLICY = (
    f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SVG_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # the picture has a style of its own
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
