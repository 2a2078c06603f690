"""A process of ``swarm serve``, as tests start and end it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.swarm.waiting import DEADLINE_S


class ServeProcess:
    """``python -m swarm_client serve``. Attributes: url; pid."""

    def __init__(self, *arguments: str, directory: Path) -> None:
        self.log = directory / "serve.log"
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "swarm_client", "serve", "--port", "0", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=directory,  # where the models are
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
            )
        self.pid = self._process.pid
        lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=lambda: [*map(lines.put, self._process.stdout), lines.put("")])
        self._reader.start()
        first = lines.get(timeout=DEADLINE_S)
        assert first.startswith("serving on http://127.0.0.1:"), first + self.log.read_text()
        self.url = first.split()[-1]

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        if self._process.poll() is None:
            self._process.send_signal(number)
        code = self._process.wait(DEADLINE_S)
        self._reader.join()
        self._process.stdout.close()
        return code
