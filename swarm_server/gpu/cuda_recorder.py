"""CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_WARM_UPS = 2  # calls: the first compiles kernels, and libraries take memory for themselves


class CudaRecorder:
    """Records graphs that share memory: no two are launched at the same time, and what is in it is not kept."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}

    def record(self, device: torch.device, compute: Callable[[], None]) -> Callable[[], None]:
        """See ``Recorder``.

        Raises:
            RuntimeError: ``compute`` waits for the GPU, so that it cannot be recorded.
        """
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    compute()
                if device not in self._pools:
                    with _waiting_is_an_error():  # a recording that fails leaves torch's allocator in disorder
                        compute()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may ask for memory meanwhile: only what this one asks for is recorded.
            with torch.cuda.graph(
                graph, pool=self._pools.get(device), stream=stream, capture_error_mode="thread_local"
            ):
                compute()
            self._pools[device] = graph.pool()

        def launch() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return launch


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    """Of the whole process: no other thread uses the GPU yet."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
