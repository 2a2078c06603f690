"""``--log-format json``: each line an object; and whose terminal it is."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from swarm_protocol.process.logs import FOREGROUND, is_in_foreground

SCRIPT = """
import argparse, logging, sys, warnings
from swarm_protocol.process.logs import log_event, say_error, shows_progress, start_logging
start_logging(argparse.Namespace(log_level=sys.argv[2], log_format=sys.argv[1]))
logger = logging.getLogger("a.b")
logger.debug("not shown")
logger.warning("%d\\nlines", 2)
log_event(logger, "ready", blocks="0:2", port=3)
warnings.warn("old")
try:
    raise KeyError("k")
except KeyError:
    logger.exception("failed")
say_error(ValueError("wrong"))
assert not shows_progress()
print("a result")
raise RuntimeError("uncaught")
"""


def run(log_format: str, level: str = "info") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", SCRIPT, log_format, level], capture_output=True, text=True)


def test_every_line_is_an_object():
    result = run("json")
    assert (result.returncode, result.stdout) == (1, "a result\n")
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    levels = [(line["level"], line["logger"]) for line in lines]
    assert levels == [
        *(("warning", "a.b"), ("info", "a.b"), ("warning", "py.warnings"), ("error", "a.b")),
        *(("error", "swarm"), ("critical", "swarm")),
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    assert lines[0]["message"] == "2\nlines"
    assert (lines[1]["message"], lines[1]["blocks"], lines[1]["port"]) == ("ready", "0:2", 3)
    assert "KeyError: 'k'" in lines[3]["exception"] and lines[3]["message"] == "failed"
    assert lines[4]["message"] == "wrong"
    assert "RuntimeError: uncaught" in lines[5]["exception"]


def test_lines_for_people():
    result = run("text", "warning")
    lines = result.stderr.splitlines()
    assert lines[:2] == ["2", "lines"] and "error: wrong" in lines
    assert "ready" not in lines
    assert logging.root.level == logging.WARNING  # of this process: nothing was started here


@pytest.mark.parametrize(
    ("group", "part_of", "expected"),
    [("own", None, True), ("shell", None, False), ("shell", "shell", True), ("other", "shell", False)],
)
def test_a_command_is_in_the_foreground_or_the_one_that_it_is_part_of(monkeypatch, group, part_of, expected):
    groups = {"own": os.getpgrp(), "shell": os.getpgrp() + 1, "other": os.getpgrp() + 2}
    monkeypatch.setattr("sys.stderr", SimpleNamespace(fileno=lambda: 2))
    monkeypatch.setattr("os.tcgetpgrp", lambda _descriptor: groups[group])
    monkeypatch.delenv(FOREGROUND, raising=False)
    if part_of:
        monkeypatch.setenv(FOREGROUND, str(groups[part_of]))
    assert is_in_foreground() is expected


def test_a_terminal_that_no_shell_controls_shows_the_command(monkeypatch):
    def fail(_descriptor):
        raise OSError("not the controlling terminal")

    monkeypatch.setattr("os.tcgetpgrp", fail)
    assert is_in_foreground()
