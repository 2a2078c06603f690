"""What ``/model``, ``/retry``, ``/load`` and the like do to a conversation, beside the local model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from swarm_cli.chat.chat import Chat, ChatModel, open_model
from swarm_cli.chat.commands import COMMANDS, carry_out
from swarm_client.core.config import ClientConfig
from swarm_client.generation.opening import ModelChoice
from swarm_client.generation.text_options import TextOptions
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_protocol.errors import CheckpointError, NoRoute
from tests.swarm.harness import InProcessServers
from tests.swarm.test_chat import LINES, OPTIONS, TEMPLATE


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A model with the same weights under another name, and a chat template."""
    path = tmp_path_factory.mktemp("models") / "talking"
    shutil.copytree(locate(DEFAULT_MODEL), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def choice(other) -> Iterator[ModelChoice]:
    with InProcessServers(Path(locate(DEFAULT_MODEL)), memory_dht=True) as servers:
        servers.start("0:10", "10:20")
        servers.start("0:20", model=str(other))
        known = {"initial_peers": tuple(servers.initial_peers), "swarm": servers.swarm}
        config = ClientConfig(**known, wait_timeout_s=2.0, draft="none")  # the tests count positions
        yield ModelChoice(DEFAULT_MODEL, config)


class Talk:
    """Attributes: said: by the last command."""

    def __init__(self, chat: Chat) -> None:
        self.chat, self.said = chat, []

    def __call__(self, text: str) -> str:
        """The last answer after this turn or command."""
        self.said = []
        carry_out(self.chat, text, self.said.append)
        messages = self.chat.conversation.messages
        return messages[-1]["content"] if messages else ""


@pytest.fixture(scope="module")
def opened(choice) -> Iterator[ChatModel]:
    opened = open_model(choice)
    yield ChatModel(opened.model, opened.tokenizer, lambda: None)
    opened.close()


@pytest.fixture
def talk(choice, opened) -> Iterator[Talk]:
    """The model that is there at first is opened once for all tests; others are when they are asked for."""
    with Chat(choice, OPTIONS, lambda asked: opened if asked == choice else open_model(asked)) as chat:
        yield Talk(chat)


@pytest.fixture
def continued(shipped_whole):
    """What the local model says after this text; ``begins`` with the special tokens of a text."""
    tokenizer = AutoTokenizer.from_pretrained(locate(DEFAULT_MODEL))

    def continued(text: str, *, begins: bool = True) -> str:
        ids = tokenizer(text, add_special_tokens=begins, return_tensors="pt").input_ids
        output = shipped_whole.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS.as_arguments())
        return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)

    return continued


def test_another_model_goes_on_with_the_conversation(talk, other, continued):
    first = talk(LINES[0])
    assert first == continued(LINES[0])
    talk(f"/model {other}")
    assert talk.said == [f"now with model {other}"]
    turns = f"<user>{LINES[0]}</s><assistant>{first}</s><user>{LINES[1]}</s><assistant>"
    second = talk(LINES[1])
    assert second == continued(turns, begins=False)
    talk(f"/model {DEFAULT_MODEL}")
    assert talk(LINES[2]) == continued(f"{LINES[0]}{first}\n{LINES[1]}{second}\n{LINES[2]}")


def test_a_model_that_cannot_be_had_leaves_the_old_one(talk, tmp_path, continued, monkeypatch):
    first = talk(LINES[0])
    session = talk.chat.conversation.cache.session
    alone = tmp_path / "alone"
    shutil.copytree(locate(DEFAULT_MODEL), alone)
    for command, error in {
        "/model /nowhere/model": ValueError,
        f"/model {tmp_path}": CheckpointError,
        f"/model {alone}": NoRoute,  # it can be read, but nobody serves it
        "/adapter ./nowhere": ValueError,
        "/adapter nobody-has-it": NoRoute,
    }.items():
        with pytest.raises(error):
            talk(command)
    assert talk.chat.choice.model == DEFAULT_MODEL
    assert talk(LINES[1]) == continued(f"{LINES[0]}{first}\n{LINES[1]}")
    assert talk.chat.conversation.cache.session is session and session.stats.tokens == session.length


def test_what_was_opened_in_vain_is_closed(choice, opened, monkeypatch):
    closed = []

    def opening(_choice):
        return ChatModel(opened.model, opened.tokenizer, lambda: closed.append(True))

    def no_chain(_model):
        raise KeyboardInterrupt

    chat = Chat(choice, OPTIONS, opening)
    monkeypatch.setattr("swarm_cli.chat.chat.require_chain", no_chain)
    with pytest.raises(KeyboardInterrupt):
        chat.switch(choice)
    assert closed == [True]


def test_an_answer_is_written_again(talk, continued, monkeypatch):
    with pytest.raises(ValueError, match="there is no answer yet"):
        talk("/retry")
    first, second = talk(LINES[0]), talk(LINES[1])
    assert talk("/retry") == second
    assert len(talk.chat.conversation.messages) == 4
    talk("/set max-new-tokens 3")
    shorter = talk("/retry")
    assert second.startswith(shorter) and shorter != second
    talk.chat.conversation.options = OPTIONS
    assert talk(LINES[2]) == continued(f"{LINES[0]}{first}\n{LINES[1]}{shorter}\n{LINES[2]}")
    before = talk.chat.conversation.messages

    def failing(*_args, **_options):
        raise NoRoute("nobody", ())

    with monkeypatch.context() as patch:
        patch.setattr(talk.chat._opened.model, "generate", failing)
        with pytest.raises(NoRoute):
            talk("/retry")
    assert talk.chat.conversation.messages == before


def test_a_system_prompt_needs_a_template(talk, other, continued):
    with pytest.raises(ValueError, match="this model has no chat template, and so takes no system prompt"):
        talk("/system be brief")
    talk(f"/model {other}")
    talk("/system be brief\nand kind")
    talk("/system")
    assert talk.said == ["be brief\nand kind"]
    asked = f"<system>be brief\nand kind</s><user>{LINES[0]}</s><assistant>"
    first = talk(LINES[0])
    assert first == continued(asked, begins=False)
    talk("/system none")
    second = f"<user>{LINES[0]}</s><assistant>{first}</s><user>{LINES[1]}</s><assistant>"
    assert talk(LINES[1]) == continued(second, begins=False)
    talk("/system be brief")
    talk(f"/model {DEFAULT_MODEL}")
    assert talk.said[1] == "this model has no chat template: the system prompt is left out"
    assert talk("/reset") == "be brief"
    assert talk(LINES[0]) == continued(LINES[0])


def test_a_conversation_is_saved_and_loaded(talk, tmp_path, continued):
    path = tmp_path / "talk.json"
    first = talk(LINES[0])
    talk(f"/save {path}")
    messages = [{"role": "user", "content": LINES[0]}, {"role": "assistant", "content": first}]
    assert json.loads(path.read_text()) == {"model": DEFAULT_MODEL, "messages": messages}
    talk("/reset")
    talk(LINES[1])
    with pytest.raises(ValueError, match=r"is there already: /save! .* overwrites it"):
        talk(f"/save {path}")
    assert json.loads(path.read_text())["messages"] == messages
    talk(f"/load {path}")
    assert talk.said == ["1 turns, which the model reads at the next one"]
    assert talk(LINES[1]) == continued(f"{LINES[0]}{first}\n{LINES[1]}")
    talk(f"/save! {path}")
    assert len(json.loads(path.read_text())["messages"]) == 4
    assert [each.name for each in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("{}", 'has no "messages"'),
        ('[{"role": "user"}]', 'has no "messages"'),
        ('[{"role": "user", "content": "x"}]', "is no conversation"),
        ('[{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]', "is no conversation"),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(talk, tmp_path, content, sentence):
    before = [{"role": r, "content": "x"} for r in ("system", "user", "assistant")]
    talk.chat.conversation.load(before)
    path = tmp_path / "talk.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=sentence):
        talk(f"/load {path}")
    assert talk.chat.conversation.messages == before


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("/fly", "there is no command /fly: expected one of /help"),
        ("/save", "/save needs FILE"),
        ("/reset now", "/reset takes nothing, but 'now' was given"),
        ("/set warmth 1", "there is no setting 'warmth': expected one of max_new_tokens, temperature"),
        ("/set temperature hot", "temperature is 'hot': expected a number, as in /set temperature 1"),
        ("/set top-k 1.5", "top_k is '1.5': expected a whole number"),
        ("/set top_p 2", "top_p is 2.0: expected a probability"),
        ("/save /nowhere/talk.json", "/nowhere/talk.json cannot be written"),
    ],
)
def test_mistakes(talk, command, sentence):
    with pytest.raises(ValueError) as error:
        talk(command)
    assert sentence in str(error.value)
    assert talk.chat.conversation.options == OPTIONS


def test_settings_and_help(talk, continued):
    talk("/set temperature 0.7")
    talk("/set seed 3")
    assert talk.chat.conversation.options == TextOptions(max_new_tokens=8, temperature=0.7, seed=3)
    talk("/set temperature none")
    assert talk.chat.conversation.options.temperature is None
    talk("/set")
    assert "seed 3" in talk.said[0].splitlines()
    talk("/help")
    assert [line.split()[0] for line in talk.said[0].splitlines()] == list(COMMANDS)
    assert carry_out(talk.chat, "/exit", print) is False


def test_a_turn_may_begin_with_a_slash(talk, continued):
    assert talk("//usr is a directory") == continued("/usr is a directory")
    talk("/reset")
    assert talk("/usr/lib is a directory") == continued("/usr/lib is a directory")
