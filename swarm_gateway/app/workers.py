"""The worker processes of ``swarm serve --workers N``, as their parent process runs them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from pathlib import Path

from swarm_gateway.app.worker_share import WorkerShare
from swarm_gateway.limits.admission import LocalAdmission
from swarm_gateway.limits.remote_admission import AdmissionService
from swarm_gateway.web.metrics import SHARED_FILES
from swarm_protocol.errors import SwarmError
from swarm_protocol.failures import undone_on_error
from swarm_protocol.process import signals
from swarm_protocol.process.logs import FOREGROUND
from swarm_protocol.process.routine import end_tasks

_LEAVE_S = 25.0  # the time for a worker to end: answers get 5 s, then it leaves the swarm
_RESTART_S = 1.0  # before a worker takes the place of one that has ended
_RETRY_S = 10.0  # the same if the one before has never been ready
_logger = logging.getLogger(__name__)


class WorkerPool:
    """The workers of a gateway, in the parent process. A worker that has ended is replaced by another one."""

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        admission: LocalAdmission,
        listener: socket.socket,
        directory: Path,
    ) -> None:
        """Prepare to run ``command`` in each worker. The pool closes ``listener`` when it ends."""
        self._command, self._num_workers = command, num_workers
        self._admission, self._listener, self._directory = admission, listener, directory
        self._processes: dict[int, Process] = {}  # by the worker's number
        self._ready: set[int] = set()
        self._first_is_ready, self._ending = asyncio.Event(), asyncio.Event()
        self._has_greeted = False

    async def run(self) -> int:
        """Run the workers until a signal, which is the normal end, and end them. Return the exit code.

        Raises:
            SwarmError: a worker was ended from outside before all workers were ready.
        """
        for number in signals.all_ending_signals():
            signals.call_on_signal(number, self._end)
        # Workers inherit this: they are in the background of the terminal to which they write.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        ending = asyncio.create_task(self._ending.wait())
        tasks = [asyncio.create_task(self._keep(number)) for number in range(self._num_workers)]
        try:
            done, _ = await asyncio.wait([ending, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._listener.close()
            await end_tasks([ending, *tasks])
        if self._ending.is_set():
            return 0
        code: int = done.pop().result()
        if code <= 0:
            raise SwarmError(f"a worker {signals.exit_in_words(code)} before all were ready")
        return code  # the worker has said why

    def _end(self, _number: signal.Signals) -> None:
        if self._ending.is_set():  # the second signal
            for process in self._processes.values():
                if process.returncode is None:
                    process.kill()
        self._ending.set()

    async def _keep(self, number: int) -> int:
        """Run a worker, and others after it, until one ends before all workers were ready; return its exit code."""
        if number:  # the first one finds errors, and downloads what all need
            await self._first_is_ready.wait()
        while True:
            try:
                code = await self._run_worker(number)
            except OSError as error:  # such as too many processes or open files
                if not self._has_greeted:
                    raise
                _logger.warning("worker %d cannot be started at present: %s", number, error)
            else:
                if not self._has_greeted:
                    return code
                _logger.warning("worker %d %s: another one is started", number, signals.exit_in_words(code))
            await asyncio.sleep(_RESTART_S if number in self._ready else _RETRY_S)

    async def _run_worker(self, number: int) -> int:
        """Run one worker to its end, and end it if this task is cancelled. Return its exit code.

        Raise OSError if it cannot be started.
        """
        self._ready.discard(number)
        ours, theirs = socket.socketpair()
        with theirs, undone_on_error(ours.close):
            descriptors = self._listener.fileno(), theirs.fileno()
            share = WorkerShare(number, *descriptors, str(self._directory))
            # Signals of a terminal reach the parent alone, which ends the workers.
            process = self._processes[number] = await asyncio.create_subprocess_exec(
                *self._command, stdin=DEVNULL, pass_fds=descriptors, process_group=0, env=self._environment(share)
            )
        service = AdmissionService(self._admission, ours, lambda greeting: self._take_ready(number, greeting))
        serving = asyncio.create_task(service.serve())
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                await _end_process(process)
            await end_tasks([serving])  # others get its places

    def _environment(self, share: WorkerShare) -> dict[str, str]:
        threads = str(max(1, (os.cpu_count() or 1) // self._num_workers))
        defaults = {"OMP_NUM_THREADS": threads, FOREGROUND: str(os.getpgrp())}
        return defaults | os.environ | share.environment() | {SHARED_FILES: str(self._directory)}

    def _take_ready(self, number: int, greeting: Sequence[str]) -> None:
        self._ready.add(number)
        self._first_is_ready.set()
        if len(self._ready) == self._num_workers and not self._has_greeted:
            self._has_greeted = True
            print(*greeting, sep="\n", flush=True)


async def _end_process(process: Process) -> None:
    """Ask a process to end, and kill it if that takes too long."""
    process.terminate()
    try:
        async with asyncio.timeout(_LEAVE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
