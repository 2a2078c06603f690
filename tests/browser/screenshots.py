"""A picture of the chat page for the documentation: ``python -m tests.browser.screenshots DIRECTORY``."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from swarm_models.checkpoints.default_model import SMALL_CHAT_MODEL
from tests.browser.chat_page import ChatPage
from tests.browser.conftest import CHROMIUM, FLAGS, WIDE, Swarm, started_swarm
from tests.small_chat_model import QUESTION

SPANS = ("0:10", "10:20", "20:30")
REQUEST = "Tell me a short story about three friends who carry a piano together."


def take(swarm: Swarm, browser: Any, directory: Path) -> None:
    """Ask for an answer, one of whose servers dies in the middle of it."""
    directory.mkdir(parents=True, exist_ok=True)
    page = browser.new_page(viewport=WIDE, color_scheme="light")
    chat = ChatPage(page, swarm.url).open().options(temperature=0, max_tokens=130)
    page.wait_for_selector("#mode-chat:checked", state="attached")
    chat.send(QUESTION).wait_written()
    chat.button("New conversation").click()
    chat.send(REQUEST).wait_for_characters(150)
    page.locator(".server-line").click()
    swarm.find(page.locator(".server-details td[title]").nth(1).get_attribute("title")).signal(signal.SIGKILL)
    chat.wait_written()
    page.locator("#scroller").evaluate("scroller => scroller.scrollTop = scroller.scrollHeight")
    page.screenshot(path=directory / "chat.png")
    page.close()


def main(directory: str) -> None:
    from playwright.sync_api import sync_playwright

    os.environ["HF_HUB_OFFLINE"] = "1"
    with (
        tempfile.TemporaryDirectory() as cache,
        started_swarm(Path(cache), SMALL_CHAT_MODEL, SPANS) as swarm,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split()) as browser,
    ):
        take(swarm, browser, Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
