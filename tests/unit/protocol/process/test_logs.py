"""``--log-format json``: each line an object."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys

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
