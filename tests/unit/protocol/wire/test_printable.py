"""What strangers write stays on its line, and is never long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.errors import RequestRejected
from swarm_protocol.wire.printable import printable
from swarm_protocol.wire.status import from_status


@pytest.mark.parametrize("text", ["", "no room for 17 × 3 tokens: 5 are left…", "模型", "server …abc123 at [::1]:80"])
def test_what_can_be_read_is_unchanged(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n12:00:00 all is well", r"a\n12:00:00 all is well"),
        ("\x1b[2J\x07\r", r"\x1b[2J\x07\r"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\u2028\x85\x9b", r"\u2028\x85\x9b"),
        ("\ud800", r"\ud800"),
    ],
    ids=["line", "terminal", "direction", "other-lines", "surrogate"],
)
def test_what_cannot_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(("text", "shown"), [("x" * 11, "xxxxxxxxx…"), ("x" * 10, "x" * 10), ("\n" * 9, r"\n\n\n\n\…")])
def test_what_is_too_long_is_cut(text: str, shown: str) -> None:
    assert printable(text, 10) == shown


@given(st.text(st.characters(codec=None)), st.integers(1, 50))
def test_any_text(text: str, max_chars: int) -> None:
    shown = printable(text, max_chars)
    assert shown.isprintable() and len(shown) <= max_chars
    shown.encode()


def test_what_a_server_says_of_an_error_is_shown_that_way() -> None:
    error = from_status(3, "bad\n\x1b[31m" + "x" * 100_000)
    assert isinstance(error, RequestRejected) and str(error).isprintable() and len(str(error)) < 500
