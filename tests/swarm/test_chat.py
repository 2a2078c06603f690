"""A conversation in the terminal is the text that the local model would write, computed once."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from swarm_cli.chat.chat import Chat, ChatModel
from swarm_cli.chat.conversation import Conversation
from swarm_cli.chat.loop import run
from swarm_cli.chat.terminal import PipeReader
from swarm_client import DistributedModel
from swarm_client.core.config import ClientConfig
from swarm_client.generation.opening import ModelChoice
from swarm_client.generation.text_options import TextOptions
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_protocol.errors import PeerUnavailable

OPTIONS = TextOptions(max_new_tokens=8, temperature=0)
LINES = ["Return a list of", "The first argument", "Raises"]
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORMATS = {None: ("{}", "\n{}"), TEMPLATE: ("<user>{}</s><assistant>", "</s><user>{}</s><assistant>")}


@pytest.fixture(scope="module")
def remote(shipped) -> Iterator[PreTrainedModel]:
    known = {"initial_peers": shipped.initial_peers, "swarm": shipped.swarm, "draft": "none"}
    with DistributedModel.from_pretrained(str(shipped.model), **known) as model:
        yield model


@pytest.fixture(params=[None, TEMPLATE], ids=["text", "template"])
def tokenizer(request) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(locate(DEFAULT_MODEL))
    tokenizer.chat_template = request.param
    return tokenizer


@pytest.fixture
def text_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(locate(DEFAULT_MODEL))


def answers_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> list[str]:
    """What a model in this process answers, computing the whole conversation each time."""
    first, further = FORMATS[tokenizer.chat_template]
    ids, answers = tokenizer("", return_tensors="pt").input_ids.long(), []
    if tokenizer.chat_template:
        ids = ids[:, :0]
    for line in lines:
        text = (further if answers else first).format(line)
        ids = torch.cat([ids, tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids], 1)
        length = ids.shape[1]
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS.as_arguments())
        answers.append(tokenizer.decode(ids[0, length:], skip_special_tokens=True))
    return answers


class Typist(PipeReader):
    """Types these lines.

    Attributes:
        said: to it, in lines.
    """

    def __init__(self, *lines: str) -> None:
        self._lines, self.said = list(lines), []

    def read(self) -> str:
        if not self._lines:
            raise EOFError
        return self._lines.pop(0)

    def say(self, text: str) -> None:
        self.said += text.splitlines()


def chat_with(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Chat:
    """Closing it leaves the model open."""
    choice = ModelChoice(DEFAULT_MODEL, ClientConfig())
    return Chat(choice, OPTIONS, lambda _choice: ChatModel(model, tokenizer, lambda: None))


@pytest.mark.promise("swarm chat is a conversation in one session")
def test_a_conversation_is_that_of_the_local_model(remote, shipped_whole, tokenizer, monkeypatch, capsys):
    expected = answers_of(shipped_whole, tokenizer, LINES)
    chat = chat_with(remote, tokenizer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([LINES[0], "", *LINES[1:]])))
    run(chat, PipeReader(), interactive=False)
    conversation = chat.conversation
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in expected)
    assert conversation.cache.session.stats.tokens == conversation.cache.get_seq_length()  # each was computed once


def test_a_template_may_change_earlier_turns(remote, shipped_whole, text_tokenizer):
    """As those do that leave out what a model has thought."""
    text_tokenizer.chat_template = TEMPLATE.replace("turn.content", "turn.content[:5]")
    conversation, messages = Conversation(remote, text_tokenizer, OPTIONS), []
    for line in LINES:
        messages.append({"role": "user", "content": line})
        ids = text_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        expected = shipped_whole.generate(torch.tensor([ids]), **OPTIONS.as_arguments())[0, len(ids) :]
        messages.append({"role": "assistant", "content": conversation.answer(line)})
        assert messages[-1]["content"] == text_tokenizer.decode(expected, skip_special_tokens=True)


def test_reset_and_exit(remote, shipped_whole, tokenizer, capsys):
    one, two = answers_of(shipped_whole, tokenizer, LINES[:1]), answers_of(shipped_whole, tokenizer, LINES[1:2])
    typist = Typist(LINES[0], "/reset", LINES[1], "/exit", LINES[2])
    run(chat_with(remote, tokenizer), typist, interactive=False)
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in one + two)


def test_what_is_wrong_is_said_and_the_conversation_goes_on(remote, shipped_whole, text_tokenizer, capsys):
    expected = answers_of(shipped_whole, text_tokenizer, LINES[:2])
    typist = Typist(LINES[0], "/quit", "very long " * 1000, LINES[1])
    run(chat_with(remote, text_tokenizer), typist, interactive=True)
    out, err = capsys.readouterr()
    unknown, too_long = err.splitlines()
    assert unknown.startswith("error: there is no command /quit: expected one of /help /model ")
    assert too_long.startswith("error: with this, the conversation has ")
    assert too_long.endswith("tokens, and the model only 1024 positions: /reset starts over")
    assert out == f"{expected[0]}\n{expected[1]}\n"


def test_without_a_terminal_a_mistake_ends_it(remote, text_tokenizer):
    with pytest.raises(ValueError, match="there is no command /quit"):
        run(chat_with(remote, text_tokenizer), Typist("/quit", LINES[0]), interactive=False)


def test_an_answer_takes_no_more_than_the_positions_that_are_left(remote, text_tokenizer):
    limit = remote.blocks.max_positions
    conversation = Conversation(remote, text_tokenizer, TextOptions(max_new_tokens=2 * limit, temperature=0))
    line = text_tokenizer.decode([509] * (limit - 3))
    num_tokens = len(text_tokenizer(line).input_ids)
    conversation.answer(line)
    assert num_tokens < len(conversation.token_ids) <= limit


@pytest.mark.parametrize("moment", [1, 4])
def test_an_answer_that_is_stopped_stays_as_far_as_it_came(remote, shipped_whole, text_tokenizer, moments, moment):
    """Ctrl-C comes while servers compute; before the first token, the turn is as if it had not been."""
    conversation = Conversation(remote, text_tokenizer, OPTIONS)
    conversation.answer(LINES[0])
    before = conversation.token_ids
    moments.after_sending(OPTIONS.max_new_tokens + moment, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        conversation.answer(LINES[1])
    if moment == 1:
        assert conversation.token_ids == before
    else:
        line = text_tokenizer("\n" + LINES[1], add_special_tokens=False).input_ids
        assert len(conversation.token_ids) == len(before) + len(line) + moment - 1
    text = conversation.token_ids + text_tokenizer("\n" + LINES[2], add_special_tokens=False).input_ids
    expected = shipped_whole.generate(torch.tensor([text]), **OPTIONS.as_arguments())[0].tolist()
    conversation.answer(LINES[2])
    assert conversation.token_ids == expected


def test_a_failure_is_said_and_the_next_line_is_answered(remote, shipped_whole, text_tokenizer, capsys, monkeypatch):
    expected, generate, failures = answers_of(shipped_whole, text_tokenizer, LINES[1:2]), remote.generate, ["once"]

    def failing(*args, **kwargs):
        if failures:
            raise PeerUnavailable(f"nobody answers {failures.pop()}")
        return generate(*args, **kwargs)

    monkeypatch.setattr(remote, "generate", failing)
    run(chat_with(remote, text_tokenizer), Typist(*LINES[:2]), interactive=True)
    out, err = capsys.readouterr()
    assert err == "error: nobody answers once\n"
    assert expected[0] in out
