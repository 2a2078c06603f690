"""How often the swarm is shown."""

from __future__ import annotations

import pytest

from swarm_cli.commands.status import parse_interval


@pytest.mark.parametrize(("text", "seconds"), [("0.5", 0.5), ("2", 2.0), ("3600", 3600.0)])
def test_intervals(text, seconds):
    assert parse_interval(text) == seconds


@pytest.mark.parametrize("text", ["abc", "", "0", "0.49", "-1", "nan", "inf", "3601"])
def test_no_intervals(text):
    with pytest.raises(ValueError, match=rf"--watch is '{text}': expected a number of seconds from 0.5 to 3600"):
        parse_interval(text)
