"""Pages over HTTP: types, caching, what browsers may do with them; and what the files themselves may not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import swarm_gateway.pages
from swarm_gateway.pages.router import add_pages

STATIC = Path(swarm_gateway.pages.__file__).parent / "static"
PAGES = sorted(STATIC.glob("*.html"))
SCRIPTS = sorted(path for path in STATIC.rglob("*.js") if path.parent.name != "vendor")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = FastAPI()
    add_pages(app)
    with TestClient(app) as client:
        yield client


class Elements(HTMLParser):
    """Attributes: ``found``: names and attributes of all elements; ``inline``: text within scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style"):
            self.inline += data.strip()


def references(path: Path) -> set[str]:
    """Paths on the server that the page or script loads."""
    text = path.read_text()
    if path.suffix == ".html":
        named = [attrs.get("src") or attrs.get("href") for _, attrs in Elements(text).found]
        return {name for name in named if name and not name.startswith("#")}
    imported = re.findall(r"""(?:from|import)\s*\(?\s*["']([^"']+)["']""", text)
    return {"/static/" + str((path.parent / name).resolve().relative_to(STATIC)) for name in imported}


def test_the_policy_allows_nothing_inline_and_nothing_from_elsewhere(client: TestClient) -> None:
    for path in ("/", "/static/base.js", "/static/base.css"):
        answer = client.get(path)
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect", "font")} == {"'self'"}
        assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/static/base.js", "text/javascript; charset=utf-8"),
        ("/static/base.css", "text/css; charset=utf-8"),
        ("/static/icon.svg", "image/svg+xml"),
    ],
)
def test_files_have_their_types_whatever_the_system_thinks(client: TestClient, path: str, kind: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    head = client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))


def test_a_browser_that_has_a_file_asks_whether_it_is_still_that(client: TestClient) -> None:
    answer = client.get("/static/base.js")
    assert answer.headers["cache-control"] == "no-cache"
    again = client.get("/static/base.js", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/static/base.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/static/none.js", "/static/../router.py", "/static/%2e%2e/router.py", "/static/"])
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_no_scripts_or_styles_of_their_own(page: Path) -> None:
    elements = Elements(page.read_text())
    assert elements.inline == ""
    for tag, attrs in elements.found:
        assert not [name for name in attrs if name == "style" or name.startswith("on")], tag
        assert tag != "script" or attrs.get("src")


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=lambda path: path.name)
def test_all_that_is_loaded_is_there(client: TestClient, path: Path) -> None:
    for name in references(path) - {"/monitor"}:
        assert client.get(name).status_code == 200, name


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_make_no_html_of_text(script: Path) -> None:
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script.read_text()
    )


def test_vendored_files_are_recorded_with_their_licences() -> None:
    vendor = STATIC / "vendor"
    recorded = (vendor / "README.md").read_text()
    for file in vendor.glob("*.js"):
        assert f"`{file.name}`" in recorded and file.with_suffix(".LICENSE").stat().st_size > 500
