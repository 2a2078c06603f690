"""The tier of end-to-end tests that `make test` runs stays small: one test or two for each promise of the README."""

from __future__ import annotations

import re
from collections import Counter

from tests.conftest import END_TO_END, TESTS

_MARK = re.compile(r'mark\.promise\(\s*"([^"]*)"')
_MOST = 4  # in one module


def test_promises_are_few_and_each_says_another_thing() -> None:
    texts: Counter[str] = Counter()
    for folder in END_TO_END:
        for path in (TESTS / folder).rglob("test_*.py"):
            found = _MARK.findall(path.read_text())
            assert len(found) <= _MOST, f"{path.name} stands for {len(found)} promises: mark the others as slow"
            texts.update(found)
    assert len(texts) >= 30
    assert [text for text, number in texts.items() if number > 1 or len(text.split()) < 4] == []
