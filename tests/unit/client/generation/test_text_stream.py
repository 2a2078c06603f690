"""Text of tokens as they come, and stop strings."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swarm_client.generation.text_stream import StopStrings, TextStream
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate

TEXTS = ["return a list", "é 🦊🦊 e\u0301 — «x»", "  two  spaces\n\n\tdef f():", "日本語 한국어", "a"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(locate(DEFAULT_MODEL))


def sentencepiece() -> PreTrainedTokenizerBase:
    """One whose first token loses its space when it is decoded on its own, as Llama 2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: number for number, token in enumerate(["▁", "▁a", "▁list", "a", "b", "<unk>"])}
    raw = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


@pytest.mark.parametrize("text", TEXTS)
def test_parts_put_together_are_the_text_and_no_character_is_cut(tokenizer, text) -> None:
    for prompt in ("", "Return the"):
        context = tokenizer(prompt).input_ids
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = TextStream(tokenizer, context)
        parts = [stream.put(token) for token in ids]
        assert "".join(parts) == text and stream.end() == ""
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_a_space_between_prompt_and_text_stays() -> None:
    tokenizer = sentencepiece()
    stream = TextStream(tokenizer, [1])
    assert [stream.put(2), stream.put(4), stream.put(1)] == [" list", "b", " a"]


def test_special_tokens_have_no_text(tokenizer) -> None:
    first, second = tokenizer.encode("é", add_special_tokens=False)[-2:]
    stream = TextStream(tokenizer)
    assert [stream.put(token) for token in (tokenizer.eos_token_id, first, second)] == ["", "", "é"]


def test_half_a_character_at_the_end_is_told_as_such(tokenizer) -> None:
    half = tokenizer.encode("🦊", add_special_tokens=False)[:-1]
    stream = TextStream(tokenizer)
    assert [stream.put(token) for token in half] == [""] * len(half)
    assert set(stream.end()) == {"\N{REPLACEMENT CHARACTER}"}


def test_half_a_character_at_the_end_of_the_prompt_is_completed(tokenizer) -> None:
    ids = tokenizer.encode("a🦊", add_special_tokens=False)
    stream = TextStream(tokenizer, ids[:-1])
    assert stream.put(ids[-1]) == "🦊"


@pytest.mark.parametrize(
    ("parts", "stops", "said"),
    [
        (["a s", "to", "p b"], ["stop"], ["a ", "", ""]),
        (["a s", "to", "ry"], ["stop"], ["a ", "", "story"]),
        (["aaa", "b"], ["aab"], ["a", ""]),
        (["abab", "ac"], ["abac", "c"], ["ab", ""]),
        (["x stop y halt"], ["halt", "stop"], ["x "]),
        (["anything"], [], ["anything"]),
    ],
)
def test_stop_strings(parts, stops, said) -> None:
    matcher = StopStrings(stops)
    assert [matcher.put(part) for part in parts] == said
    assert bool(matcher.found) == any(stop in "".join(parts) for stop in stops) and matcher.end() == ""


def test_stop_strings_cut_where_find_does_however_the_text_comes() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        text = "".join(chance.choices("ab", k=12))
        stops = ["".join(chance.choices("ab", k=chance.randint(1, 5))) for _ in range(2)]
        cuts = sorted(chance.sample(range(13), 3))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, 12], strict=True)]
        matcher, said = StopStrings(stops), ""
        for part in parts:
            said += matcher.put(part)
            if matcher.found:
                break
        place = min((text.find(stop) for stop in stops if stop in text), default=len(text))
        # Of two stop strings the one that ends first is found first, though the other may begin before it.
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        if len(ends) < 2:
            assert (said if matcher.found else said + matcher.end()) == text[:place]
        assert not any(stop in said for stop in stops)
