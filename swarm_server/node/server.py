"""The life of a server: it joins the swarm, hosts blocks where they are needed, renews its record, and leaves."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import shlex
import statistics
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import FROM_SWARM, locate
from swarm_models.checkpoints.family import has_experts
from swarm_models.checkpoints.files import HubUnreachable
from swarm_models.sharing.obtaining import SharingSwarm, open_from_swarm
from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.dht.records import REFRESH_S, ServerRecord
from swarm_protocol.errors import SwarmError
from swarm_protocol.failures import logged_errors
from swarm_protocol.net.tls import Certificate, ClientCredentials
from swarm_protocol.process.invocation import typed
from swarm_protocol.process.local_registry import DEFAULT_SWARM, RENEW_S
from swarm_protocol.process.logs import log_event, writes_json
from swarm_protocol.process.routine import end_tasks, repeat
from swarm_protocol.rpc.serving import bound_server
from swarm_protocol.streams.streams import DaemonStreams
from swarm_protocol.telemetry.exporting import start
from swarm_protocol.tunnel.dialing import Dialer
from swarm_protocol.tunnel.members import RelayCredentials
from swarm_protocol.verification.statements import Signer
from swarm_server.blocks.products import described, multiplied_by
from swarm_server.core.access import server_access
from swarm_server.core.config import ServerConfig
from swarm_server.core.counters import Counters
from swarm_server.engine.preloaded import check_adapters
from swarm_server.group.forming import GroupLeader
from swarm_server.group.links import GroupEnded
from swarm_server.machine.cores import CoreShare
from swarm_server.machine.heap import HeapTrimmer
from swarm_server.machine.memory import hosted_bytes
from swarm_server.metrics.live_line import LiveLine, has_live_line, keep_live_line
from swarm_server.net.arrivals import Arrivals
from swarm_server.net.network_probe import NetworkProbe
from swarm_server.net.push import ChannelPool
from swarm_server.node.hosting import SpanLoader, devices_and_dtype
from swarm_server.node.joining import SwarmMembership, join
from swarm_server.node.moving import PeerMonitor, SpanMover, num_hosted
from swarm_server.node.presence import RecordPublisher
from swarm_server.node.proposing import NEAR_S, can_be_in_group, could_join, group_proposal, near_servers
from swarm_server.node.states import Joined, Starting
from swarm_server.placement.placement import CHECK_S
from swarm_server.reach.reach import Reach
from swarm_server.rpc.registration import add_service
from swarm_server.rpc.service import BlocksService, CallerChecks
from swarm_server.verification.blocklist import Blocklist
from swarm_server.verification.judge import AnswerJudge

if TYPE_CHECKING:
    from swarm_server.metrics.exporter import ServerMetrics

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_GRACE_S = 2.0  # for streams that are still open when the server stops
_JUDGE_S = (3 * REFRESH_S, 4 * REFRESH_S)  # looking up an absent key contacts many nodes, so this is rare
_TRIM_S = 10.0  # between two checks whether the heap has grown
_OFFER_S = (600.0, 900.0)  # between two checks whether there are more files, for example after a move
_PROBE_S = (10.0, 40.0)  # between two rounds of measuring the network


class Server:
    """One server; ``run`` is its whole life.

    Attributes:
        ready: whether it serves, or has served.
    """

    def __init__(self, config: ServerConfig, leader: GroupLeader | None = None) -> None:
        """Configure the server. ``leader``: of its group on several machines; raise ValueError if it is missing."""
        if leader is None and (config.group is not None or config.group_listen is not None):
            raise ValueError("a group on several machines is formed by its leader: expected a GroupLeader")
        self.config = config
        self._leader = leader
        self.ready = False
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Make ``run`` withdraw the record and return."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until ``stop``; print one line to stdout once the server is ready.

        Raises:
            ValueError, SwarmError: the configuration cannot work; one sentence says why.
        """
        counters = Counters()
        async with AsyncExitStack() as cleanup:
            metrics = await _export(self.config, counters, cleanup)
            starting, membership = await _start(self.config, counters, cleanup, self._leader)
            joined = await _join(starting, membership, cleanup)
            if self._leader is not None:
                _begin(self._leader.keep_announced(joined.membership.dht, starting.access.token), cleanup)
            network_probe = NetworkProbe(starting.channels)
            blocklist = Blocklist()
            monitor = PeerMonitor(joined, network_probe, blocklist)
            span = starting.span or await monitor.choose_span(await asyncio.to_thread(num_hosted, starting))
            loading = joined.load(span)
            presence = RecordPublisher(joined, network_probe, loading)
            if metrics is not None:
                metrics.show_state(presence.record, lambda: presence.sessions)
            losing_daemon = _begin(presence.keep_daemon(self._stop.is_set), cleanup)
            losing_group = _begin(starting.loader.group_end(presence.is_quiet), cleanup)
            # A daemon that could not be kept running is not started once more for the last record.
            cleanup.push_async_callback(lambda: presence.withdraw(may_restart=not losing_daemon.done()))
            await presence.publish()
            _begin(joined.reach.keep(presence.publish, monitor.relays), cleanup)
            _begin(repeat(presence.keep_membership, (RENEW_S, RENEW_S)), cleanup)
            mover = SpanMover(joined, monitor, presence)
            if starting.span is None:
                loading = await mover.settle(loading)
            judge = _judge(joined, presence, blocklist)
            add_service(_service(joined, presence, judge), joined.grpc_server, counters)
            cleanup.push_async_callback(mover.close)
            cache_tokens = (await mover.host(loading)).runtime.cache_tokens
            await presence.keep_revocations()
            await joined.grpc_server.start()
            await presence.publish()
            self.ready = True
            await _announce_ready(joined, presence.record(), cache_tokens)
            if has_live_line(is_off=self.config.no_live_line):
                line = LiveLine(sys.stderr)
                showing = asyncio.ensure_future(keep_live_line(line, presence.record, lambda: presence.sessions))
                cleanup.push_async_callback(end_tasks, [showing])
            proposing = asyncio.ensure_future(_propose_group(joined, presence.record(), monitor, network_probe))
            cleanup.push_async_callback(end_tasks, [proposing])
            await self._serve(presence, mover, judge, [losing_daemon, losing_group])
            await mover.drain()
        for losing in (losing_daemon, losing_group):
            if losing.done() and not losing.cancelled():
                raise losing.result()

    async def _serve(
        self,
        presence: RecordPublisher,
        mover: SpanMover,
        judge: AnswerJudge,
        losing: Sequence[asyncio.Future[SwarmError] | asyncio.Future[GroupEnded]],
    ) -> None:
        """Run the periodic tasks until ``stop``, or until the server cannot go on, as the futures ``losing`` say."""
        offering = asyncio.ensure_future(presence.keep_offer())  # at once: ``repeat`` waits before it calls
        stopping = asyncio.ensure_future(self._stop.wait())
        tasks = [
            stopping,
            offering,
            asyncio.ensure_future(repeat(presence.publish, (REFRESH_S, REFRESH_S))),
            asyncio.ensure_future(repeat(mover.measure_network, _PROBE_S)),
            asyncio.ensure_future(repeat(mover.rebalance, CHECK_S)),
            asyncio.ensure_future(repeat(presence.keep_revocations, (REFRESH_S, REFRESH_S))),
            asyncio.ensure_future(repeat(judge.publish, (REFRESH_S, REFRESH_S))),
            asyncio.ensure_future(repeat(judge.judge_others, _JUDGE_S)),
            asyncio.ensure_future(repeat(presence.keep_offer, _OFFER_S)),
            asyncio.ensure_future(repeat(HeapTrimmer().trim, (_TRIM_S, _TRIM_S))),
        ]
        try:
            await asyncio.wait([stopping, *losing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(tasks)


async def _export(config: ServerConfig, counters: Counters, cleanup: AsyncExitStack) -> ServerMetrics | None:
    """Start telemetry and the metrics exporter, if they are wanted. Return the metrics; None if nobody reads them.

    This comes before all slow steps, so that a port in use is reported at once.
    """
    telemetry = start("swarm-server")
    cleanup.push_async_callback(asyncio.to_thread, telemetry.close)  # not on the loop, which the last metrics need
    if config.metrics_port is None and not telemetry.exports_metrics:
        return None
    from swarm_server.metrics.exporter import Exporter, ServerMetrics

    metrics = ServerMetrics(counters, asyncio.get_running_loop())
    if config.metrics_port is not None:
        exporter = Exporter(config.metrics_host, config.metrics_port, metrics.registry)
        cleanup.push_async_callback(asyncio.to_thread, exporter.close)
        _logger.info("metrics at %s", exporter.url)
    telemetry.export(metrics.registry)
    return metrics


async def _start(
    config: ServerConfig, counters: Counters, cleanup: AsyncExitStack, leader: GroupLeader | None
) -> tuple[Starting, SwarmMembership | None]:
    """Find the model and prepare to load it. The membership is None unless the swarm was needed to find the model."""
    access, streams = server_access(config), DaemonStreams()
    cleanup.callback(access.release)
    credentials = ClientCredentials(access.identity, access.token)
    dialer = Dialer(credentials, streams, RelayCredentials(access.identity, access.token))
    cleanup.push_async_callback(dialer.close)
    channels = ChannelPool(dialer.connect)
    cleanup.push_async_callback(channels.close)
    checkpoint, membership = await _open(config, access, streams, channels, cleanup)
    await asyncio.to_thread(check_adapters, config.adapters, checkpoint.family, checkpoint.config)
    given = config.blocks or config.initial_blocks
    if given is not None:
        given.within(checkpoint.family.num_blocks)
    devices, dtype = devices_and_dtype(config)
    cores = cleanup.enter_context(CoreShare())
    torch.set_num_threads(cores.threads())  # for threads that have not computed yet
    loader = SpanLoader(config, checkpoint, cores, devices, dtype, counters, leader)
    cleanup.callback(loader.close)
    if given is not None:  # the span is already known: load while joining
        loader.prefetch(given)
        cleanup.callback(loader.cancel)
    return Starting(config, access, checkpoint, devices, dtype, channels, loader, counters, streams), membership


async def _open(
    config: ServerConfig, access: SwarmAccess, streams: DaemonStreams, channels: ChannelPool, cleanup: AsyncExitStack
) -> tuple[ModelCheckpoint, SwarmMembership | None]:
    """Open the model that is configured, or that the swarm serves; get it from the swarm if the hub is unreachable."""
    failure: HubUnreachable | None = None
    if not config.model.startswith(FROM_SWARM):
        try:
            return await asyncio.to_thread(ModelCheckpoint.open, locate(config.model), config.model_revision), None
        except HubUnreachable as error:
            if not (config.initial_peers or config.discover):
                raise
            failure = error
    membership = await join(config, access, cleanup)
    streams.use(lambda: membership.dht.p2p)
    loop, dht = asyncio.get_running_loop(), membership.dht
    swarm = SharingSwarm(
        dht.models, dht.view, channels.stub, lambda fetching: asyncio.run_coroutine_threadsafe(fetching, loop).result()
    )
    name = config.model.removeprefix(FROM_SWARM)
    found = await open_from_swarm(swarm, name, config.model_revision, config.weights, failure=failure)
    return found, membership


async def _join(starting: Starting, membership: SwarmMembership | None, cleanup: AsyncExitStack) -> Joined:
    config = starting.config
    membership = membership or await join(config, starting.access, cleanup)
    certificate = Certificate.generate()
    own = membership.own_addresses()
    grpc_server, port = bound_server(certificate, own.grpc_host, config.port)
    own.use_port(port)
    cleanup.push_async_callback(grpc_server.stop, _GRACE_S)
    starting.streams.use(lambda: membership.dht.p2p)
    reach = Reach(config, starting.access, membership.dht, starting.streams, own, membership.members)
    cleanup.push_async_callback(reach.close)
    membership.call_after_restart(reach.attach)
    await reach.start()
    return Joined(starting, membership, grpc_server, certificate.fingerprint, reach)


def _begin(work: Coroutine[Any, Any, T], cleanup: AsyncExitStack) -> asyncio.Future[T]:
    """Begin a task that ``cleanup`` cancels."""
    task = asyncio.ensure_future(work)
    cleanup.callback(task.cancel)
    return task


def _service(joined: Joined, presence: RecordPublisher, judge: AnswerJudge) -> BlocksService:
    config, access = joined.starting.config, joined.starting.access
    return BlocksService(
        lambda: presence.sessions,
        lambda: presence.record().to_proto(),
        config.session_idle_timeout_s,
        Arrivals(config.incoming_bytes, config.stall_timeout_s, config.min_bytes_per_s),
        CallerChecks(access.control, joined.reach.origins),
        signer=Signer(access.identity, lambda: presence.record().to_proto(), time.time),
        judge=judge,
        offering=presence.offering,
    )


def _judge(joined: Joined, presence: RecordPublisher, blocklist: Blocklist) -> AnswerJudge:
    checkpoint, access = joined.starting.checkpoint, joined.starting.access
    return AnswerJudge(
        lambda: None if presence.sessions is None else presence.sessions.services,
        presence.record,
        has_experts(checkpoint.config),
        joined.membership.dht.accusations(checkpoint.name),
        access.token,
        blocklist,
    )


def _model_flag(asked: str, served: str) -> str:
    """Return the flag by which other commands select the same model, or an empty string if they need none."""
    if asked.startswith(FROM_SWARM):
        asked = served if served == ServerConfig.model else f"{FROM_SWARM}{served}"
    return "" if asked == ServerConfig.model else f" --model {shlex.quote(asked)}"


async def _propose_group(joined: Joined, own: ServerRecord, monitor: PeerMonitor, probe: NetworkProbe) -> None:
    """Log a proposal if near servers of the swarm would be faster as a group with this one."""
    with logged_errors(_logger, "whether a group would be faster could not be found out"):
        config, checkpoint = joined.starting.config, joined.starting.checkpoint
        if not (could_join(own) and can_be_in_group(config, checkpoint)):
            return
        near = near_servers(own, (await monitor.view(own)).servers)
        block_bytes = statistics.mean(hosted_bytes(checkpoint, config.quant))
        links = await probe.links(near, NEAR_S)
        proposal = group_proposal(own, near, links, block_bytes, checkpoint.family.hidden_size)
        if proposal is not None:
            _logger.info("%s", proposal.sentence())


async def _announce_ready(joined: Joined, record: ServerRecord, cache_tokens: int) -> None:
    config, membership = joined.starting.config, joined.membership
    peer = (await membership.dht.addresses())[0]
    same = _model_flag(config.model, record.model)  # and the flags by which other commands select the same swarm
    same += "" if config.swarm == DEFAULT_SWARM else f" --swarm {config.swarm}"
    fields = {"model": record.model, "blocks": str(record.span), "quant": record.quant}
    if len(joined.starting.devices) > 1:
        fields["devices"] = ",".join(map(str, joined.starting.devices))
    if (members := joined.starting.loader.members) > 1:
        fields["group"] = str(members)
    fields |= {"peer": str(peer), "grpc": record.addresses[0]}
    products = config.quant, joined.starting.devices[0], joined.starting.dtype
    fields["products"] = multiplied_by(*products, is_in_group=config.is_in_group)
    print("ready", *(f"{name}={value}" for name, value in fields.items()), flush=True)
    if writes_json():
        log_event(_logger, "ready", **fields)
    _logger.info(
        "%s: %.0f tokens/s decoding, %.0f tokens/s otherwise; room for %d tokens",
        described(*products, is_in_group=config.is_in_group),
        record.tokens_per_s,
        record.forward_tokens_per_s,
        cache_tokens,
    )
    if ipaddress.ip_address(membership.host).is_loopback:
        _logger.info("only this machine can join; to let others in, start servers with --host ADDRESS")
    else:
        entry_point = membership.entry_points()[0]
        _logger.info("on the next machine: %s%s --initial-peers %s", typed("server"), same, entry_point)
    if joined.starting.access.control is not None:
        _logger.info("only members of swarm %s are let in", joined.starting.access.control.swarm_key)
    _logger.info('try it: %s%s "Return a list of"', typed("generate"), same)
