"""What is changed about hivemind."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from hivemind.dht.traverse import traverse_dht

from swarm_protocol.net.hivemind_parts import DHTID
from tests.marks import SLOW


def test_torch_shares_tensors_without_a_process_of_its_own() -> None:
    """As it does by itself on Linux; data sets that are streamed share their epoch so."""
    assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"


def test_a_cancelled_lookup_says_nothing_and_other_complaints_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    asked = asyncio.Event()

    async def never(node: DHTID, queries: Sequence[DHTID]) -> dict[DHTID, tuple[tuple[DHTID, ...], bool]]:
        asked.set()
        await asyncio.sleep(600)
        raise AssertionError

    async def scenario() -> None:
        nodes = [DHTID.generate() for _ in range(3)]
        lookup = asyncio.ensure_future(
            traverse_dht(nodes[:1], nodes, beam_size=3, num_workers=3, get_neighbors=never, queries_per_call=1)
        )
        await asked.wait()
        lookup.cancel()
        await asyncio.wait([lookup])
        del lookup
        await asyncio.sleep(0)
        gc.collect()

    gc.collect()  # what other tests have left may complain before
    with caplog.at_level(logging.ERROR, "asyncio"):
        asyncio.run(scenario())
        gc.collect()
        assert [record for record in caplog.records if "Event.wait" in record.getMessage()] == []
        logging.getLogger("asyncio").error("Task was destroyed but it is pending!\ntask: <Task coro=<something()>>")
        assert len([record for record in caplog.records if "something" in record.getMessage()]) == 1


@SLOW
def test_a_closing_daemon_says_nothing_to_whoever_only_trains() -> None:
    program = (
        "import swarm_training, logging; from swarm_training.run.training_run import TrainingRun; "
        "logging.getLogger('hivemind.p2p.p2p_daemon').error('error accepting connection')"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stderr == ""
