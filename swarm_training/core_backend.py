"""The network of the commands: ``TrainingRun`` itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from swarm_training.contract.backend import Backend, Joining
from swarm_training.contract.run_like import RunLike, RunView

if TYPE_CHECKING:
    import torch
    from torch import nn

_JOIN_TIMEOUT_S = 60.0


def open_run(who: Joining, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> RunLike:
    """Founds the run if there are no initial peers, else joins it. Raises what ``TrainingRun`` raises."""
    from swarm_protocol.access.access_control import AccessControl
    from swarm_training import TrainingConfig, TrainingRun
    from swarm_training.compression.building import build_compressor, build_encoder

    run: RunLike = TrainingRun(
        who.run,
        parameters,
        optimizer,
        target_batch_size=who.target_batch_size,
        initial_peers=who.initial_peers,
        config=TrainingConfig(codec=who.averaging.codec),
        identity=who.identity,
        compressor=build_compressor(who.averaging, [parameter.shape for parameter in parameters], who.run),
        encoder=build_encoder(who.averaging),
        access=None if who.organiser is None else AccessControl(who.organiser),
        token=who.token,
    )
    return run


@contextmanager
def look(who: Joining) -> Iterator[Callable[[], RunView]]:
    """By a DHT node that only asks: nobody waits for it. Raises NoSwarm if no initial peer answers."""
    from swarm_protocol.access.access_control import AccessControl
    from swarm_protocol.dht.node import Listening
    from swarm_training.commands.looking import peers_of, shown_bans, view_of
    from swarm_training.core import background
    from swarm_training.ledger.orders import Orders
    from swarm_training.progress.board import DhtBoard
    from swarm_training.run.moderation import Moderation

    moderation = Moderation(None if who.organiser is None else Orders(who.run, AccessControl(who.organiser)))

    async def see(board: DhtBoard) -> RunView:
        moderation.take(await board.read_orders())
        peers = peers_of(who.run, await board.read(), moderation.banned())
        return view_of(who.run, who.target_batch_size, peers, shown_bans(moderation.bans()))

    board = background.run(DhtBoard.join(who.run, who.initial_peers, who.identity, Listening(), _JOIN_TIMEOUT_S))
    try:
        yield lambda: background.run(see(board))
    finally:
        background.run(board.close())


def send_order(who: Joining, order: bytes) -> None:
    """Puts it on the run's DHT, beside those that this moderator has there already; members hand it on.

    Raises NoSwarm if no initial peer answers, PeerUnavailable if none of them keeps the order.
    """
    from swarm_protocol.dht.node import Listening
    from swarm_training.core import background
    from swarm_training.progress.board import DhtBoard

    async def publish() -> None:
        board = await DhtBoard.join(who.run, who.initial_peers, who.identity, Listening(), _JOIN_TIMEOUT_S)
        try:
            await board.publish_orders([*await board.own_orders(), order])
        finally:
            await board.close()

    background.run(publish())


BACKEND = Backend(open_run, look, send_order)
