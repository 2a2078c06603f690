"""The tokens of a conversation, with a model that says what it is told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swarm_cli.chat.conversation import Conversation
from swarm_client.generation.text_options import TextOptions
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate

TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Cache:
    """A cache that is its own session."""

    length = 0

    @property
    def session(self) -> Cache:
        return self

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        self.length = 0


class Model:
    """Enough of a distributed model. It answers with these token ids, one list each turn.

    Attributes:
        asked: the token ids of all turns, each time.
        computed: how many of them were not in the cache.
    """

    device, prompts = torch.device("cpu"), None
    _family = SimpleNamespace(cache_argument="past_key_values")
    blocks = SimpleNamespace(max_positions=None)
    generation_config = SimpleNamespace(eos_token_id=[0])

    def __init__(self, *answers: list[int]) -> None:
        self._answers, self._cache = list(answers), Cache()
        self.asked: list[list[int]] = []
        self.computed: list[int] = []

    def new_cache(self) -> Cache:
        return self._cache

    def generate(self, ids: torch.Tensor, *, streamer: Any, **_options: Any) -> None:
        self.asked.append(ids[0].tolist())
        self.computed.append(ids.shape[1] - self._cache.length)
        streamer.put(ids)
        answer = self._answers.pop(0)
        for token in answer:
            streamer.put(torch.tensor([token]))
        streamer.end()
        self._cache.length = ids.shape[1] + len(answer) - 1


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(locate(DEFAULT_MODEL))


@pytest.mark.parametrize(("template", "between"), [(None, "\n"), (TEMPLATE, "</s><user>")])
@pytest.mark.parametrize("ends", [True, False])
def test_the_end_of_an_answer_stands_there_as_the_template_has_it(tokenizer, template, between, ends):
    tokenizer.chat_template = template
    answer = tokenizer.encode(" integers", add_special_tokens=False) + [tokenizer.eos_token_id] * ends
    model = Model(answer, answer)
    conversation = Conversation(model, tokenizer, TextOptions())
    assert conversation.answer("A list of") == " integers"
    conversation.answer("Sorted")
    after = "</s><assistant>" if template else ""
    said = tokenizer.encode(f" integers{between}Sorted{after}", add_special_tokens=False)
    assert model.asked[1] == model.asked[0] + said
    assert conversation.token_ids == model.asked[1] + answer


def test_tokens_that_the_model_has_chosen_stay(tokenizer):
    """Though the tokenizer would write the same text in one: otherwise all after them would be computed again."""
    split = [tokenizer.convert_tokens_to_ids(letter) for letter in "list"]
    assert tokenizer.encode("list", add_special_tokens=False) != split
    model = Model(split, split)
    conversation = Conversation(model, tokenizer, TextOptions())
    conversation.answer("A ")
    conversation.answer("B")
    assert model.asked[1][: len(conversation.token_ids)][len(model.asked[0]) :][: len(split)] == split
    assert model.computed[1] == len(model.asked[1]) - len(model.asked[0]) - len(split) + 1


def test_a_line_without_tokens(tokenizer):
    with pytest.raises(ValueError, match="the line has no tokens: expected some text"):
        tokenizer.chat_template = "{{ '' }}"
        Conversation(Model(), tokenizer, TextOptions()).answer("nothing")


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_the_model_reads_a_system_prompt_where_there_is_one_and_a_template_for_it(tokenizer, template, system):
    tokenizer.chat_template = template
    model = Model(tokenizer.encode(" integers", add_special_tokens=False))
    conversation = Conversation(model, tokenizer, TextOptions())
    given = [{"role": "system", "content": system}] if system else []
    conversation.load(given)
    conversation.answer("A list of")
    text = "<user>A list of</s><assistant>" if template else "A list of"
    if template and system:
        text = f"<system>{system}</s>{text}"
    assert tokenizer.decode(model.asked[0]).removeprefix(tokenizer.bos_token or "") == text
    turns = [{"role": "user", "content": "A list of"}, {"role": "assistant", "content": " integers"}]
    assert conversation.messages == [*given, *turns]
