"""Pictures of the chat page for the documentation: ``python -m tests.browser.screenshots DIRECTORY``."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.browser.chat_page import ChatPage
from tests.browser.conftest import CHROMIUM, FLAGS, PHONE, WIDE, Swarm, started_swarm

TEXTS = ("class OrderedDict(dict)\n |  Dictionary that remembers", "Return a list of")


def take(swarm: Swarm, browser: Any, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, viewport, scheme in (("chat", WIDE, "light"), ("chat-phone", PHONE, "dark")):
        page = browser.new_page(viewport=viewport, color_scheme=scheme)
        chat = ChatPage(page, swarm.url).open().options(temperature=0.6, seed=4, max_tokens=130)
        for text in TEXTS:
            chat.button("New conversation").click() if viewport is WIDE else None
            chat.send(text).wait_for_characters(150)
            if text == TEXTS[-1]:
                page.locator(".server-line").click()
                kill_middle(swarm, page)
            chat.wait_written()
        page.locator("#scroller").evaluate("scroller => scroller.scrollTop = scroller.scrollHeight")
        page.screenshot(path=directory / f"{name}.png")
        page.close()


def kill_middle(swarm: Swarm, page: Any) -> None:
    """The line is to have something to tell; another server takes the place."""
    victim = swarm.find(page.locator(".server-details td[title]").nth(1).get_attribute("title"))
    victim.signal(signal.SIGKILL)
    swarm.cluster.wait_ready([swarm.start("7:14")])


def main(directory: str) -> None:
    from playwright.sync_api import sync_playwright

    os.environ["HF_HUB_OFFLINE"] = "1"
    with (
        tempfile.TemporaryDirectory() as cache,
        started_swarm(Path(cache)) as swarm,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split()) as browser,
    ):
        take(swarm, browser, Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
