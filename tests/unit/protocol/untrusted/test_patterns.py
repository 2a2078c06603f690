"""Regular expressions that cannot hang: they mean what they mean to ``re``, or are refused with a sentence."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.untrusted.patterns import Pattern

CHARACTERS = [*"ab.1_", r"\.", r"\d", r"\w", r"\S", "[ab]", "[^a]", "[a-z1]", r"[\d.]", "."]
TIMES = ["", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "+?", "??", "{1,3}?"]


def repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds("{}{}".format, inner, st.sampled_from(TIMES))


def groups(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    sequences = st.lists(inner, max_size=3).map("".join)
    branches = st.lists(sequences, min_size=1, max_size=3).map("|".join)
    return repeated(st.builds("{}{})".format, st.sampled_from(["(", "(?:"]), branches))


PIECES = st.recursive(repeated(st.sampled_from(CHARACTERS)), groups, max_leaves=6)
EXPRESSIONS = st.lists(PIECES | st.sampled_from(["^", "$", "|"]), max_size=5).map("".join)


@given(EXPRESSIONS, st.text("ab.1_\n-é", max_size=8))
def test_it_matches_what_re_matches(expression: str, text: str) -> None:
    assert Pattern(expression).match(text) == bool(re.match(expression, text))


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+$",
        "(a|a)*$",
        "(a|aa)+$",
        "(.*)*y",
        "((a*)*)*b",
        "(a?){40}a{40}b",
        "(.*.*)*.*.*=x",
        "(x+x+)+y",
        "(\\w|\\d)*!",
    ],
)
@pytest.mark.parametrize("text", ["a" * 5000, "1" * 5000, "x" * 5000])
def test_each_character_is_looked_at_once(expression: str, text: str) -> None:
    """``re`` would take 2**40 steps and more."""
    pattern = Pattern(expression)
    assert not pattern.match(text + "?")
    steps = pattern._step.cache_info()
    assert steps.hits + steps.misses <= len(text) + 1


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        (r"(a)\1", r"'\\\\1' in it is not supported: expected characters"),
        ("(?=a)a", "in it is not supported"),
        ("(?!a)b", "in it is not supported"),
        ("(?<=a)b", "in it is not supported"),
        ("(?P<name>a)", "in it is not supported"),
        ("(?i)a", "in it is not supported"),
        (r"\bword", "in it is not supported"),
        (r"\x41", "in it is not supported"),
        ("a++", r"repeats nothing by \+"),
        ("a*+", r"repeats nothing by \+"),
        ("*a", r"repeats nothing by \*"),
        ("^*", r"repeats nothing by \*"),
        ("a{2}{3}", r"repeats nothing by \{3\}"),
        ("a{3,2}", r"has \{3,2\}: expected at most 100 repetitions"),
        ("a{101}", r"has \{101\}: expected at most 100 repetitions"),
        ("a{1000}", "in it is not supported"),
        ("(a", "does not close a group"),
        ("a)", "closes a group that was not opened"),
        ("[a", "in it is not supported"),
        ("[z-a]", "'\\[z-a\\]' in it is wrong: bad character range"),
        ("[a--b]", "in it is not supported"),
        ("[]]", "in it is not supported"),
        ("[[a]", "in it is not supported"),
        ("a\\", "in it is not supported"),
        ("a" * 1001, "has 1001 characters: expected at most 1000"),
        ("(((a{100}){100}){100}){100}", "repeats too much"),
        ("(((){100}){100}){100}", "repeats too much"),
        ("((((a|b){100}|c){100}){100})", "repeats too much"),
        ("(" * 31 + ")" * 31, "more than 30 groups inside one another"),
    ],
)
def test_what_is_refused(expression: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Pattern(expression)


@given(st.text("()[]{}*+?|^$\\.a1,-:=!<P\n", max_size=12), st.text("a1.\n", max_size=6))
def test_anything_is_matched_as_re_does_or_refused(expression: str, text: str) -> None:
    try:
        pattern = Pattern(expression)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    assert pattern.match(text) == bool(re.match(expression, text))
