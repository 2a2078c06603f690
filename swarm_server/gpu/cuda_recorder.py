"""A recorder of CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from swarm_protocol.failures import undone_on_error

_WARM_UPS = 2  # calls: the first compiles kernels and lets libraries allocate memory


class CudaRecorder:
    """A recorder of graphs that share memory: no two run at the same time, and the memory's content is not kept.

    Only recordings on one stream share memory, so there is one stream for each device.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pools: dict[torch.device, Any] = {}
        self._failure: str | None = None  # a failed recording leaves torch's allocator in disorder

    def record(self, device: torch.device, compute: Callable[[], None]) -> Callable[[], None]:
        """Call ``compute``, which uses tensors at fixed addresses; return a call that does the same without Python.

        Raises:
            RuntimeError: ``compute`` synchronises with the GPU and cannot be recorded, or an earlier recording failed.
        """
        if self._failure is not None:
            raise RuntimeError(f"an earlier recording has failed: {self._failure}")
        with torch.cuda.device(device):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream()
            current, stream = torch.cuda.current_stream(), self._streams[device]
            stream.wait_stream(current)
            with undone_on_error(partial(_leave, stream, current)):  # ``compute`` is a model family's code
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        compute()
                    if device not in self._pools:  # a synchronisation while recording would put torch in disorder
                        with _synchronising_raises():
                            compute()
                current.wait_stream(stream)
                graph = self._recorded(device, stream, compute)

        def launch() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return launch

    def _recorded(
        self, device: torch.device, stream: torch.cuda.Stream, compute: Callable[[], None]
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory meanwhile: only this thread's allocations are recorded.
        recording = torch.cuda.graph(
            graph, pool=self._pools.get(device), stream=stream, capture_error_mode="thread_local"
        )
        try:
            with recording:
                compute()
        except BaseException as error:  # any failure makes later recordings fail; it is raised again
            self._failure = f"{type(error).__name__}: {error}"
            raise
        self._pools[device] = graph.pool()
        return graph


def _leave(failed: torch.cuda.Stream, current: torch.cuda.Stream) -> None:
    """Work on the current stream again after a recording that has failed."""
    torch.cuda.set_stream(current)  # a failed recording does not do this
    with suppress(RuntimeError):
        failed.synchronize()  # before the memory that it works on is freed


@contextmanager
def _synchronising_raises() -> Iterator[None]:
    """Make synchronising an error in the whole process, for the first graph of a device when a server starts."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
