"""Regular expressions of strangers, matched in time linear in the text.

Python's ``re`` tries one way after another, of which a short pattern can have 2**40. Here all ways are followed at once
(K. Thompson, "Regular expression search algorithm", 1968).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial

MAX_LENGTH = 1000  # of a pattern, in characters
MAX_NODES = 2000  # of the automaton, and before repetitions are written out
MAX_REPETITIONS = 100
MAX_GROUPS = 30  # inside one another

_ESCAPED_CLASS = r"\\[dDsSwW]"
_ESCAPED = r"\\[^\w\s]"
_TOKENS = re.compile(
    rf"(?P<one>{_ESCAPED_CLASS}|{_ESCAPED}|\[\^?(?:{_ESCAPED_CLASS}|{_ESCAPED}|[\w.,:/ -])+\]|[^\\\[\]{{}}()|*+?^$])"
    r"|(?P<repeat>(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})\??)"
    r"|(?P<open>\((?:\?:|(?!\?)))|(?P<close>\))|(?P<or>\|)|(?P<start>\^)|(?P<end>\$)"
)
_SUPPORTED = r"expected characters, . \d \w \s [a-z], ( ) | ^ $ and the repetitions * + ? {2,3}"


class Pattern:
    """What ``re.compile`` gives, for patterns without backreferences and assertions other than ``^`` and ``$``."""

    def __init__(self, text: str) -> None:
        """Raises ValueError if it is no such pattern, or a very large one."""
        if len(text) > MAX_LENGTH:
            raise ValueError(f"it has {len(text)} characters: expected at most {MAX_LENGTH}")
        self._automaton = _Automaton()
        self._first = _Parser(text, self._automaton).parse()
        self._step = lru_cache(maxsize=4096)(self._automaton.step)

    def match(self, text: str) -> bool:
        """Whether ``re.match`` finds it, at the beginning of the text."""
        automaton, length = self._automaton, len(text)
        ends = {length, length - 1} if text.endswith("\n") else {length}  # for "$"
        states = automaton.closure((self._first,), True, 0 in ends)
        for position, character in enumerate(text, 1):
            if _MATCHED in states or not states:
                break
            states = self._step(states, character, position in ends)
        return _MATCHED in states


_MATCHED = 0  # the state


class _Automaton:
    """States by number. Each either takes a character and leads to one other, or leads to others without one.

    Those that take none may do so at the start or the end of the text only.
    """

    def __init__(self) -> None:
        self._takes: list[re.Pattern[str] | None] = [None]
        self._leads_to: list[list[int]] = [[]]
        self._only_at: list[str] = [""]

    def add(self, leads_to: Iterable[int], takes: re.Pattern[str] | None = None, only_at: str = "") -> int:
        if len(self._takes) > MAX_NODES:
            raise ValueError(f"it repeats too much: expected at most {MAX_NODES} parts")
        self._takes.append(takes)
        self._leads_to.append(list(leads_to))
        self._only_at.append(only_at)
        return len(self._takes) - 1

    def lead(self, state: int, to: int) -> None:
        self._leads_to[state].append(to)

    def closure(self, states: Iterable[int], is_start: bool, is_end: bool) -> frozenset[int]:
        """The states that take a character, or are the last, which these lead to."""
        seen, rest = set(states), list(states)
        while rest:
            state = rest.pop()
            place = self._only_at[state]
            if self._takes[state] is None and (not place or (is_start if place == "^" else is_end)):
                new = [after for after in self._leads_to[state] if after not in seen]
                seen.update(new)
                rest += new
        return frozenset(state for state in seen if self._takes[state] is not None or state == _MATCHED)

    def step(self, states: frozenset[int], character: str, is_end: bool) -> frozenset[int]:
        after = set()
        for state in states:
            takes = self._takes[state]
            if takes is not None and takes.fullmatch(character):
                after.update(self._leads_to[state])
        return self.closure(after, False, is_end)


class _Parser:
    """Recursive descent; every part of the pattern becomes a function that adds it to the automaton, before a state."""

    def __init__(self, text: str, automaton: _Automaton) -> None:
        self._automaton = automaton
        self._tokens = list(_tokens(text))
        self._position = 0
        self._depth = 0
        self._built = 0

    def parse(self) -> int:
        """The automaton's first state."""
        node = self._alternatives()
        if self._position < len(self._tokens):
            raise ValueError("it closes a group that was not opened")
        return node(_MATCHED)

    def _alternatives(self) -> partial[int]:
        branches = [self._sequence()]
        while self._next_kind() == "or":
            self._position += 1
            branches.append(self._sequence())
        return partial(self._build_any, branches) if len(branches) > 1 else branches[0]

    def _sequence(self) -> partial[int]:
        parts: list[partial[int]] = []
        while (kind := self._next_kind()) not in ("or", "close", ""):
            text = self._tokens[self._position][1]
            self._position += 1
            if kind in ("start", "end"):
                parts.append(partial(self._build_place, text))
                continue
            if kind == "repeat":
                raise ValueError(f"it repeats nothing by {text}")
            part = self._group() if kind == "open" else partial(self._build_one, _one(text))
            if self._next_kind() == "repeat":
                part = partial(self._build_repeated, part, *_times(self._tokens[self._position][1]))
                self._position += 1
            parts.append(part)
        return partial(self._build_sequence, parts)

    def _group(self) -> partial[int]:
        self._depth += 1
        if self._depth > MAX_GROUPS:
            raise ValueError(f"it has more than {MAX_GROUPS} groups inside one another")
        node = self._alternatives()
        if self._next_kind() != "close":
            raise ValueError("it does not close a group")
        self._position += 1
        self._depth -= 1
        return node

    def _next_kind(self) -> str:
        return self._tokens[self._position][0] if self._position < len(self._tokens) else ""

    # ------------------------------------------------------------ building

    def _build_one(self, takes: re.Pattern[str], then: int) -> int:
        return self._automaton.add([then], takes)

    def _build_place(self, only_at: str, then: int) -> int:
        return self._automaton.add([then], only_at=only_at)

    def _build_sequence(self, parts: list[partial[int]], then: int) -> int:
        self._built += 1
        if self._built > MAX_NODES:  # empty groups add no states
            raise ValueError(f"it repeats too much: expected at most {MAX_NODES} parts")
        for part in reversed(parts):
            then = part(then)
        return then

    def _build_any(self, branches: list[partial[int]], then: int) -> int:
        return self._automaton.add([branch(then) for branch in branches])

    def _build_repeated(self, part: partial[int], least: int, most: int | None, then: int) -> int:
        if most is None:
            loop = self._automaton.add([then])
            self._automaton.lead(loop, part(loop))
            first = loop
        else:
            first = then
            for _ in range(most - least):
                first = self._automaton.add([part(first), then])
        for _ in range(least):
            first = part(first)
        return first


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = _TOKENS.match(text, position)
        if match is None or match.lastgroup is None:
            raise ValueError(f"{text[position:][:10]!r} in it is not supported: {_SUPPORTED}")
        yield match.lastgroup, match[0]
        position = match.end()


def _one(text: str) -> re.Pattern[str]:
    """What matches a single character is left to ``re``."""
    if "--" in text:  # which is to become a difference of sets
        raise ValueError(f"{text!r} in it is not supported: {_SUPPORTED}")
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} in it is wrong: {error.msg}") from None


def _times(text: str) -> tuple[int, int | None]:
    """How often at least, and at most if that is bounded; whether as few as possible makes no difference here."""
    text = text.removesuffix("?") or "?"
    if text in ("*", "+", "?"):
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[text]
    least, comma, most = text.strip("{}").partition(",")
    times = int(least), int(most or least) if most or not comma else None
    if max(times[0], times[1] or 0) > MAX_REPETITIONS or (times[1] is not None and times[1] < times[0]):
        raise ValueError(f"it has {text}: expected at most {MAX_REPETITIONS} repetitions")
    return times
