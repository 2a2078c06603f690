"""A text is said to have too many tokens only if the tokenizer makes as many of it."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swarm_client.generation.fewest_tokens import FewestTokens

ALPHABET = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
WORDS = {"▁": 256, "a": 257, "▁a": 258, "aa": 259}
LONGEST = {
    "bytes": (Tokenizer(models.BPE(vocab=ALPHABET | {"aa": 256}, merges=[("a", "a")])), "aa"),
    "byte fallback": (
        Tokenizer(models.BPE(vocab=BYTES | WORDS, merges=[("▁", "a"), ("a", "a")], byte_fallback=True)),
        " a",
    ),
}
LONGEST["bytes"][0].pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LONGEST["bytes"][0].normalizer = normalizers.NFC()
LONGEST["byte fallback"][0].normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def lossy(name: str) -> Tokenizer:
    """Return a tokenizer whose tokens stand for more characters than they have."""
    if name == "unknown words":
        backend = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        return backend
    backend = Tokenizer(models.BPE(vocab={"a": 0, "Ġ": 1} if name == "unknown bytes" else ALPHABET, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "spaces beside a token":
        backend.add_special_tokens([AddedToken("<s>", lstrip=True)])
    elif name == "a part removed":
        removing = pre_tokenizers.Split(Regex(" +"), "removed")
        backend.pre_tokenizer = pre_tokenizers.Sequence([removing, backend.pre_tokenizer])
    elif name == "a pattern replaced":
        backend.normalizer = normalizers.Replace(Regex(" +"), " ")
    elif name == "ends stripped":
        backend.normalizer = normalizers.Strip()
    return backend


LOSSY = {
    "unknown words": "b" * 1000,
    "unknown bytes": "b" * 1000 + "a",
    "spaces beside a token": " " * 1000 + "<s>",
    "a part removed": " " * 1000 + "a",
    "a pattern replaced": " " * 1000,
    "ends stripped": " " * 1000,
}


@pytest.mark.parametrize("name", LONGEST)
def test_a_text_exceeds_what_its_longest_tokens_reach(name: str) -> None:
    backend, longest = LONGEST[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    bound = FewestTokens(tokenizer)
    size = max(map(len, tokenizer.get_vocab()))
    assert bound.exceeds(longest * 20 * size, 20)
    for seed in range(200):
        rng = random.Random(seed)
        text = "".join(rng.choices([longest, "a", " ", "e\u0301"], k=rng.randint(1, 60)))
        num_tokens = len(tokenizer(text, add_special_tokens=False).input_ids)
        assert not bound.exceeds(text, num_tokens), text


def test_it_is_counted_after_normalisation_which_joins_characters() -> None:
    backend = Tokenizer(models.BPE(vocab=ALPHABET | {"Ã©": 256}, merges=[("Ã", "©")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.normalizer = normalizers.NFC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = "e\u0301" * 30  # of two characters each, which become one of two bytes
    assert len(tokenizer(text).input_ids) == 30
    assert not FewestTokens(tokenizer).exceeds(text, 29)  # 30 characters, in tokens of up to two
    assert FewestTokens(tokenizer).exceeds(text, 14)


@pytest.mark.parametrize("name", LOSSY)
def test_nothing_is_known_of_tokenizers_that_leave_something_out(name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=lossy(name))
    assert len(tokenizer(LOSSY[name]).input_ids) <= 2
    assert not FewestTokens(tokenizer).exceeds(LOSSY[name], 2)
