"""Regular expressions that cannot hang: they mean what they mean to ``re``, or are refused with a sentence."""

from __future__ import annotations

import pytest
import regex
from hypothesis import assume, given
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


@given(EXPRESSIONS, st.text("ab.1_-", max_size=8))
def test_it_matches_what_re_matches(expression: str, text: str) -> None:
    """``re`` itself would take hours for some of these, and no alarm ends that: Hypothesis tries the example again. The
    package ``regex`` means the same, and gives up in time."""
    try:
        expected = regex.match(expression, text, timeout=1.0)
    except TimeoutError:
        assume(False)
    assert Pattern(expression).match(text) == bool(expected)


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
        r"(\w|\d)*!",
    ],
)
@pytest.mark.parametrize("letter", "a1x")
def test_what_hangs_re_ends(expression: str, letter: str) -> None:
    """``re`` would take 2**40 steps and more."""
    assert not Pattern(expression).match(letter * 5000 + "?")


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        (r"(a)\1", r"'invalid escape sequence: \\\\1' \(expected RE2's syntax\)"),
        ("(?=a)a", r"'invalid perl operator: \(\?='"),
        ("(?<=a)b", r"'invalid perl operator: \(\?<"),
        ("(a", r"'missing \): \(a'"),
        ("a{1001}", r"'invalid repetition size: \{1001\}'"),
        ("((.{30}){30})" * 60, "'pattern too large - compile failed'"),
        ("a" * 1001, "has 1001 characters: expected at most 1000"),
        ("(" * 999, r"'missing \): \({49}' "),
        ("[\ud800", r"'missing ]: \[\?'"),
    ],
)
def test_what_is_refused(expression: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Pattern(expression)


@given(st.text(max_size=12) | st.text("()[]{}*+?|^$\\.a1,-:=!<P\n", max_size=12), st.text(st.characters(), max_size=6))
def test_anything_is_matched_or_refused_in_one_line(expression: str, text: str) -> None:
    try:
        assert Pattern(expression).match(text + "\ud800") in (True, False)
    except ValueError as error:
        assert "\n" not in str(error)
