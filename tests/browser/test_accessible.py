"""axe finds nothing serious on the chat page, in any of its states, at both widths and in both themes."""

from __future__ import annotations

import pytest

from tests.browser.chat_page import ChatPage, picture
from tests.browser.conftest import PHONE, WIDE, NewPage, Swarm, serious_violations

ANSWER = (
    "# Title\n\nA [link](https://elsewhere.example) and `code`.\n\n```python\ndef f():  # why\n    return 'x', 1\n```\n"
)
MOVED = {
    "type": "recovery",
    "text": "moved",
    "span": [7, 14],
    "failed": ["QmOldOldOld"],
    "replacements": ["QmNewNewNew"],
    "replayed_tokens": 57,
    "from_copy": False,
    "stall_s": 0.8,
}
SERVERS = [
    {
        "peer_id": f"Qm{end}",
        "span": [end - 10, end],
        "num_blocks": 20,
        "device": "cpu",
        "quant": "int8",
        "address": "a:1",
    }
    for end in (10, 20)
]


def serious(chat: ChatPage) -> list[str]:
    chat.until(
        "document.getAnimations().every((each) => each.playState !== 'running' || "
        "each.effect.getComputedTiming().iterations === Infinity)"
    )
    return serious_violations(chat.page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing_serious(new_page: NewPage, swarm: Swarm, scheme: str, viewport: dict[str, int]) -> None:
    page = new_page(color_scheme=scheme, viewport=viewport)
    chat = ChatPage(page, swarm.url).answers(ANSWER, swarm=[{"servers": SERVERS}, {"event": MOVED}]).open()
    page.wait_for_selector("#examples button")
    assert serious(chat) == [], "at the start"
    chat.mode("Chat").send("Hello").wait_written()
    page.locator(".server-line").click()
    assert serious(chat) == [], "with an answer, its servers, and a hint"
    chat.refuses(503, "nobody is there").send("Hello")
    page.locator(".ending.failed").wait_for()
    assert serious(chat) == [], "with an error"
    page.locator(".user").first.hover()
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    assert serious(chat) == [], "with an editor"
    page.get_by_role("button", name="Options").click()
    assert serious(chat) == [], "with a dialog"
    page.keyboard.press("Escape")
    chat.mode("Complete")
    assert serious(chat) == [], "with a text"
    if viewport == PHONE:
        chat.button("Conversations").click()
        assert serious(chat) == [], "with the drawer"
    page.problems[:] = [each for each in page.problems if "503" not in each]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing_serious_with_pictures(
    new_page: NewPage, swarm: Swarm, scheme: str, viewport: dict[str, int]
) -> None:
    page = new_page(color_scheme=scheme, viewport=viewport)
    chat = ChatPage(page, swarm.url).answers("Red.").has_template("vision").open()
    chat.attach(picture("red"), picture("blue"), b"no picture")
    page.get_by_role("alert").wait_for()
    assert serious(chat) == [], "with thumbnails and a line about a file"
    chat.send("What is it?").wait_written()
    assert serious(chat) == [], "with pictures in the thread"
    chat.button("Picture 1").click()
    assert serious(chat) == [], "with a picture in the dialog"
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    page.locator(".user").hover()
    chat.button("Edit").click()
    assert serious(chat) == [], "with an editor"
