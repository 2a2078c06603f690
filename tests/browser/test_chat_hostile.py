"""What models, servers and networks may do to the chat page: nothing runs, nothing is loaded, all is said."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.chat_page import ChatPage
from tests.browser.conftest import NewPage, Swarm

SCRIPT = "<script>window.hacked = true</script>"
HOSTILE = [
    SCRIPT,
    f"text {SCRIPT} <img src=x onerror='window.hacked = true'> more",
    "<svg onload='window.hacked = true'><style>*{display:none}</style></svg>",
    "<iframe srcdoc='<script>parent.hacked = true</script>'></iframe>",
    "[a](javascript:window.hacked=true) [b](JaVaScRiPt&#58;window.hacked=true) <javascript:window.hacked=true>",
    "[c](data:text/html,<script>hacked=1</script>) [d](vbscript:x) [e](/v1/models)",
    '![picture](https://elsewhere.example/pixel.png) ![x](x"onerror="window.hacked=true)',
    "![picture](data:image/gif;base64,R0lGODlhAQABAAAAACw=) ![picture](/static/icon.svg)",
    '```html" onmouseover="window.hacked=true\n<img src=x onerror=window.hacked=true>\n```',
    "```html\n</code></pre><script>window.hacked = true</script>\n```",
    "| <img src=x onerror=window.hacked=true> |\n|---|\n| <form action=//elsewhere.example><input></form> |",
    '<a href="https://elsewhere.example" style="position:fixed;inset:0">over everything</a>',
    "[good](https://elsewhere.example/page) and https://elsewhere.example/other",
]


@pytest.fixture
def chat(new_page: NewPage, swarm: Swarm) -> ChatPage:
    return ChatPage(new_page(), swarm.url).has_template()


def test_nothing_that_a_model_writes_runs_or_loads(chat: ChatPage) -> None:
    page = chat.page
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    chat.answers(*[part for text in HOSTILE for part in (text[:9], text[9:], "\n\n")]).open().send(
        "Hello"
    ).wait_written()
    markdown = page.locator(".markdown")
    assert SCRIPT in markdown.text_content()  # shown as it was written
    names = markdown.evaluate("e => [...new Set([...e.querySelectorAll('*')].map((each) => each.localName))]")
    assert not {"script", "img", "iframe", "style", "form", "input", "object"} & set(names)
    attributes = markdown.evaluate("e => [...e.querySelectorAll('*')].flatMap((each) => each.getAttributeNames())")
    assert not [name for name in attributes if name.startswith("on") or name in ("style", "id", "name")]
    links = markdown.evaluate(
        "e => [...e.querySelectorAll('a[href]')].map((each) => [each.getAttribute('href'), each.rel, each.target])"
    )
    assert {rel for _, rel, _ in links} == {"noopener noreferrer"} and {target for *_, target in links} == {"_blank"}
    assert all(href.startswith("https://elsewhere.example/") for href, *_ in links) and len(links) == 3
    for target in page.locator(".markdown a, .markdown pre").all():
        target.hover()
    assert page.evaluate("window.hacked") is None
    assert not [url for url in requests if "elsewhere" in url]


def test_names_of_servers_are_text(chat: ChatPage) -> None:
    name = "<img src=x onerror=window.hacked=true>"
    server = {"peer_id": name, "span": [0, 20], "num_blocks": 20, "device": name, "quant": name, "address": name}
    event = {"type": "waiting", "text": name, "reason": name, "timeout_s": 1.0}
    chat.answers("fine", swarm=[{"servers": [server]}, {"event": event}]).open().send("Hello").wait_written()
    chat.page.locator(".server-line").click()
    assert name in chat.page.locator(".server-details").text_content()
    assert f"Waiting for servers: {name}" in chat.page.locator(".happenings").text_content()
    assert chat.page.locator(".servers img").count() == 0 and chat.page.evaluate("window.hacked") is None


def test_markdown_is_shown_with_code_to_copy(chat: ChatPage) -> None:
    page = chat.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    code = "def f(x):\n    return x < 1\n"
    chat.answers(f"# Title\n\n- **one**\n- `two`\n\n```python\n{code}```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n").open()
    chat.send("Hello").wait_written()
    assert page.locator(".markdown h3").text_content() == "Title" and page.locator(".markdown li").count() == 2
    assert page.locator(".hljs-keyword").all_text_contents() == ["def", "return"]
    assert page.locator(".markdown td").all_text_contents() == ["1", "2"]
    page.get_by_role("button", name="Copy code").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").strip() == code.strip()


@pytest.mark.parametrize(
    ("status", "message", "headers", "said"),
    [
        (429, "64 chats are active", {"Retry-After": "5"}, "Too much at once: 64 chats are active. Try again in"),
        (503, "no server has blocks 7:14", {}, "The swarm cannot answer: no server has blocks 7:14."),
        (400, "the prompt is too long", {}, "The request was refused: the prompt is too long."),
        (None, "", {}, "No connection: The server cannot be reached."),
    ],
)
def test_a_refusal_or_a_lost_connection_is_said_and_can_be_retried(
    chat: ChatPage, status: int | None, message: str, headers: dict[str, str], said: str
) -> None:
    chat.open()
    if status is None:
        chat.page.route("**/v1/chat/completions", lambda route: route.abort())
    else:
        chat.refuses(status, message, **headers)
    chat.send("Hello")
    alert = chat.page.locator(".ending.failed")
    alert.wait_for()
    assert alert.text_content().startswith(said)
    chat.answers("fine")
    alert.get_by_role("button", name="Retry").click()
    chat.wait_written()
    assert chat.page.locator(".markdown").text_content().strip() == "fine" and alert.count() == 0
    own_words = str(status or "net::ERR_FAILED")  # the browser's
    chat.page.problems[:] = [each for each in chat.page.problems if own_words not in each]


def test_an_error_within_a_stream_keeps_what_came_before(chat: ChatPage) -> None:
    body = (
        'data: {"choices": [{"index": 0, "delta": {"content": "so far"}}]}\n\ndata: {"error": {"message": "gone"}}\n\n'
    )
    chat.open().page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    chat.send("Hello")
    chat.page.get_by_text("The swarm cannot answer: gone.").wait_for()
    assert chat.page.locator(".markdown").text_content().strip() == "so far"


@pytest.mark.parametrize("keep", [False, True])
def test_a_key_is_asked_for_and_sent(chat: ChatPage, keep: bool) -> None:
    page = chat.page
    given: list[str | None] = []

    def guard(route: Any) -> None:
        given.append(route.request.headers.get("authorization"))
        if given[-1] == "Bearer good":
            route.fulfill(json={"object": "list", "data": [{"id": "tiny-python-docs"}]})
        else:
            route.fulfill(status=401, json={"error": {"message": "the API key is not known here"}})

    page.route("**/v1/models", guard)
    page.goto(f"{chat._url}/")
    page.get_by_label("Key", exact=True).fill("bad")
    page.keyboard.press("Enter")
    page.get_by_text("Refused: the API key is not known here").wait_for()
    page.get_by_label("Key", exact=True).fill("good")
    if keep:
        page.get_by_label("Remember it on this device").check()
    page.get_by_role("button", name="Use key").click()
    chat.wait_loaded()
    assert given == [None, "Bearer bad", "Bearer good"]
    assert page.evaluate("localStorage.getItem('swarm.api-key')") == ("good" if keep else None)
    page.get_by_role("button", name="API key").click()
    page.get_by_role("button", name="Forget the key").click()
    chat.until("(localStorage.getItem('swarm.api-key') ?? sessionStorage.getItem('swarm.api-key')) === null")
    chat.page.problems[:] = [each for each in chat.page.problems if "401" not in each]
