"""Pictures on the chat page: how they are attached, what is asked with them, what is shown and kept."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.browser.chat_page import ChatPage, kind_of, picture, saved
from tests.browser.conftest import PHONE, NewPage, Swarm

GIVE = """([event, name, files]) => {
  const data = new DataTransfer();
  for (const [name, type, content] of files)
    data.items.add(new File([Uint8Array.from(atob(content), (each) => each.charCodeAt(0))], name, { type }));
  const fields = { bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data };
  const made = event === "paste" ? new ClipboardEvent(event, fields) : new DragEvent(event, fields);
  document.querySelector(name).dispatchEvent(made);
  return made.defaultPrevented;
}"""


RED, BLUE = picture("red"), picture("blue", kind="GIF")


def give(chat: ChatPage, event: str, *contents: bytes, to: str = "#message") -> bool:
    """By the clipboard or the mouse; return whether the page has taken them."""
    files = [["given", kind_of(each), base64.b64encode(each).decode()] for each in contents]
    return chat.page.evaluate(GIVE, [event, to, files])


def part(content: bytes) -> dict[str, Any]:
    url = f"data:{kind_of(content)};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def thumbnails(chat: ChatPage, count: int) -> ChatPage:
    """Wait for so many."""
    return chat.until("count => document.querySelectorAll('#composer .thumbnails img').length === count", count)


class SeeingChat(ChatPage):
    """A chat page whose model says that it sees. Attributes: ``asked``: the messages of all requests."""

    def __init__(self, page: Any, url: str) -> None:
        super().__init__(page, url)
        self.asked: list[list[dict[str, Any]]] = []
        page.on("request", self._note)
        self.answers("fine").has_template("vision")

    def _note(self, request: Any) -> None:
        if request.url.endswith("/completions"):
            self.asked.append(request.post_data_json["messages"])

    def open(self) -> SeeingChat:
        super().open().page.wait_for_selector("#attach:visible")
        return self


@pytest.fixture
def chat(new_page: NewPage, swarm: Swarm) -> SeeingChat:
    return SeeingChat(new_page(), swarm.url).open()


def test_only_messages_with_pictures_are_sent_in_parts(chat: SeeingChat) -> None:
    chat.attach(RED, BLUE)
    thumbnails(chat, 2).send("What is it?").wait_written()
    thumbnails(chat, 0).send("Why?").wait_written()
    chat.attach(BLUE)
    chat.button("Send").click()
    chat.wait_written()
    first = {"role": "user", "content": [part(RED), part(BLUE), text("What is it?")]}
    answer = {"role": "assistant", "content": "fine"}
    assert chat.asked == [
        [first],
        [first, answer, {"role": "user", "content": "Why?"}],
        [first, answer, {"role": "user", "content": "Why?"}, answer, {"role": "user", "content": [part(BLUE)]}],
    ]
    shown = chat.page.locator(".message.user").evaluate_all(
        "all => all.map((each) => [...each.querySelectorAll('.picture img')].map((image) => image.src))"
    )
    assert shown == [[part(each)["image_url"]["url"] for each in sent] for sent in ([RED, BLUE], [], [BLUE])]
    sizes = chat.page.locator(".picture img").evaluate_all("all => all.map((image) => image.naturalWidth)")
    assert sizes == [40] * 3  # they are loaded


def test_an_answer_that_failed_leaves_one_message_with_all_pictures(chat: SeeingChat) -> None:
    chat.attach(RED)
    chat.refuses(503, "nobody is there").send("One")
    chat.page.locator(".ending.failed").wait_for()
    chat.attach(BLUE)
    chat.answers("fine").send("Two").wait_written()
    assert chat.asked[-1] == [{"role": "user", "content": [part(RED), part(BLUE), text("One\n\nTwo")]}]
    chat.page.problems[:] = [each for each in chat.page.problems if "503" not in each]


def test_pictures_are_pasted(chat: SeeingChat) -> None:
    page = chat.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate(
        """async (url) => {
          const blob = new Blob([Uint8Array.from(atob(url), (each) => each.charCodeAt(0))], { type: "image/png" });
          await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
        }""",
        base64.b64encode(RED).decode(),
    )
    page.locator("#message").press("Control+v")
    thumbnails(chat, 1)
    page.evaluate("navigator.clipboard.writeText('What is it?')")
    page.locator("#message").press("Control+v")
    page.keyboard.press("Enter")
    chat.wait_written()
    (message,) = chat.asked[0]
    seen, said = message["content"]
    assert said == text("What is it?")
    (color,) = decoded(seen).convert("RGB").getcolors()
    assert color == (40 * 40, (255, 0, 0))


def test_pictures_are_dropped_anywhere_on_the_page(chat: SeeingChat) -> None:
    assert give(chat, "dragover", RED, to="#scroller") and give(chat, "drop", RED, BLUE, to="#scroller")
    thumbnails(chat, 2).send("What?").wait_written()
    assert chat.asked == [[{"role": "user", "content": [part(RED), part(BLUE), text("What?")]}]]


def decoded(sent: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(sent["image_url"]["url"].partition(",")[2])))


def test_large_pictures_become_smaller_and_others_stay_as_they_are(chat: SeeingChat) -> None:
    chat.attach(picture("red", (3000, 1500)), picture("blue", (2048, 10)))
    chat.button("Send").click()
    chat.wait_written()
    large, small = chat.asked[0][0]["content"]
    made = decoded(large)
    assert (made.format, made.size) == ("JPEG", (2048, 1024))
    assert all(abs(is_ - want) < 8 for is_, want in zip(made.getpixel((9, 9)), (255, 0, 0), strict=True))
    assert small == part(picture("blue", (2048, 10)))


def test_what_cannot_be_sent_is_said(chat: SeeingChat) -> None:
    alert = chat.page.locator("#composer [role=alert]")
    chat.attach(b"notes", RED, RED[:40])
    assert alert.text_content() == "No picture that can be read: “0.png”, “2.png”."
    thumbnails(chat, 1).send("One").wait_written()
    assert alert.is_hidden()
    chat.attach(*[RED] * 33)
    thumbnails(chat, 31)  # with the one of the earlier message
    assert alert.text_content() == "2 pictures left out: a conversation has room for 32, and for 8 MB in all."
    chat.button("Remove picture 1").click()
    thumbnails(chat, 30)
    assert alert.is_hidden()


def test_a_request_is_not_larger_than_the_server_takes(chat: SeeingChat) -> None:
    chat.attach(*[saved(Image.effect_noise((900, 900), 90))] * 12)  # each of 800 kB
    assert "left out" in chat.page.locator("#composer [role=alert]").text_content()
    with chat.page.expect_request("**/v1/chat/completions") as asked:
        chat.button("Send").click()
    assert 6 * 2**20 < len(asked.value.post_data_buffer) < 8 * 2**20


def test_pictures_are_edited_and_retried_in_branches(chat: SeeingChat) -> None:
    page = chat.page
    chat.attach(RED, BLUE).send("One").wait_written()
    page.locator(".answer").get_by_role("button", name="Retry").click()
    chat.wait_written()
    assert chat.asked[1] == chat.asked[0]
    page.locator(".user").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("Two")
    page.keyboard.press("Enter")
    chat.wait_written()
    assert chat.asked[2] == [{"role": "user", "content": [part(RED), part(BLUE), text("Two")]}]
    page.locator(".user").get_by_role("button", name="Edit").click()
    page.locator(".edit").get_by_role("button", name="Remove picture 1").click()
    page.get_by_label("Edit your message").fill("")
    page.get_by_label("Edit your message").press("Enter")
    chat.wait_written()
    assert chat.asked[3] == [{"role": "user", "content": [part(BLUE)]}]
    assert chat.versions == "3/3" and page.locator(".picture").count() == 1
    page.get_by_role("button", name="Previous version").first.click()
    assert chat.user_messages == ["Two"] and page.locator(".picture").count() == 2
    page.locator(".user").get_by_role("button", name="Edit").click()
    page.locator(".edit").get_by_role("button", name="Remove picture 2").click()
    page.keyboard.press("Escape")  # nothing has changed
    assert page.locator(".picture:visible").count() == 2


def test_pictures_outlive_a_reload_and_are_exported(chat: SeeingChat, tmp_path: Path) -> None:
    page = chat.page
    chat.attach(RED)
    chat.button("Send").click()
    chat.wait_written()
    assert chat.titles == ["Pictures"]
    chat.send("Why?").wait_written().wait_saved()
    page.reload()
    chat.wait_loaded()
    assert page.locator(".picture img").get_attribute("src") == part(RED)["image_url"]["url"]
    page.locator(".answer").last.get_by_role("button", name="Retry").click()
    chat.wait_written()
    assert len(chat.asked) == 3 and chat.asked[2] == chat.asked[1]
    page.locator(".conversation").hover()
    with page.expect_download() as download:
        chat.button("Export “Pictures”").click()
    download.value.save_as(tmp_path / "exported.json")
    nodes = json.loads((tmp_path / "exported.json").read_text())["nodes"].values()
    said = [(node["text"], node.get("pictures")) for node in nodes if node.get("role") == "user"]
    assert said == [("", [part(RED)]), ("Why?", None)]


def test_where_the_model_does_not_see_nothing_is_attached(new_page: NewPage, swarm: Swarm) -> None:
    chat = ChatPage(new_page(), swarm.url).answers("fine").has_template().open()
    chat.page.wait_for_selector("#mode-chat:checked", state="attached")
    chat.send("One").wait_written()
    assert not chat.button("Attach pictures").is_visible()
    assert not any(give(chat, event, RED) for event in ("paste", "dragover", "drop"))
    assert chat.page.locator("#composer img").count() == 0


def test_where_text_goes_on_pictures_wait(chat: SeeingChat) -> None:
    page = chat.page
    chat.attach(RED)
    chat.mode("Complete")
    assert not chat.button("Attach pictures").is_visible() and page.locator("#composer img:visible").count() == 0
    assert chat.button("Send").is_disabled() and not give(chat, "paste", RED)
    chat.mode("Chat")
    thumbnails(chat, 1).send("What?").wait_written()
    assert chat.asked == [[{"role": "user", "content": [part(RED), text("What?")]}]]


def test_with_the_keyboard_alone(chat: SeeingChat) -> None:
    page = chat.page
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.id") == "attach"
    with page.expect_file_chooser() as chooser:
        page.evaluate("0")  # keys may overtake the order to leave the choice of files to the test
        page.keyboard.press("Enter")
    chooser.value.set_files([{"name": "a.png", "mimeType": "image/png", "buffer": RED}] * 2)
    thumbnails(chat, 2)
    page.locator("#attach").focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    thumbnails(chat, 1)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Remove picture 1"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # in the message
    chat.wait_written()
    assert [len(message["content"]) for message in chat.asked[0]] == [1]
    page.locator(".picture").focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name="Picture 1").get_by_role("img").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert page.evaluate("document.activeElement.className") == "picture"


def test_on_a_phone_pictures_fit(new_page: NewPage, swarm: Swarm) -> None:
    chat = SeeingChat(new_page(viewport=PHONE, has_touch=True), swarm.url).open()
    chat.attach(*[RED] * 9)
    assert chat.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    thumbnails(chat, 9).send("What?").wait_written()
    assert chat.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    chat.page.locator(".picture").first.click()
    box = chat.page.get_by_role("dialog").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
