"""What a reasoning model prints in a terminal, what a program reads of it, and what the next turn has of it."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swarm_cli.chat.answer import DIM, PLAIN, printed_answer
from swarm_cli.chat.conversation import Conversation
from swarm_client.generation.text_options import TextOptions
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from tests.unit.cli.chat.test_conversation import TEMPLATE, Model

# As DeepSeek's and Qwen's: earlier turns lose their reasoning.
REASONING = TEMPLATE.replace("{{ turn.content }}", "{{ turn.content.split('</think>')[-1] }}")
BEGUN = REASONING.replace("<assistant>{% endif", "<assistant><think>{% endif")
THOUGHT = "<think>\nwhat is it?\n</think>\n\na list"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(locate(DEFAULT_MODEL))


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def shown(text: str, apart: str) -> str:
    """What a terminal shows, with ``[…]`` for what is dimmed."""
    assert not apart
    return text.replace(f"{PLAIN}{DIM}", "").replace(DIM, "[").replace(PLAIN, "]")


@pytest.mark.parametrize(
    ("template", "said", "expected"),
    [
        (REASONING, THOUGHT, "[what is it?]\n\na list\n"),
        (REASONING, "a list", "a list\n"),
        (REASONING, "<think>\n\n</think>\n\na list", "a list\n"),
        (BEGUN, THOUGHT.removeprefix("<think>"), "[what is it?]\n\na list\n"),
        (TEMPLATE, THOUGHT, f"{THOUGHT}\n"),  # nothing says that this model reasons
    ],
)
def test_a_terminal_shows_reasoning_dimmed(
    tokenizer, template: str, said: str, expected: str, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.chat_template = template
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    model = Model([*ids(tokenizer, said), tokenizer.eos_token_id])
    Conversation(model, tokenizer, TextOptions()).answer("A?")
    assert shown(*capsys.readouterr()) == expected


def test_a_program_reads_the_answer_alone(tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer.chat_template = REASONING
    Conversation(Model(ids(tokenizer, THOUGHT)), tokenizer, TextOptions()).answer("A?")
    assert capsys.readouterr() == ("a list\n", "what is it?\n\n")


@pytest.mark.parametrize("said", [THOUGHT, "<think>\n\n</think>\n\na list"])
def test_the_next_turn_and_a_saved_file_have_no_reasoning(tokenizer, said: str) -> None:
    tokenizer.chat_template = TEMPLATE.replace("if add", "if '</think>' and add")  # one that would keep it
    model = Model(*[ids(tokenizer, said)] * 2)
    conversation = Conversation(model, tokenizer, TextOptions())
    assert conversation.answer("A?") == "a list"
    conversation.answer("B?")
    asked = tokenizer.decode(model.asked[1]).removeprefix(tokenizer.bos_token or "")
    assert asked == "<user>A?</s><assistant>a list</s><user>B?</s><assistant>"
    assert model.computed[1] == len(model.asked[1])
    assert "what is" not in json.dumps(conversation.messages)


def test_an_answer_without_reasoning_is_not_computed_again(tokenizer) -> None:
    tokenizer.chat_template = REASONING
    model = Model(ids(tokenizer, "a list"), ids(tokenizer, "a list"))
    conversation = Conversation(model, tokenizer, TextOptions())
    conversation.answer("A?")
    conversation.answer("B?")
    assert model.computed[1] < len(model.asked[1]) - len(model.asked[0])


def test_an_answer_that_is_all_reasoning_is_taken_back(tokenizer) -> None:
    tokenizer.chat_template = REASONING
    conversation = Conversation(Model(ids(tokenizer, "<think>\nwhat is")), tokenizer, TextOptions())
    with pytest.raises(ValueError, match=r"ended within its reasoning, after \d+ tokens: allow more by --max-new-tok"):
        conversation.answer("A?")
    assert conversation.messages == []


def test_what_there_is_of_an_interrupted_answer_is_printed_once(tokenizer, capsys) -> None:
    tokenizer.chat_template = REASONING
    answer = printed_answer(tokenizer, [], [])
    answer.put(torch.tensor([[1]]))
    for token in ids(tokenizer, f"{THOUGHT} <"):
        answer.put(torch.tensor([token]))
    answer.end()
    answer.end()
    assert capsys.readouterr().out == "a list <\n" and answer.text == "a list <"


def test_it_needs_no_package_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fastapi", "uvicorn", "pydantic", "llguidance", "prometheus_client", "python_multipart"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in list(sys.modules):
        if name.startswith(("swarm_gateway.answers", "swarm_gateway.grammars", "swarm_cli.chat")):
            monkeypatch.delitem(sys.modules, name)
    assert importlib.import_module("swarm_cli.chat.chat").Chat
