"""A session that leaves the cache and comes back goes on as if it had stayed, whatever its blocks store."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_protocol.errors import PeerBusy
from swarm_protocol.net.shares import Caller
from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.admission.preemption import Claim
from swarm_server.blocks.blocks import BlockStack
from swarm_server.core.counters import Counters
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import Crop, RecordPast, Reorder
from swarm_server.kv.kv_cache import CacheBudget, NoRoom
from swarm_server.kv.offload import CHUNK_BYTES, KvOffload
from swarm_server.kv.prefix_cache import PrefixCache
from swarm_server.sessions.parking import Parking
from tests.families import UNLIKE
from tests.marks import always
from tests.simulated_devices import SimulatedDevices
from tests.unit.server.engine.test_devices import PLACEMENTS, split
from tests.unit.server.engine.test_engine import HOSTED, KINDS, PLENTY, Generation, advance
from tests.unit.support import TIMEOUT_S
from tests.zoo import HIDDEN, save_checkpoint

LENGTH = 3 * PAGE_TOKENS + 5


class Server:
    """An engine, its budget, and room outside of it."""

    def __init__(self, stack: BlockStack, offload: KvOffload | None = None, **options) -> None:
        self.offload = KvOffload(1 << 30) if offload is None else offload
        self.prefix_cache = PrefixCache(offload=self.offload)
        self.engine = Engine(stack, prefix_cache=self.prefix_cache, **options)
        self.budget = CacheBudget(PLENTY, 1)
        self.budget.reclaim_by(self.prefix_cache.reclaim)
        self.counters = Counters()
        self.scheduler = self

    def positions(self) -> dict[str, int]:
        """What was done with positions since the last call."""
        positions = self.engine.counters.positions
        found = {kind: count for kind, count in positions.items() if count}
        positions.clear()
        return found

    async def call(self, function: Callable[[], Any], _client: str = "") -> Any:
        return function()

    def forget_prefixes(self) -> None:
        """Evict every page, as if others had needed all the room."""
        while self.prefix_cache.reclaim():
            pass

    def parking(self, generation: Generation) -> Parking:
        services: Any = self
        session = generation.session
        return Parking(services, session, Claim(session.lease, (0.0, 0), Caller("anna")))


async def park(server: Server, parking: Parking, generation: Generation) -> None:
    """Park the session, and see that it takes no room."""
    assert await parking.park(lambda: True)
    server.forget_prefixes()
    assert generation.session.is_parked and generation.session.lease.charged == 0


@pytest.mark.parametrize("keeps_outputs", [True, False])
@pytest.mark.parametrize("family", always(*KINDS, among=UNLIKE))
async def test_the_session_goes_on(stack_of, family: str, keeps_outputs: bool) -> None:
    server = Server(stack_of(family))
    options = {"batch_size": 2, "padded": 3} if keeps_outputs else {}
    generation = Generation.open(server.engine, server.budget, keeps_outputs=keeps_outputs, **options)
    advance(server.engine, [generation], LENGTH)
    advance(server.engine, [generation], 1)
    parking = server.parking(generation)
    for num_tokens in (1, PAGE_TOKENS + 3, 1):
        await park(server, parking, generation)
        await parking.resume()
        server.positions()
        advance(server.engine, [generation], num_tokens)
        assert sum(server.positions().values()) == generation.session.batch_size * num_tokens
    if keeps_outputs:
        generation.check(server.engine.outputs(generation.session, 0, generation.session.length))
    assert server.counters.parked == {"parked": 3, "resumed": 3}
    parking.close()
    server.engine.close(generation.session)
    server.forget_prefixes()
    assert server.budget.bytes_left == PLENTY


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
async def test_blocks_on_accelerators(tmp_path: Path, family: str) -> None:
    """What leaves them lies on the CPU, and each channel returns to its device."""
    save_checkpoint(family, tmp_path)
    with SimulatedDevices():
        server = Server(split(tmp_path, PLACEMENTS["accelerators"]))
        generation = Generation.open(server.engine, server.budget)
        advance(server.engine, [generation], LENGTH)
        parking = server.parking(generation)
        await park(server, parking, generation)
        await parking.resume()
        advance(server.engine, [generation], 1)


async def test_int8_keys_and_values_come_back_as_they_were(stack_of) -> None:
    parked, stayed = Server(stack_of("llama"), kv_quant="int8"), Server(stack_of("llama"), kv_quant="int8")
    outputs = []
    for server in (parked, stayed):
        generation = Generation.open(server.engine, server.budget)
        server.engine.run([(generation.session, generation.step(LENGTH))])
        if server is parked:
            parking = server.parking(generation)
            await park(server, parking, generation)
            await parking.resume()
        outputs.append(server.engine.run([(generation.session, generation.step(1))])[0])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "lfm2", "qwen3_next"])
async def test_the_last_step_can_be_taken_back_afterwards(stack_of, family: str) -> None:
    server = Server(stack_of(family))
    generation = Generation.open(server.engine, server.budget, records_past=True)
    advance(server.engine, [generation], LENGTH)
    advance(server.engine, [generation], 1, RecordPast())
    advance(server.engine, [generation], 1)
    parking = server.parking(generation)
    await park(server, parking, generation)
    await parking.resume()
    advance(server.engine, [generation], 1, Crop(LENGTH + 1))


async def test_pages_of_a_prompt_that_others_have_sent_stay_shared(stack_of) -> None:
    """They are read back once, and found by a third session."""
    server = Server(stack_of("llama"))
    prompt = torch.randn(1, LENGTH, HIDDEN)
    first = Generation.open(server.engine, server.budget)
    server.engine.run([(first.session, first.step(0, hidden=prompt))])
    parking = server.parking(first)
    await park(server, parking, first)
    used = server.offload.used_bytes["memory"]
    await parking.resume()
    pages_bytes = 3 * PAGE_TOKENS * first.session.layout.size_bytes(1)
    assert server.offload.used_bytes["memory"] == pages_bytes < used, "what nobody else can use is gone"
    third = Generation.open(server.engine, server.budget, seed=3)
    server.positions()
    (output,) = server.engine.run([(third.session, third.step(0, hidden=prompt, num_wanted=1))])
    third.check(output, 1)
    assert server.positions() == {"prefill": 5, "reused": LENGTH - 5}


async def test_evicted_pages_are_read_back_instead_of_computed(stack_of, tmp_path: Path) -> None:
    offload = KvOffload(0, 64 * CHUNK_BYTES, tmp_path)
    server = Server(stack_of("mistral-sliding"), offload)
    prompt = torch.randn(1, LENGTH, HIDDEN)
    server.positions()
    for expected in ({"prefill": LENGTH}, {"prefill": 5, "reused": LENGTH - 5}, {"prefill": 5, "reused": LENGTH - 5}):
        generation = Generation.open(server.engine, server.budget)
        (output,) = server.engine.run([(generation.session, generation.step(0, hidden=prompt, num_wanted=1))])
        generation.check(output, 1)
        assert server.positions() == expected
        advance(server.engine, [generation], 1)
        server.positions()
        server.engine.close(generation.session)
        server.forget_prefixes()
    offload.close()


async def test_a_prompt_in_many_chunks_is_read_back_into_the_room_that_it_was_promised(stack_of) -> None:
    server = Server(stack_of("llama"))
    prompt = torch.randn(1, 8 * PAGE_TOKENS + 1, HIDDEN)
    first = Generation.open(server.engine, server.budget)
    server.engine.run([(first.session, first.step(0, hidden=prompt))])
    size_bytes = first.session.layout.size_bytes(prompt.shape[1])
    server.engine.close(first.session)
    server.forget_prefixes()
    tight = CacheBudget(size_bytes, 1)
    session = server.engine.open(HOSTED, 1, tight.lease("anna", size_bytes), reserved=prompt.shape[1])
    second = Generation(server.engine, session, first.mask[:, :0], prompt[:, :0], first.generator)
    server.positions()
    for chunk in prompt.split(PAGE_TOKENS, 1):
        is_last = chunk.shape[1] == 1
        (output,) = server.engine.run([(session, second.step(0, hidden=chunk, num_wanted=int(is_last)))])
    second.check(output, 1)
    positions = server.positions()
    assert positions["decode"] == 1 and positions["reused"] == 8 * PAGE_TOKENS
    assert len(session.state.rows[0].parts[0]) == 1, "in one place"


@pytest.mark.parametrize(("family", "chunk"), [("llama", 2 * PAGE_TOKENS), ("mistral-sliding", 3 * PAGE_TOKENS)])
async def test_a_batch_of_which_one_row_is_known_takes_no_more_room_than_it_was_promised(
    stack_of, family: str, chunk: int
) -> None:
    """Nothing is read back for it alone; the other, once it is known as well, is read back with it."""
    server = Server(stack_of(family))
    prompts = torch.randn(2, 15 * PAGE_TOKENS + 1, HIDDEN)
    for known, kind in ((prompts[:1], "prefill"), (prompts, "prefill"), (prompts, "reused")):
        size_bytes = len(known) * server.engine.layout_of(HOSTED, False).size_bytes(prompts.shape[1])
        budget = CacheBudget(size_bytes, 1)
        budget.reclaim_by(server.prefix_cache.reclaim)
        lease = budget.lease("anna", size_bytes)
        session = server.engine.open(HOSTED, len(known), lease, reserved=prompts.shape[1])
        mask, nothing = torch.ones(len(known), 0, dtype=torch.long), known[:, :0]
        generation = Generation(server.engine, session, mask, nothing, torch.Generator())
        server.positions()
        for piece in known.split(chunk, 1):
            is_last = generation.hidden.shape[1] + piece.shape[1] == prompts.shape[1]
            (output,) = server.engine.run([(session, generation.step(0, hidden=piece, num_wanted=int(is_last)))])
            assert isinstance(output, torch.Tensor), output
        generation.check(output, 1)
        positions = server.positions()
        assert (
            positions.get("prefill", 0) + positions.get("decode", 0) + positions.get("reused", 0)
            == known[..., 0].numel()
        )
        assert positions.get(kind, 0) > known[..., 0].numel() // 2, positions
        server.engine.close(session)
        server.forget_prefixes()


async def test_a_session_that_ends_while_it_comes_back_or_leaves_holds_nothing(stack_of) -> None:
    server = Server(stack_of("llama"))
    for leaves in (True, False):
        generation = Generation.open(server.engine, server.budget)
        advance(server.engine, [generation], LENGTH)
        parking = server.parking(generation)
        if not leaves:
            await park(server, parking, generation)
        moving = asyncio.ensure_future(parking.park(lambda: True) if leaves else parking.resume())
        await asyncio.sleep(0)
        parking.close()
        server.engine.close(generation.session)
        await asyncio.gather(moving, return_exceptions=True)
        server.forget_prefixes()
        del generation
        gc.collect()
        assert server.budget.bytes_left == PLENTY
        assert server.offload.can_hold(1 << 30, 1), "nothing is held"


class ClosedOnceRead:
    """A session that the compute thread closes as soon as another thread has read its state."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._generation.session, name)
        if name == "state" and threading.current_thread() is not threading.main_thread():
            self._generation.engine.close(self._generation.session)
        return value


async def test_a_session_that_is_closed_while_its_rows_are_cut_stays_as_if_it_had_been_closed_before(stack_of) -> None:
    server = Server(stack_of("llama"))
    generation = Generation.open(server.engine, server.budget)
    advance(server.engine, [generation], LENGTH)
    services: Any = server
    session: Any = ClosedOnceRead(generation)
    parking = Parking(services, session, Claim(session.lease, (0.0, 0), Caller("anna")))
    with pytest.raises(PeerBusy, match="the session has ended"):
        await parking.park(lambda: True)
    assert server.offload.can_hold(1 << 30, 1), "nothing is held"


async def test_a_session_that_shares_the_pages_of_another_is_parked(stack_of) -> None:
    server = Server(stack_of("llama"))
    prompt = torch.randn(1, LENGTH, HIDDEN)
    first, second = (Generation.open(server.engine, server.budget, seed=seed) for seed in (1, 2))
    for generation in (first, second):
        server.engine.run([(generation.session, generation.step(0, hidden=prompt, num_wanted=1))])
        generation.session.lease.release_unused()
    parking = server.parking(second)
    assert await parking.park(lambda: True)
    await parking.resume()
    for generation in (first, second):
        advance(server.engine, [generation], 1)


async def test_a_page_in_the_cache_behind_one_that_was_evicted_takes_no_room_for_nothing(stack_of) -> None:
    server = Server(stack_of("llama"))
    prompt = torch.randn(1, 4 * PAGE_TOKENS + 1, HIDDEN)
    first = Generation.open(server.engine, server.budget)
    server.engine.run([(first.session, first.step(0, hidden=prompt))])
    digests = first.session.state.digests[0]
    server.prefix_cache.touch([digests[0]])
    server.prefix_cache.touch([digests[3]])
    assert server.prefix_cache.reclaim() and server.prefix_cache.reclaim()  # the two in the middle
    second = Generation.open(server.engine, server.budget, seed=2, reserved=prompt.shape[1])
    server.positions()
    (output,) = server.engine.run([(second.session, second.step(0, hidden=prompt, num_wanted=1))])
    second.check(output, 1)
    assert server.positions() == {"reused": 3 * PAGE_TOKENS, "prefill": PAGE_TOKENS + 1}
    (last,) = {part.page for part in second.session.state.rows[0].parts[0][1:]}
    assert last.filled == [3 * PAGE_TOKENS + 1], "the rest goes on where the pages were read back to"


async def test_where_pages_cannot_be_read_back_the_row_goes_on_in_the_room_that_was_for_them(
    stack_of, monkeypatch
) -> None:
    server = Server(stack_of("llama"))
    prompt = torch.randn(1, 4 * PAGE_TOKENS + 1, HIDDEN)
    first = Generation.open(server.engine, server.budget)
    server.engine.run([(first.session, first.step(0, hidden=prompt))])
    server.engine.close(first.session)
    server.forget_prefixes()
    read_back, answers = server.prefix_cache.read_back, iter([True, True, False])
    monkeypatch.setattr(server.prefix_cache, "read_back", lambda digest: read_back(digest) if next(answers) else None)
    second = Generation.open(server.engine, server.budget, seed=2, reserved=prompt.shape[1])
    server.positions()
    (output,) = server.engine.run([(second.session, second.step(0, hidden=prompt, num_wanted=1))])
    second.check(output, 1)
    assert server.positions() == {"reused": 2 * PAGE_TOKENS, "prefill": 2 * PAGE_TOKENS + 1}
    (part,) = second.session.state.rows[0].parts[0]
    assert part.page.capacity == prompt.shape[1] and part.page.filled == [prompt.shape[1]]


async def test_sessions_leave_and_come_back_while_all_other_threads_are_busy(stack_of) -> None:
    server = Server(stack_of("llama"))
    generation = Generation.open(server.engine, server.budget)
    advance(server.engine, [generation], LENGTH)
    parking, gate = server.parking(generation), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        busy = asyncio.ensure_future(asyncio.to_thread(gate.wait))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await park(server, parking, generation)
                await parking.resume()
        finally:
            gate.set()
        await busy
    advance(server.engine, [generation], 1)


async def test_a_session_whose_rows_share_memory_stays(stack_of) -> None:
    """It would need more room when it came back than it gives."""
    server = Server(stack_of("llama"))
    beams = Generation.open(server.engine, server.budget)
    advance(server.engine, [beams], LENGTH)
    advance(server.engine, [beams], 1, Reorder((0, 0, 0)))
    assert not await server.parking(beams).park(lambda: True)
    advance(server.engine, [beams], 1)


@pytest.mark.parametrize("num_pieces", range(5))
async def test_a_session_that_is_wanted_meanwhile_stays(stack_of, monkeypatch, num_pieces: int) -> None:
    monkeypatch.setattr("swarm_server.sessions.parking._PIECES_AT_ONCE", 1)
    server = Server(stack_of("llama"))
    generation = Generation.open(server.engine, server.budget)
    advance(server.engine, [generation], LENGTH)
    answers = iter([True] * num_pieces + [False])
    assert not await server.parking(generation).park(lambda: next(answers))
    assert not generation.session.is_parked
    advance(server.engine, [generation], 1)
    server.offload.keep(b"other", 1 << 30, lambda: torch.empty(1 << 30, dtype=torch.uint8))
    assert b"other" in server.offload, "nothing is held any more"


async def test_a_session_for_which_there_is_no_room_outside_stays(stack_of) -> None:
    server = Server(stack_of("llama"), KvOffload(1000))
    generation = Generation.open(server.engine, server.budget)
    advance(server.engine, [generation], LENGTH)
    assert not await server.parking(generation).park(lambda: True)
    advance(server.engine, [generation], 1)
    assert server.offload.used_bytes["memory"] <= 1000


async def test_without_room_in_the_cache_it_stays_parked(stack_of) -> None:
    server = Server(stack_of("llama"))
    generation = Generation.open(server.engine, server.budget)
    advance(server.engine, [generation], LENGTH)
    parking = server.parking(generation)
    await park(server, parking, generation)
    lease = server.budget.lease("other", PLENTY - generation.session.layout.size_bytes(LENGTH) + 1)
    with pytest.raises(NoRoom):
        await parking.resume()
    assert generation.session.is_parked
    lease.close()
    await parking.resume()
    advance(server.engine, [generation], 1)


async def test_what_cannot_be_read_back_ends_the_session(stack_of, tmp_path: Path, monkeypatch) -> None:
    offload = KvOffload(0, 64 * CHUNK_BYTES, tmp_path)
    server = Server(stack_of("llama"), offload)
    generation = Generation.open(server.engine, server.budget)
    advance(server.engine, [generation], LENGTH)
    parking = server.parking(generation)
    await park(server, parking, generation)

    num_reads = itertools.count()

    def read(*_args: object) -> None:
        next(num_reads)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(offload._file, "read", read)
    with pytest.raises(NoRoom, match="could not be read back"):
        await parking.resume()
    assert parking._claim.is_preempted and generation.session.lease.charged == 0
    assert next(num_reads) == 1, "a disk that hangs is waited for once"
    parking.close()
    offload.close()
