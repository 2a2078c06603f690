"""A question on the chat page, for a model that has learned to answer."""

from __future__ import annotations

import pytest

from swarm_models.checkpoints.default_model import SMALL_CHAT_MODEL
from tests.browser.chat_page import ChatPage
from tests.browser.conftest import NewPage, started_swarm
from tests.small_chat_model import ANSWER, NEEDS_IT, QUESTION


@NEEDS_IT
def test_a_question_is_asked_by_the_chat_template(new_page: NewPage, tmp_path_factory: pytest.TempPathFactory) -> None:
    with started_swarm(tmp_path_factory.mktemp("cache"), SMALL_CHAT_MODEL, ("0:15", "15:30")) as swarm:
        chat = ChatPage(new_page(), swarm.url).open().options(temperature=0, max_tokens=20)
        chat.page.wait_for_selector("#mode-chat:checked", state="attached")
        chat.send(QUESTION).wait_written()
        assert chat.user_messages == [QUESTION]
        assert chat.page.locator(".markdown").last.text_content().strip() == ANSWER
