"""The page of a run: what a client of HTTP gets, before and after the first view, and what the page may load."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection, HTTPResponse
from math import inf
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest

from swarm_training.commands.watching import as_json
from swarm_training.web.server import WatchServer
from tests.unit.training.reports.test_reporters import VIEW


@pytest.fixture
def server() -> Iterator[WatchServer]:
    with closing(WatchServer("127.0.0.1:0")) as server:
        yield server


def ask(server: WatchServer, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    where = urlsplit(server.url)
    with closing(HTTPConnection(where.hostname, where.port, timeout=30)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read()


def test_the_page_shows_the_newest_view(server: WatchServer) -> None:
    response, _page = ask(server, "/")
    assert response.status == 200 and response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert ask(server, "/view.json")[1] == b"null" and ask(server, "/loss.svg")[0].status == 404
    for view in (VIEW, replace(VIEW, step=42, loss=inf), replace(VIEW, step=43, loss=2.25)):
        server.show(view, as_json(view))
    response, body = ask(server, "/view.json")
    assert response.headers["Content-Type"] == "application/json"
    assert json.loads(body) == json.loads(json.dumps(as_json(view))) and json.loads(body)["samples_per_s"] == 12.5
    response, picture = ask(server, "/loss.svg?of=2.43")
    assert response.headers["Content-Type"] == "image/svg+xml"
    assert ElementTree.fromstring(picture)[1].text == "training 2.25 at step 43, held out 2.75 at step 40"
    server.show(replace(VIEW, step=41, rollbacks=3, loss=2.75), {})
    assert (
        ElementTree.fromstring(ask(server, "/loss.svg")[1])[1].text
        == "training 2.75 at step 41, held out 2.75 at step 40"
    )


def test_what_is_not_there_is_not_found_and_head_has_no_body(server: WatchServer) -> None:
    for path in ("/server.py", "/../server.py", "//etc/passwd", "/view.json/"):
        assert ask(server, path)[0].status == 404
    response, body = ask(server, "/", "HEAD")
    assert response.status == 200 and int(response.headers["Content-Length"]) > 1000 and body == b""
    assert ask(server, "/", "POST")[0].status == 501


def test_a_page_of_another_site_reads_nothing(server: WatchServer) -> None:
    server.show(VIEW, as_json(VIEW))
    for host in ("rebound.example", "rebound.example:8090", "192.0.2.1", ""):
        response, body = ask(server, "/view.json", Host=host)
        assert response.status == 403 and b"loopback" in body, host
    for host in ("localhost:8090", "127.0.0.1", "[::1]:8090"):
        assert ask(server, "/view.json", Host=host)[0].status == 200, host


def test_the_page_runs_its_own_script_alone_and_loads_nothing_from_elsewhere(server: WatchServer) -> None:
    response, page = ask(server, "/")
    policy = dict(part.strip().split(" ", 1) for part in response.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["img-src"] == "'self' data:"
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(rb"https?://|innerHTML|\bsrc=\"|@import|url\(", page)


def test_an_address_that_cannot_be_listened_at_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"--web cannot listen at 127\.0\.0\.1:{port}: Address already in use"):
            WatchServer(f"127.0.0.1:{port}")
    with pytest.raises(ValueError, match=r"address '127.0.0.1:x' is not understood: expected HOST or HOST:PORT"):
        WatchServer("127.0.0.1:x")
