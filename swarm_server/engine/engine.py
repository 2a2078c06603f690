"""The engine, which computes steps of many sessions in one batch."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Protocol

import torch
from transformers.cache_utils import LinearAttentionLayer

from swarm_models.kernels.int8_linear import Int8Weight
from swarm_models.kernels.quantized_linear import QuantizedLinear
from swarm_protocol.errors import PeerBusy, RequestRejected
from swarm_protocol.failures import undone_on_error
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter
from swarm_protocol.wire.block_input import ACROSS_WINDOWS, BlockInput
from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.adapters.lora import AdapterRows, Patches, PlacedAdapter, adapter_of_all, shares_of
from swarm_server.adapters.targets import require_fit
from swarm_server.blocks.recording import all_finite_together, require_finite
from swarm_server.blocks.split_stack import Stack
from swarm_server.core.counters import Counters
from swarm_server.engine.batch import (
    Prepared,
    adapter_order,
    batch_joined,
    batch_mask,
    batch_positions,
    block_runs,
    positions_seen,
)
from swarm_server.engine.content import followed, followed_by_one, hashed, hiding, same_mask
from swarm_server.engine.session_state import (
    BatchEntry,
    HistoryChange,
    KvState,
    NextPositions,
    Outcome,
    Results,
    Session,
    SessionStep,
    changed,
    cropped,
    forgotten,
)
from swarm_server.engine.token_by_token import can_go_on, tokens_of
from swarm_server.engine.ways import Ways, fastest_ways, steps_of_two_lengths
from swarm_server.gpu.copies import moved
from swarm_server.kv.kv_cache import Lease
from swarm_server.kv.kv_layout import StackLayout
from swarm_server.kv.kv_rows import Growth, KvRow, PageLayout, grow, grown_in_place
from swarm_server.kv.kv_transfer import Stored, pack, read, unpack
from swarm_server.kv.prefix_cache import PrefixCache, next_contents
from swarm_server.kv.row_states import CPU, RowStates, RowStatesRoom, Slot, state_layers, states_after
from swarm_server.kv.rows_cache import BlockRuns, RowsCache, attention_in_place
from swarm_server.training.stateless import StatelessPasses


class BatchMeter(Protocol):
    """A recorder of every batch: its number of blocks, rows and new tokens, and how long it took."""

    def add(self, num_blocks: int, num_rows: int, num_tokens: int, seconds: float, num_sessions: int) -> None: ...


class Engine:
    """The hosted blocks and the sessions' steps through them. An engine runs on the compute thread only.

    Hidden states come in and go out on the CPU. The outputs have the dtype of the inputs.

    Attributes:
        stateless: passes through the same blocks without a session.
        counters: counts of the positions that steps compute, of blocks and of batch rows.
        ways: how batches are computed.
    """

    def __init__(self, stack: Stack, *, prefix_cache: PrefixCache | None = None, kv_quant: str = "none") -> None:
        """Try the ways of computing. ``kv_quant``: how keys and values are stored, see ``ServerConfig``."""
        self._stack = stack
        self.layout = StackLayout.probe(stack, in_int8=kv_quant == "int8")
        self.prefix_cache = prefix_cache
        self.meter: BatchMeter | None = None
        self.counters = Counters()
        for index in stack.span:
            stack.original(index).register_forward_hook(lambda *_call: self.counters.run_block())
        self._patches = Patches(stack)
        self.stateless = StatelessPasses(stack, self._patches)
        self._token_by_token = False  # until all ways have been tried by steps
        self._layouts: dict[tuple[Span, bool, bool], PageLayout] = {}
        self.ways = Ways()
        self.ways = fastest_ways(stack, self.layout, self._try_rows)
        self._token_by_token = self.layout.has_states and not can_go_on(self)

    def report_to(self, meter: BatchMeter, counters: Counters) -> None:
        """Report all work to these from now on."""
        self.meter, self.counters = meter, counters
        self.stateless.report_to(counters)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Return the devices of the blocks, in block order."""
        return self._stack.devices

    @property
    def hidden_size(self) -> int:
        return self._stack.hidden_size

    @property
    def int8_weights(self) -> list[Int8Weight]:
        layers = (module for module in self._stack.modules() if isinstance(module, QuantizedLinear))
        return [layer.quantized for layer in layers if isinstance(layer.quantized, Int8Weight)]

    @property
    def mixes_rows(self) -> bool:
        """Return whether sessions of different lengths may share a batch, and a prompt may come in chunks."""
        return self._stack.row_independent

    @property
    def chunks_prompts(self) -> bool:
        """Return whether a prompt in chunks takes about as long as in one piece, and gives the same outputs."""
        return self.mixes_rows and not self._token_by_token

    def place(self, key: bytes, adapter: Adapter) -> PlacedAdapter:
        """Return an adapter ready for use. Any thread may call this method.

        Raises:
            RequestRejected: the adapter does not fit the blocks.
        """
        require_fit(adapter, self._stack.span, self.hidden_size, self._stack.original)
        return PlacedAdapter.of(key, adapter.moved(self._stack.device_of))

    # ------------------------------------------------------------ sessions

    def layout_of(self, blocks: Span, keeps_outputs: bool) -> PageLayout:
        """Return the layout of what a session over ``blocks`` stores; one object for all such sessions."""
        key = blocks, keeps_outputs, self.ways.in_place
        if key not in self._layouts:
            self._layouts[key] = self.layout.part(blocks, keeps_outputs, windows=self.ways.in_place)
        return self._layouts[key]

    def open(
        self,
        blocks: Span,
        batch_size: int,
        lease: Lease,
        *,
        reserved: int = 0,
        keeps_outputs: bool = False,
        records_past: bool = False,
        shares: bool = True,
        owner: str = "",
        adapter: PlacedAdapter | None = None,
    ) -> Session:
        """Return a new session without positions.

        Args:
            reserved: how many positions per row the lease promises.
            keeps_outputs: whether the outputs of the last block are stored as well, so that they can be sent again.
            records_past: whether sliding windows keep what a later crop needs (see RecordPast).
            shares: whether the session shares equal beginnings with other sessions, if there is a prefix cache.
            owner: the peer id of the client; the prefix cache says whether different owners share.
        """
        layout = self.layout_of(blocks, keeps_outputs)
        state = KvState((KvRow.empty(layout),) * batch_size, settled=0 if records_past else None)
        if shares and self.prefix_cache is not None and not layout.slots:  # states are not known page by page
            adapter_key = b"" if adapter is None else adapter.key
            seed = self.prefix_cache.seed(owner, f"{blocks} {keeps_outputs}", adapter_key)
            state = replace(state, hashes=(seed,) * batch_size, digests=((),) * batch_size)
        return Session(blocks, layout, lease, reserved, state, adapter)

    def close(self, session: Session) -> None:
        """Give back the session's room."""
        rows = session.state.rows
        session.come_back(KvState(()))
        _give_up(session, rows)

    def park(self, session: Session) -> None:
        """Give back the room of a session whose positions are stored elsewhere, until ``resume``."""
        rows = session.state.rows
        session.leave(replace(session.state, rows=tuple(row.without_parts for row in rows), states=None))
        _give_up(session, rows)
        session.forget_promise()

    def resume(self, session: Session, rows: tuple[KvRow, ...], states: RowStates | None, num_pages: int) -> None:
        """Go on with a parked session, whose positions are in ``rows``; the first ``num_pages`` pages may be shared."""
        if not session.is_parked:  # it was closed meanwhile
            return
        state = replace(session.state, rows=rows, states=states)
        session.come_back(state)
        if num_pages:
            self._add_pages(replace(state, digests=tuple(digests[:num_pages] for digests in state.digests)), 0)

    def run(self, batch: Sequence[BatchEntry]) -> list[Results]:
        """Compute one step of each session, in one batch; all steps must have equally many new positions.

        A session whose step fails is unchanged.

        Returns:
            For each step, the hidden states after the session's last block, [batch, tokens, hidden_size], with the
            additions that later blocks need (see ``BlockInput.stacked``). For a step with ``every_block``, the hidden
            states after every block, [blocks, batch, tokens, hidden_size]. For a refused step, its error:
            RequestRejected or PeerBusy. For next positions, one tensor [sessions, 1, hidden_size], or a list with the
            outcome of each session if some are refused.
        """
        if not self._token_by_token:
            return self._run(batch)
        longer = [isinstance(work, tuple) and _is_longer(work[1]) for work in batch]
        if not any(longer):
            return self._run(batch)
        together = iter(self._run([work for work, is_longer in zip(batch, longer, strict=True) if not is_longer]))
        return [
            self._run_tokens(*work) if isinstance(work, tuple) and is_longer else next(together)
            for work, is_longer in zip(batch, longer, strict=True)
        ]

    def _run_tokens(self, session: Session, step: SessionStep) -> torch.Tensor | Exception:
        """Compute a step one position at a time; the session is unchanged if the step fails."""
        states = None
        outputs: list[torch.Tensor] = []
        try:
            with session.unchanged_on_error():
                for token in tokens_of(step):
                    (output,) = self._run([(session, token)])
                    if isinstance(output, Exception):
                        raise output
                    assert isinstance(output, torch.Tensor)
                    assert session.state.states is not None  # only blocks with states are computed token by token
                    states = session.state.states.before if not outputs else states  # those before the whole step
                    outputs.append(output)
        except (RequestRejected, PeerBusy) as error:
            return error.with_traceback(None)
        assert session.state.states is not None
        session.enter(replace(session.state, states=replace(session.state.states, before=states)))
        return torch.cat(outputs, -2)

    def _run(self, batch: Sequence[BatchEntry]) -> list[Results]:
        outcomes: list[list[tuple[Sequence[int], Prepared | Exception]]] = []
        prepared: list[Prepared] = []
        start_s = time.perf_counter()
        with torch.inference_mode():
            with undone_on_error(lambda: _give_room_back(prepared)):
                is_finite = all_finite_together(
                    [(work[1] if isinstance(work, tuple) else work).inputs for work in batch]
                )
                for work in batch:
                    outcomes.append([])
                    for members, found in self._prepare(work, is_finite):
                        outcomes[-1].append((members, found))
                        if isinstance(found, Prepared):
                            prepared.append(found)
                outputs = self._compute([work for work in prepared if work.growth])
            committed = [self._commit(work, next(outputs) if work.growth else None) for work in prepared]
            dtypes = [work.step.inputs.hidden.dtype for work in prepared]
            finished = iter(moved(committed, [CPU] * len(committed), dtypes))
        self._tell_meter(prepared, time.perf_counter() - start_s)
        self._count(prepared)
        return [
            _results([(members, next(finished) if isinstance(found, Prepared) else found) for members, found in each])
            for each in outcomes
        ]

    def _tell_meter(self, batch: Collection[Prepared], seconds: float) -> None:
        computed = [work for work in batch if work.growth]
        if self.meter is not None and computed:
            num_tokens = computed[0].step.inputs.hidden.shape[1] - computed[0].num_matched
            num_blocks = max(len(work.session.blocks) for work in computed)
            num_rows = sum(work.num_rows for work in computed)
            num_sessions = sum(len(work.sessions) for work in computed)
            self.meter.add(num_blocks, num_rows, num_tokens, seconds, num_sessions)

    def _count(self, batch: Collection[Prepared]) -> None:
        num_rows, reused = 0, 0
        computed, block_positions = {"decode": 0, "prefill": 0}, {"decode": 0, "prefill": 0}
        for work in batch:
            num_tokens, rows = work.step.inputs.hidden.shape[1], work.num_rows
            reused += rows * work.num_matched
            if work.growth:
                kind, positions = "decode" if num_tokens == 1 else "prefill", rows * (num_tokens - work.num_matched)
                computed[kind] += positions
                block_positions[kind] += positions * len(work.session.blocks)
                num_rows += rows
        self.counters.positions.update(computed, reused=reused)
        self.counters.block_positions.update(block_positions)
        if num_rows:
            self.counters.batch_rows.add(num_rows)

    def _prepare(
        self, work: BatchEntry, is_finite: bool
    ) -> Iterator[tuple[Sequence[int], Prepared | RequestRejected | PeerBusy]]:
        """Yield each step that is computed as one, or the error of a session, after the numbers of its sessions.

        ``is_finite``: all hidden states are finite; otherwise each step's are checked.
        """
        positions = NextPositions.of(*work) if isinstance(work, tuple) else work
        steps: Iterable[tuple[int, Session, SessionStep]]
        if positions is None:
            assert isinstance(work, tuple)
            steps = [(0, *work)]
        else:
            left: Sequence[int] = range(len(positions))
            if is_finite:
                alike, left = self._grown_alike(positions)
                yield from alike
            steps = ((number, positions.sessions[number], positions.step(number)) for number in left)
        for number, session, step in steps:
            try:
                if not is_finite:  # perhaps because of another step
                    require_finite(step.inputs.stacked, "hidden states")
                found: Prepared | RequestRejected | PeerBusy = self._prepare_step(session, step)
            except (RequestRejected, PeerBusy) as error:
                found = error.with_traceback(None)  # its frames would keep the batch in memory
            yield (number,), found

    def _grown_alike(self, positions: NextPositions) -> tuple[list[tuple[list[int], Prepared]], list[int]]:
        """Prepare the sessions that have room where they end, as nearly all have. Those that are alike become one step.

        Return each prepared step with the numbers of its sessions, then the numbers of the sessions that are left.
        """
        contents = [b""] * len(positions)
        if self.prefix_cache is not None:
            contents = next_contents(positions.hidden, positions.starts)
        alike: dict[tuple[object, ...], tuple[list[int], list[KvState], Growth]] = {}
        left: list[int] = []

        def undo() -> None:
            for _, _, growth in alike.values():
                growth.undo()

        with undone_on_error(undo):
            members = zip(positions.sessions, positions.starts, contents, strict=True)
            for number, (session, start, content) in enumerate(members):
                state, layout, adapter = session.state, session.layout, session.adapter
                if len(state.rows) != 1 or state.rows[0].length != start or layout.slots or state.mask is not None:
                    left.append(number)
                    continue
                # Prompts of adapters are added to the first positions only.
                kind = id(layout), adapter, 0 if adapter is None else min(start, adapter.num_positions)
                if kind not in alike:
                    alike[kind] = [], [], Growth(())
                numbers, states, growth = alike[kind]
                row = grown_in_place(state.rows[0], 1, layout, session.lease, growth)
                if row is None:
                    left.append(number)
                    continue
                numbers.append(number)
                states.append(followed_by_one(state, row, content))
        return [(made[0], _together(positions, *made)) for made in alike.values() if made[0]], left

    def _prepare_step(self, session: Session, step: SessionStep) -> Prepared:
        session.require_present()
        state = session.state
        if step.changes:
            state = hashed(state)
        for change in step.changes:
            state = changed(state, change, session.layout)
        state = cropped(state, step.start, session.layout)
        batch_size, num_tokens, _ = step.inputs.hidden.shape
        if batch_size != len(state.rows):
            raise RequestRejected(f"hidden states of {batch_size} rows came for a session of {len(state.rows)} rows")
        if session.layout.slots:
            state = self._with_states(state, session)
        state, num_matched = self._match(state, step, session)
        growth = None
        if num_matched < num_tokens:
            growth = grow(
                session.state.rows,
                state.rows,
                num_tokens - num_matched,
                session.layout,
                session.lease,
                reserved=session.reserved,
                settled=state.settled,
            )
            state = replace(state, rows=growth.rows)
        return Prepared([session], step, [state], [state.length] * batch_size, num_matched, growth)

    def _with_states(self, state: KvState, session: Session) -> KvState:
        """Return ``state`` with the states before the next step, and with room for the states after it.

        Raises:
            RequestRejected: the states before the step are not known.
        """
        if state.length and state.states is None:
            if session.state.states is None:
                raise RequestRejected(f"the states after {state.length} positions have not come here")
            raise RequestRejected(
                f"{session.length} positions cannot be cropped to {state.length}: "
                "what has been added to a recurrent state cannot be taken out of it"
            )
        num_rows, states = len(state.rows), state.states
        if states is None:
            room = RowStatesRoom(num_rows, session.layout.state_bytes, session.lease)
            return replace(state, states=RowStates(0, (), room))
        if states.room.num_rows == num_rows:
            return state
        room = RowStatesRoom(num_rows, session.layout.state_bytes, session.lease)
        return replace(state, states=replace(states, room=room))

    def _match(self, state: KvState, step: SessionStep, session: Session) -> tuple[KvState, int]:
        """Add the step to the content hashes. Return the new state, and how many of the step's positions it has."""
        if state.hashes is None:
            return state, 0
        mask = hiding(step.inputs.attention_mask)
        if not same_mask(state.mask, hiding(None if mask is None else mask[:, : step.start])):
            return forgotten(state), 0  # the mask of earlier positions has changed, and with it their content
        may_match, num_known = state.can_match and step.start % PAGE_TOKENS == 0, step.start // PAGE_TOKENS
        state = followed(state if mask is state.mask else replace(state, mask=mask), step)
        num_tokens = step.inputs.hidden.shape[1]
        if not may_match or num_tokens < PAGE_TOKENS:
            return state, 0
        assert self.prefix_cache is not None  # without it there are no hashes
        num_pages = _most_matched_pages(step, session.keeps_outputs)
        new = [digests[num_known:][:num_pages] for digests in state.digests]
        num_pages = _not_within_runs(min(map(self.prefix_cache.num_known, new)), step.inputs.joined)
        longer = [
            self._with_known_pages(session, state, row, digests[:num_pages])
            for row, digests in zip(state.rows, new, strict=True)
        ]
        num_found = (min(row.length for row in longer) - step.start) // PAGE_TOKENS  # less if there is no room
        num_matched = _not_within_runs(num_found, step.inputs.joined) * PAGE_TOKENS
        cropped = [row.crop(step.start + num_matched, session.layout) for row in longer]
        rows = tuple(row for row in cropped if row is not None)
        if not num_matched or len(rows) < len(cropped):  # a window has moved on while another row found no room
            return replace(state, can_match=False), 0
        return replace(state, rows=rows, can_match=num_matched == num_tokens), num_matched

    def _with_known_pages(self, session: Session, state: KvState, row: KvRow, digests: Sequence[bytes]) -> KvRow:
        """Return a row followed by the pages of known content, up to the first that is unknown.

        Pages that have left the cache are read back to the end of the row, if there is room, and can be shared again.
        """
        assert self.prefix_cache is not None
        found = self.prefix_cache.longest(digests)
        for parts in found:
            row = row.extended(parts, PAGE_TOKENS)
        layout, lease, outside = session.layout, session.lease, digests[len(found) :]
        if not outside:
            return row
        count = len(outside) * PAGE_TOKENS
        try:
            growth = grow((row,), (row,), count, layout, lease, reserved=session.reserved, settled=state.settled)
        except PeerBusy:  # perhaps there is room to compute them in smaller steps
            return row
        (grown,), num_kept, length = growth.rows, (PAGE_TOKENS,) * len(layout.groups), row.length
        for digest in outside:
            data = self.prefix_cache.read_back(digest)
            if data is None:
                break
            start, length = length, length + PAGE_TOKENS
            unpack(Stored(PAGE_TOKENS, num_kept, data), (grown.beginning(length),), layout)
            new = grown.slice(start, length)
            assert new is not None, "new positions have not been dropped"
            self.prefix_cache.add(digest, new)
        growth.shorten(length)
        return growth.rows[0]

    def _commit(self, work: Prepared, output: torch.Tensor | None) -> torch.Tensor:
        session, step = work.session, work.step
        states = [_with_states_after(work)] if session.layout.slots else work.states
        for each, state in zip(work.sessions, states, strict=True):
            each.enter(state)
        if session.keeps_outputs and output is not None:
            self._store_outputs(work, output)
        if work.num_matched:
            output = self._with_matched(work, output)
        for state in work.states:
            if state.hashes is not None and not state.unhashed:
                self._add_pages(state, (state.length - step.inputs.hidden.shape[1]) // PAGE_TOKENS)
        if step.every_block:
            output = torch.stack([output.to(work.block_outputs[0].device) for output in work.block_outputs])
        assert output is not None
        additions = step.inputs.additions
        if additions is not None and additions.shape[2] > session.blocks.end:  # later blocks need them
            return replace(step.inputs, hidden=output).stacked
        return output

    def _with_matched(self, work: Prepared, output: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs of all positions of the step, of which only the last ones were computed, or none."""
        step = work.step
        if work.session.keeps_outputs:
            return self.outputs(work.session, step.start, step.start + step.inputs.hidden.shape[1])
        skipped = torch.zeros_like(step.inputs.hidden[:, : work.num_matched])  # nobody wants these outputs
        return skipped if output is None else torch.cat([skipped.to(output), output], 1)

    def _add_pages(self, state: KvState, first_page: int) -> None:
        assert self.prefix_cache is not None
        for row, digests in zip(state.rows, state.digests, strict=True):
            for page in range(first_page, len(digests)):
                parts = row.slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
                if parts is not None:
                    self.prefix_cache.add(digests[page], parts)
            if len(digests) > first_page:
                self.prefix_cache.touch(digests)

    # ------------------------------------------------------------ stored outputs, keys and values

    def outputs(self, session: Session, start: int, end: int) -> torch.Tensor:
        """Return the stored outputs of the session's last block at these positions, [batch, positions, hidden_size]."""
        group = session.layout.outputs_group
        assert group is not None, "the session does not keep outputs"
        channel = len(session.layout.groups[group].channels) - 1
        with torch.inference_mode():
            return read(session.state.rows, group, start, end, channel)[:, 0]

    def stored(self, session: Session, start: int, end: int) -> Stored:
        """Return everything that the session keeps of these positions, in the form that ``adopt`` takes."""
        known = session.state.states
        states = known.states if known is not None and end == session.length else ()
        with torch.inference_mode():
            return pack(session.state.rows, session.layout, start, end, states)

    def adopt(self, session: Session, start: int, changes: Sequence[HistoryChange], stored: Stored) -> None:
        """Take over a step that was computed on another server. An error leaves the session unchanged.

        Raises:
            RequestRejected: the step does not fit the session.
            PeerBusy: there is no room.
        """
        session.require_present()
        state = replace(forgotten(session.state), states=None)  # the states after the step come with it
        for change in changes:
            state = changed(state, change, session.layout)
        state = cropped(state, start, session.layout)
        stored.require_fit(session.layout, len(state.rows))
        room = None
        if session.layout.slots:
            room = RowStatesRoom(len(state.rows), session.layout.state_bytes, session.lease)
        with torch.inference_mode():
            growth = grow(
                session.state.rows,
                state.rows,
                stored.num_tokens,
                session.layout,
                session.lease,
                reserved=session.reserved,
                settled=state.settled,
                counts=stored.num_kept,
            )
            states = unpack(stored, growth.rows, session.layout)
        state = replace(state, rows=growth.rows)
        if states is not None:
            assert room is not None
            state = replace(state, states=RowStates(state.length, states, room))
        session.enter(state)

    def _store_outputs(self, work: Prepared, output: torch.Tensor) -> None:
        group = work.session.layout.outputs_group
        assert group is not None
        for run in work.runs(group, 0):
            run.write(-1, output[:, None])

    # ------------------------------------------------------------ one batch

    def _compute(self, batch: list[Prepared]) -> Iterator[torch.Tensor]:
        """Return the outputs of the steps, each on the device of its session's last block."""
        stack = self._stack
        starts = [work.session.blocks.start for work in batch]
        first_devices = {start: stack.device_of(start) for start in set(starts)}
        devices = [first_devices[start] for start in starts]
        hidden = moved([work.new_hidden for work in batch], devices, [stack.dtype] * len(batch))
        bounds = sorted({*chain.from_iterable([work.bounds for work in batch]), *stack.cuts})
        for part in map(Span, bounds, bounds[1:]):
            members = [i for i, work in enumerate(batch) if work.session.blocks.covers(part)]
            members.sort(key=lambda i: adapter_order(batch[i]))  # rows with the same adapter are computed as one
            for together in self._alike(batch, members):
                outputs = self._run_part(part, [batch[i] for i in together], [hidden[i] for i in together])
                for i, output in zip(together, outputs, strict=True):
                    hidden[i] = batch[i].with_addition(output, part.end - 1)
                    if batch[i].step.every_block:
                        batch[i].block_outputs.append(output)
        return iter(hidden)

    def _alike(self, batch: list[Prepared], members: list[int]) -> Iterator[list[int]]:
        """Group the steps that can be computed as one.

        The steps of a group have equally many positions to compute, all or none have states before them, and their
        convolutions have recorded equally much.
        """
        by_kind: dict[tuple[int, ...], list[int]] = {}
        has_states = self.layout.has_states
        for i in members:
            work = batch[i]
            num_new = work.step.inputs.hidden.shape[1] - work.num_matched
            of_states = (work.step.start > 0, work.records, work.num_recorded) if has_states else ()
            by_kind.setdefault((num_new, *of_states), []).append(i)
        return iter(by_kind.values())

    def _run_part(self, blocks: Span, batch: list[Prepared], hidden: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run blocks of one device, through which all sessions of the batch go; return each session's output."""
        device = self._stack.view(blocks).device
        hidden = [rows if rows.device == device else rows.to(device) for rows in hidden]
        places, num_new = block_runs(blocks, batch), hidden[0].shape[1]
        positions, joined = batch_positions(batch, num_new), batch_joined(batch, num_new)
        shares = _adapter_rows(batch)
        adapter, output = adapter_of_all(shares, len(positions)), None
        if joined is None and (adapter is not None or not shares):
            output = self._run_graph(blocks, batch, hidden, positions, places, adapter)
        if output is None:
            output = self._run_blocks(blocks, batch, hidden, positions, joined, places, shares)
        return [output] if len(batch) == 1 else list(output.split([work.num_rows for work in batch]))

    def _run_blocks(
        self,
        blocks: Span,
        batch: list[Prepared],
        hidden: list[torch.Tensor],
        positions: torch.Tensor,
        joined: torch.Tensor | None,
        places: list[BlockRuns],
        shares: list[AdapterRows],
    ) -> torch.Tensor:
        """Return the output of the blocks' own code, and keep the states after it."""
        view, ways, device = self._stack.view(blocks), self.ways, hidden[0].device
        num_new, num_rows = hidden[0].shape[1], [work.num_rows for work in batch]
        slots, length = batch[0].slots(blocks), max(chain.from_iterable([work.lengths for work in batch]))
        layers = self._state_layers(blocks, batch, slots, device)
        mask = batch_mask(batch, length)
        cache = RowsCache(places, length, num_new, ways.in_place, layers if any(slots) else (), ways.attention)
        in_place = attention_in_place(cache, view.configs) if ways.in_place else nullcontext()
        with in_place, self._patches.applied(shares, sum(num_rows), num_new):
            output = view(
                hidden[0] if len(hidden) == 1 else torch.cat(hidden),
                None if mask is None else mask.to(device),
                positions.to(device),
                cache,
                joined=joined,
            )
        for work, states in zip(batch, states_after(slots, layers, num_rows), strict=True):
            work.states_after.update(zip(blocks, states, strict=True))
        return output

    def _run_graph(
        self,
        blocks: Span,
        batch: list[Prepared],
        hidden: list[torch.Tensor],
        positions: torch.Tensor,
        places: list[BlockRuns],
        adapter: PlacedAdapter | None,
    ) -> torch.Tensor | None:
        """Return the output of a graph of the blocks, or None if no graph computes these rows."""
        if self.ways.graphs is None or positions.dim() > 2:
            return None
        seen = positions_seen(batch)
        return None if seen is None else self.ways.graphs.run(blocks, hidden, positions, places, seen, adapter)

    def _state_layers(
        self, blocks: Span, batch: list[Prepared], slots: tuple[tuple[Slot, ...], ...], device: torch.device
    ) -> list[LinearAttentionLayer | None]:
        members = [work.states_before(blocks) for work in batch] if any(slots) and batch[0].step.start else None
        num_rows = sum(work.num_rows for work in batch)
        return state_layers(slots, members, num_rows, device, recording=batch[0].records)

    def _try_rows(self, ways: Ways) -> torch.Tensor:
        """Return the outputs of steps with rows of different lengths, computed in these ways."""
        before, self.ways = self.ways, ways
        try:
            return steps_of_two_lengths(self)
        finally:
            self.ways = before


def _give_up(session: Session, rows: Sequence[KvRow]) -> None:
    """Give back the room of a session that had these rows. Pages that the prefix cache keeps are trimmed."""
    session.lease.close()
    for page in {part.page for row in rows for parts in row.parts for part in parts}:
        if page.lease is session.lease and any(page.pinned):
            page.trim()


def _adapter_rows(batch: Sequence[Prepared]) -> list[AdapterRows]:
    """Return the rows of each adapter of the batch; empty if no session has one, as in most batches."""
    if all(work.session.adapter is None for work in batch):
        return []
    return shares_of([(work.session.adapter, work.num_rows, work.step.start + work.num_matched) for work in batch])


def _is_longer(step: SessionStep) -> bool:
    """Return whether the step adds several positions to a session that has some."""
    return step.start > 0 and step.inputs.hidden.shape[1] > 1


def _together(positions: NextPositions, numbers: Sequence[int], states: Sequence[KvState], growth: Growth) -> Prepared:
    """Return the steps of the sessions with these numbers as one."""
    if len(numbers) < len(positions):
        positions = positions.part(numbers)
    step = SessionStep(positions.starts[0], BlockInput(positions.hidden))
    return Prepared(positions.sessions, step, states, [start + 1 for start in positions.starts], 0, growth)


def _results(outcomes: Sequence[tuple[Sequence[int], Outcome]]) -> Results:
    """Return the outcome of all sessions, or a list of the outcomes of each if there are several."""
    if len(outcomes) == 1:
        return outcomes[0][1]
    of_each: dict[int, Outcome] = {}
    for numbers, outcome in outcomes:
        parts = [outcome] if isinstance(outcome, Exception) else outcome.split(1)
        of_each.update(zip(numbers, parts, strict=True))
    return [of_each[number] for number in range(len(of_each))]


def _most_matched_pages(step: SessionStep, keeps_outputs: bool) -> int:
    """Return how many pages of the step's content may come from the prefix cache instead of being computed."""
    num_tokens = step.inputs.hidden.shape[1]
    if step.every_block:
        return 0
    if keeps_outputs:
        return num_tokens // PAGE_TOKENS
    num_wanted = num_tokens if step.num_wanted is None else step.num_wanted
    return max(0, num_tokens - num_wanted) // PAGE_TOKENS  # outputs that are wanted must be computed


def _not_within_runs(num_pages: int, joined: torch.Tensor | None) -> int:
    """Return the most of these pages whose end is in no run that looks back further than sliding windows keep."""
    while num_pages and joined is not None and bool((joined[:, num_pages * PAGE_TOKENS - 1] == ACROSS_WINDOWS).any()):
        num_pages -= 1
    return num_pages


def _with_states_after(work: Prepared) -> KvState:
    """Return the session's state after the step, with the recurrent states that the step has computed."""
    old = work.state.states
    assert old is not None  # ``_with_states`` made them
    after = tuple(work.states_after.get(block, ()) for block in work.session.blocks)
    before = replace(old, before=None) if old.length else None
    return replace(work.state, states=RowStates(work.state.length, after, old.room, before))


def _give_room_back(batch: Collection[Prepared]) -> None:
    """Undo what the sessions grew for steps that were not computed."""
    for work in batch:
        if work.growth is not None:
            work.growth.undo()
