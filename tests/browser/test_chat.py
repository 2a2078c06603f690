"""The chat page over a real swarm: what it asks, shows, keeps and lets go."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chat_page import ChatPage
from tests.browser.conftest import PHONE, SPANS, NewPage, Swarm
from tests.swarm.waiting import wait_for

PROMPT = "Return a list of"


@pytest.fixture
def chat(new_page: NewPage, swarm: Swarm) -> ChatPage:
    return ChatPage(new_page(), swarm.url).open()


def test_a_model_without_a_template_goes_on_with_the_text(chat: ChatPage, swarm: Swarm) -> None:
    chat.page.wait_for_selector("#mode-complete:checked", state="attached")
    expected = swarm.completed(PROMPT, 40)
    chat.options(temperature=0, max_tokens=40).send(PROMPT).wait_written()
    assert chat.text == PROMPT + expected
    again = swarm.completed(chat.text, 40)
    chat.button("Go on").click()
    chat.wait_written()
    assert chat.text == PROMPT + expected + again


def test_a_mode_that_is_chosen_before_the_model_is_known_stays(new_page: NewPage, swarm: Swarm) -> None:
    page, asked = new_page(), []
    page.route("**/v1/models/*", lambda route: asked.append(route))
    chat = ChatPage(page, swarm.url).open()
    while not asked:
        page.wait_for_timeout(20)
    chat.mode("Chat")  # which is shown as long as nothing is known
    with page.expect_response("**/v1/models/*"):
        asked[0].continue_()
    chat.options(max_tokens=8).send("One").wait_written()
    assert chat.user_messages == ["One"]


def test_the_live_line_shows_the_servers_of_the_answer(chat: ChatPage, swarm: Swarm) -> None:
    chat.options(max_tokens=20).send(PROMPT).wait_written()
    line = chat.page.locator(".server-line")
    assert re.search(r"3 servers · [\d.]+ tokens/s · first token after [\d.]+ s", line.text_content())
    assert chat.page.locator(".segment").count() == 3
    line.click()
    rows = chat.page.locator(".server-details tbody tr")
    assert [row.locator("td").first.text_content() for row in rows.all()] == list(SPANS)
    for row in rows.all():
        swarm.find(row.locator("td").nth(1).get_attribute("title"))
    assert line.get_attribute("aria-expanded") == "true"


def test_a_server_that_dies_is_a_pause_that_the_live_line_explains(chat: ChatPage, swarm: Swarm) -> None:
    expected = swarm.completed(PROMPT, 200)
    chat.options(temperature=0, max_tokens=200).send(PROMPT).wait_for_characters(30)
    chat.page.locator(".server-line").click()
    victim = swarm.find(chat.page.locator(".server-details td[title]").nth(1).get_attribute("title"))
    peer_id = victim.peer_id
    victim.signal(signal.SIGKILL)
    try:
        chat.wait_written()
        assert chat.text == PROMPT + expected
        said = chat.page.locator(".happenings .moved").first.text_content()
        assert re.fullmatch(
            rf"Blocks 7:14 moved from …{peer_id[-6:]} to …\w{{6}}: replayed \d+ tokens, [\d.]+ s", said
        ), said
        now = chat.page.locator(".server-details td[title]").nth(1).get_attribute("title")
        assert now != peer_id and swarm.find(now).ready["blocks"] == "7:14"
    finally:
        swarm.cluster.wait_ready([swarm.start(SPANS[1])])


def test_stopping_keeps_the_text_and_frees_the_swarm(chat: ChatPage, swarm: Swarm) -> None:
    chat.options(temperature=0, max_tokens=900).send(PROMPT).wait_for_characters(20)
    assert swarm.metric("swarm_generations_active") == 1
    chat.page.keyboard.press("Escape")
    chat.wait_written()
    assert chat.page.get_by_text("Stopped.", exact=True).is_visible()
    wait_for(lambda: swarm.metric("swarm_generations_active") == 0, "the generation has ended")
    kept = chat.text
    assert len(kept) > len(PROMPT) + 20
    chat.wait_saved().page.reload()
    chat.wait_loaded()
    assert chat.text == kept


def test_a_reload_keeps_what_was_written_until_then(chat: ChatPage, swarm: Swarm) -> None:
    chat.options(temperature=0, max_tokens=900).send(PROMPT).wait_for_characters(60).wait_saved()
    seen = chat.text
    chat.page.reload()
    chat.wait_loaded()
    assert chat.page.get_by_text("The page was closed while this was written.").is_visible()
    kept = chat.text
    assert kept.startswith(seen) and len(seen) >= len(PROMPT) + 60
    wait_for(lambda: swarm.metric("swarm_generations_active") == 0, "the generation has ended")
    chat.options(max_tokens=5)
    chat.page.locator(".ending").get_by_role("button", name="Retry").click()
    chat.wait_written()
    assert chat.versions == "2/2"


def test_messages_are_retried_and_edited_in_branches(chat: ChatPage) -> None:
    page = chat.page
    chat.mode("Chat").options(max_tokens=8).send("One").wait_written()
    assert page.locator("#template-hint").is_visible()
    page.locator(".answer").get_by_role("button", name="Retry").click()
    chat.wait_written()
    assert chat.versions == "2/2"
    chat.send("Two").wait_written()
    assert chat.user_messages == ["One", "Two"]
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("Three")
    page.keyboard.press("Enter")
    chat.wait_written()
    assert chat.user_messages == ["Three"] and chat.versions == "2/2"
    page.locator(".user").get_by_role("button", name="Previous version").click()
    assert chat.user_messages == ["One", "Two"]
    chat.wait_saved()


def test_while_an_answer_is_written_nothing_else_is_asked_and_no_text_is_lost(chat: ChatPage) -> None:
    page = chat.page
    chat.mode("Chat").options(max_tokens=8).send("One").wait_written()
    page.locator(".answer").get_by_role("button", name="Retry").click()
    chat.wait_written()
    page.locator(".user").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("Three")
    chat.options(temperature=0, max_tokens=900).send("Two")
    page.wait_for_selector("#stop:visible")
    assert page.locator(".answer").first.get_by_role("button", name="Retry").is_disabled()
    assert page.get_by_role("button", name="Previous version").first.is_disabled()
    page.get_by_label("Edit your message").press("Enter")
    assert page.get_by_label("Edit your message").input_value() == "Three"
    chat.button("Stop").click()
    chat.wait_written()
    assert page.locator(".answer").first.get_by_role("button", name="Retry").is_enabled()
    chat.options(temperature=0, max_tokens=8)
    page.get_by_label("Edit your message").press("Enter")
    chat.wait_written()
    assert chat.user_messages == ["Three"]


def test_what_is_asked_is_what_was_set(chat: ChatPage) -> None:
    asked: list[Any] = []
    chat.answers("fine").page.on(
        "request", lambda request: request.url.endswith("/completions") and asked.append(request.post_data_json)
    )
    chat.mode("Chat").options(system="Be brief", temperature=0.5, top_p=0.9, max_tokens=7, seed=3)
    chat.send("One").wait_written().send("Two").wait_written()
    assert asked[1] == {
        "model": "tiny-python-docs",
        "stream": True,
        "stream_options": {"include_usage": True, "include_servers": True},
        "messages": [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "fine"},
            {"role": "user", "content": "Two"},
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": 3,
    }


def test_reasoning_is_closed_once_the_answer_comes_and_opens_at_a_click(chat: ChatPage) -> None:
    chat.answers("fine", reasoning="I add <b>1</b>.").mode("Chat").send("One").wait_written()
    reasoning = chat.page.locator(".reasoning")
    assert chat.page.locator(".markdown").inner_text() == "fine" and reasoning.get_attribute("open") is None
    reasoning.get_by_text("Reasoning").click()
    assert chat.page.locator(".reasoning-text").text_content() == "I add <b>1</b>." and reasoning.is_visible()
    chat.answers("fine").send("Two").wait_written()
    assert [each.is_visible() for each in chat.page.locator(".reasoning").all()] == [True, False]


def test_conversations_are_kept_renamed_exported_and_deleted(chat: ChatPage, tmp_path: Path) -> None:
    page = chat.page
    chat.answers("fine").mode("Chat").send("First question").wait_written()
    chat.button("New conversation").click()
    chat.mode("Chat").send("Second question").wait_written().wait_saved(2)
    page.reload()
    chat.wait_loaded()
    assert chat.titles == ["Second question", "First question"] and chat.user_messages == ["Second question"]
    page.get_by_role("button", name="First question", exact=True).click()
    assert chat.user_messages == ["First question"]
    page.locator(".conversation").last.hover()
    chat.button("Rename “First question”").click()
    title = "<b>Renamed</b> to what is wider than the list of conversations"
    page.get_by_role("textbox", name="Name").fill(title)
    page.keyboard.press("Enter")
    chat.button(f"Rename “{title}”").wait_for()
    assert page.evaluate(
        "(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)(document.querySelector('#sidebar'))"
    )
    with page.expect_download() as download:
        chat.button(f"Export “{title}”").click()
    download.value.save_as(tmp_path / "exported.json")
    exported = json.loads((tmp_path / "exported.json").read_text())
    assert exported["title"] == title
    assert {node.get("text") for node in exported["nodes"].values()} == {None, "First question", "fine"}
    chat.button(f"Delete “{title}”").click()
    chat.button("Delete").click()
    chat.until("document.querySelectorAll('.conversation').length === 1")
    page.reload()
    chat.wait_loaded()
    assert chat.titles == ["Second question"]


def test_with_the_keyboard_alone(new_page: NewPage, swarm: Swarm) -> None:
    chat = ChatPage(new_page(), swarm.url).answers("fine").has_template().open()
    page = chat.page
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    page.keyboard.press("Enter")
    chat.wait_written()
    assert chat.user_messages == ["One\nTwo"]
    page.keyboard.press("ArrowUp")
    page.keyboard.type(" Three")
    page.keyboard.press("Enter")
    chat.wait_written()
    assert chat.user_messages == ["One\nTwo Three"]
    page.keyboard.press("Control+/")
    page.get_by_role("dialog", name="Keyboard").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    page.keyboard.press("Control+Shift+O")
    assert page.locator("#start").is_visible()
    page.keyboard.press("Shift+Tab")  # from the message to the options, past an empty conversation's examples
    for _ in range(12):
        if page.evaluate("document.activeElement.id") == "options":
            break
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name="Options").wait_for()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "options"


def test_on_a_phone_conversations_are_a_drawer(new_page: NewPage, swarm: Swarm) -> None:
    chat = ChatPage(new_page(viewport=PHONE, has_touch=True), swarm.url).answers("word " * 300).open().mode("Chat")
    page = chat.page
    chat.send("One").wait_written()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert page.evaluate("document.querySelector('#sidebar').inert")
    chat.button("Conversations").click()
    assert page.evaluate("document.activeElement.id") == "new"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Conversations"
    chat.button("Conversations").click()
    chat.button("New conversation").click()
    assert page.locator("#start").is_visible() and page.evaluate("document.querySelector('#sidebar').inert")


def test_the_theme_is_that_of_the_system_until_another_is_chosen(new_page: NewPage, swarm: Swarm) -> None:
    page = ChatPage(new_page(color_scheme="dark"), swarm.url).open().page

    def is_dark() -> bool:
        return page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 26)"

    assert is_dark()
    page.get_by_role("button", name="Light theme").click()
    assert not is_dark()
    page.reload()
    assert not is_dark()
