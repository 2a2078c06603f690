"""The chat page as its user sees it, and answers that a script writes in place of the swarm."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterable
from typing import Any

from PIL import Image

from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from tests.swarm.waiting import DEADLINE_S


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def picture(color: str, size: tuple[int, int] = (40, 40), kind: str = "PNG") -> bytes:
    return saved(Image.new("RGB", size, color), kind)


def kind_of(content: bytes) -> str:
    return {b"\x89PNG": "image/png", b"GIF8": "image/gif"}.get(content[:4], "text/plain")


class ChatPage:
    """Attributes: ``page``: Playwright's."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self._url = page, url

    def open(self) -> ChatPage:
        self.page.goto(f"{self._url}/")
        return self.wait_loaded()

    def wait_loaded(self) -> ChatPage:
        return self.until("document.querySelector('#model').value")

    def until(self, expression: str, argument: Any = None) -> ChatPage:
        """Waits until it is true. Playwright's own way evaluates text in the page, which its policy does not allow."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.page.evaluate(expression, argument):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(20)
        return self

    def mode(self, name: str) -> ChatPage:
        self.page.get_by_text(name, exact=True).and_(self.page.locator("#modes label")).click()
        return self

    def options(self, **values: Any) -> ChatPage:
        """``system``, and names of numbers."""
        self.page.get_by_role("button", name="Options").click()
        for name, value in values.items():
            self.page.fill("#system-prompt" if name == "system" else f"#option-{name}", str(value))
        self.page.get_by_role("button", name="Apply").click()
        # options count from the dialog's close event on, which a browser under load delivers after the click
        self.page.wait_for_selector("dialog", state="detached")
        return self

    def send(self, text: str) -> ChatPage:
        self.page.fill("#message", text)
        self.page.keyboard.press("Enter")
        return self

    def attach(self, *contents: bytes) -> ChatPage:
        """Chooses files, 0.png and so on, by the button; at least one must be a picture."""
        with self.page.expect_file_chooser() as chooser:
            self.button("Attach pictures").click()
        chooser.value.set_files(
            [{"name": f"{i}.png", "mimeType": kind_of(each), "buffer": each} for i, each in enumerate(contents)]
        )
        return self.until("!document.querySelector('#send').disabled")

    def wait_written(self) -> ChatPage:
        """Until no answer is under way."""
        self.page.wait_for_selector("#send:visible")
        return self

    def wait_for_characters(self, count: int) -> ChatPage:
        """Of what the model has written."""
        return self.until(
            "count => (document.querySelector('.document-text ins, .markdown')?.textContent.length ?? 0) >= count",
            count,
        )

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)

    @property
    def text(self) -> str:
        """Of the document, all of it."""
        return self.page.locator(".document-text").text_content()

    @property
    def titles(self) -> list[str]:
        return self.page.locator("#conversations .open").all_text_contents()

    @property
    def user_messages(self) -> list[str]:
        return self.page.locator(".bubble").all_text_contents()

    @property
    def versions(self) -> str:
        """Such as 2/3, of the newest message that has several."""
        return self.page.locator(".versions:visible > span").last.text_content()

    def wait_saved(self, minimum: int = 1) -> ChatPage:
        """Until conversations are in the browser's database, and nothing waits to be written."""
        return self.until(
            """minimum => new Promise((resolve) => {
              const request = indexedDB.open("swarm-chat", 1);
              request.onsuccess = () => {
                const all = request.result.transaction("conversations").objectStore("conversations").getAll();
                all.onsuccess = () => (request.result.close(), resolve(all.result.length >= minimum));
              };
            })""",
            minimum,
        )

    # ------------------------------------------------------------ in place of the swarm

    def has_template(self, *capabilities: str) -> ChatPage:
        """The model says that it has one, and what it can do."""
        model = {"id": DEFAULT_MODEL, "chat_template": True, "capabilities": ["completion", *capabilities]}
        self.page.route("**/v1/models/*", lambda route: route.fulfill(json=model))
        return self

    def answers(self, *texts: str, swarm: Iterable[dict[str, Any]] = (), reasoning: str = "") -> ChatPage:
        """To every message, in chunks."""
        chunks = [{"choices": [], "swarm": {"index": 0, **each}} for each in swarm]
        deltas = [{"reasoning_content": reasoning}] * bool(reasoning) + [{"content": text} for text in texts]
        chunks += [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.page.unroute("**/v1/chat/completions")
        self.page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
        )
        return self

    def refuses(self, status: int, message: str, **headers: str) -> ChatPage:
        error = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
        self.page.unroute("**/v1/chat/completions")
        self.page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(status=status, json=error, headers=headers)
        )
        return self
