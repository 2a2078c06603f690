"""A pseudo-terminal with a command of ours in it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pexpect

from tests.swarm.waiting import DEADLINE_S

CTRL_C, CTRL_D, ENTER, ALT_ENTER, UP = "\x03", "\x04", "\r", "\x1b\r", "\x1b[A"
_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """``python -m swarm_client ARGUMENTS`` for a user with these directories; a context manager, which ends it."""

    def __init__(self, *arguments: str, home: Path, module: str = "swarm_client", **environment: str) -> None:
        known = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "OMP_NUM_THREADS": "1"}
        known |= {"XDG_STATE_HOME": str(home / "state")}
        self._process = pexpect.spawn(
            sys.executable,
            ["-m", module, *arguments],
            env={**os.environ, **known, **environment},
            encoding="utf-8",
            timeout=DEADLINE_S,
            dimensions=(50, 200),
        )
        self._process.delaybeforesend = None

    def wait_for(self, pattern: Any) -> str:
        """What it has written up to there since the last time, without colours and the like."""
        self._process.expect(pattern)
        after = self._process.after if isinstance(self._process.after, str) else ""
        return _SEQUENCES.sub("", self._process.before + after)

    def wait_for_prompt(self) -> str:
        """Until it reads what is typed: it has turned bracketed paste on."""
        return self.wait_for(r"\x1b\[\?2004h(?:(?!\x1b\[\?2004l)[^>])*>")

    def type(self, keys: str) -> None:
        self._process.send(keys)

    def paste(self, text: str) -> None:
        self.type(f"\x1b[200~{text}\x1b[201~")

    def wait_for_end(self) -> str:
        return self.wait_for(pexpect.EOF)

    def end(self) -> int:
        """Its exit code, once it has ended."""
        if self._process.isalive():
            self.wait_for_end()
        self._process.close()
        return self._process.exitstatus if self._process.signalstatus is None else -self._process.signalstatus

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.close(force=True)
