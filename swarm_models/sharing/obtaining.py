"""The source of the files of a model that the swarm serves: this machine, the hub, or other members."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from swarm_models.checkpoints import default_model
from swarm_models.checkpoints.checkpoint import ModelCheckpoint, is_fingerprint
from swarm_models.checkpoints.files import CONFIG, GGUF, is_plain
from swarm_models.checkpoints.formats.shards import INDEX, SINGLE
from swarm_models.sharing.download import Download
from swarm_models.sharing.manifest import Manifest
from swarm_models.sharing.members import MAX_PER_ADDRESS, OfferingMembers
from swarm_models.sharing.piece_store import PieceStore, remembered
from swarm_models.sharing.swarm_files import Run, SwarmFiles
from swarm_protocol.dht.claims import within_addresses
from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.errors import CheckpointError
from swarm_protocol.rpc.stubs import ServiceStub

_SHOWN_MODELS = 5
_LOOKS, _LOOK_S = 10, 3.0  # for members that offer files
_MODEL_LOOKS = 4  # for servers
_DHT_S = 60.0  # then the DHT counts as gone: hivemind waits for ever for a daemon that has ended
# The fingerprint of a directory or a GGUF file, or a commit of the hub.
_REVISION = re.compile(r"[0-9a-f]{16}|[0-9a-f]{40}")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharingSwarm:
    """The swarm from the viewpoint of a peer that has no copy of the model.

    Attributes:
        models: returns the names of the served models, with their numbers of blocks.
        view: returns the servers of one model.
        run: runs a coroutine on the event loop of these functions, and waits for it in another thread.
        on_wrong: called with the peer id of a member that sends wrong bytes.
    """

    models: Callable[[], Awaitable[dict[str, int]]]
    view: Callable[[str, int], Awaitable[SwarmView]]
    stub: Callable[[ServerRecord], Awaitable[ServiceStub]]
    run: Run
    on_wrong: Callable[[str], None] = lambda _peer_id: None


class NothingServed(CheckpointError):
    """The swarm serves no model at all."""


async def open_from_swarm(
    swarm: SharingSwarm,
    name: str,
    revision: str | None = None,
    weights: str = "",
    *,
    failure: CheckpointError | None = None,
) -> ModelCheckpoint:
    """Open a model with ``open_served``; without a name, open the default model if the swarm serves none.

    The hub is searched only without a name: with a name, the caller has tried the hub, or wants members' files.

    Args:
        failure: the reason why the model of this name is not available elsewhere.

    Raises:
        CheckpointError: see ``open_served``; the message includes ``failure``.
    """
    try:
        return await open_served(swarm, name, revision, weights, asks_hub=not name)
    except CheckpointError as error:
        if failure is not None:
            raise CheckpointError(f"{failure}; nor does it come from the swarm: {error}") from None
        if name or weights or not isinstance(error, NothingServed):
            raise
        _logger.warning("the swarm serves no model yet: taking %s", default_model.DEFAULT_MODEL)
        return await asyncio.to_thread(ModelCheckpoint.open, default_model.locate(default_model.DEFAULT_MODEL))


async def open_served(
    swarm: SharingSwarm, name: str, revision: str | None = None, weights: str = "", *, asks_hub: bool = True
) -> ModelCheckpoint:
    """Open a model that the swarm serves: from this machine, the hub's cache, the hub, or members, in this order.

    Args:
        name: the name of the model; empty: the only model that the swarm serves.
        revision: None: the revision of most servers, counting at most ``MAX_PER_ADDRESS`` per address.
        weights: SHA-256, in hex, of the manifest to take from members; empty: the one that most of them offer.
        asks_hub: whether to ask the hub at all, unless the hub is set to offline.

    Raises:
        CheckpointError: the model is not served, or its files are not available; NothingServed: no model is served.
    """
    wanted = bytes.fromhex(weights) or None
    try:
        async with asyncio.timeout(_DHT_S):
            name, num_blocks = _served(await _models(swarm), name)
            view = partial(swarm.view, name, num_blocks)
            servers = (await view()).servers
    except (TimeoutError, OSError) as error:
        raise CheckpointError(
            f"the swarm's DHT cannot be read: {str(error) or 'no answer in time'}; try again"
        ) from None
    revision = _revision(servers, name, revision, wanted)
    if not weights:
        found = await asyncio.to_thread(_own, name, revision, asks_hub and not constants.HF_HUB_OFFLINE)
        if found is not None:
            return found
    members = OfferingMembers(revision, view, swarm.stub)
    kept = await asyncio.to_thread(remembered, name, revision, wanted)
    # A wanted manifest needs no vote. Without a wish, the members' vote of today counts more than an earlier download.
    manifest = (kept if wanted else None) or await _manifest(members, wanted) or kept
    if manifest is None:
        raise CheckpointError(
            f"{name} is not on this machine, and no member of the swarm offers its files: expected a server with "
            "--share-weights always"
        )
    store = PieceStore(manifest)
    _logger.warning(  # a warning, because clients show nothing less, and the origin of the files matters
        "%s: not on this machine%s, so from members of the swarm (%d at present), manifest %s; kept in %s",
        name,
        " nor on the hub" if asks_hub else "",
        len(await members.find()),
        manifest.digest.hex(),
        store.snapshot,
    )
    files = SwarmFiles(store, Download(store, members.find, swarm.on_wrong), swarm.run)
    await files.open()
    return await asyncio.to_thread(ModelCheckpoint, files)


async def _models(swarm: SharingSwarm) -> dict[str, int]:
    """Return the models; look several times if there are none, because a new node may not see announcements yet."""
    for _ in range(_MODEL_LOOKS - 1):
        if models := await swarm.models():
            return models
        await asyncio.sleep(_LOOK_S)
    return await swarm.models()


async def _manifest(members: OfferingMembers, wanted: bytes | None) -> Manifest | None:
    """Return the manifest; look several times, because servers that have just started do not know their files yet."""
    for num_left in reversed(range(_LOOKS)):
        try:
            if manifest := await members.manifest(wanted):
                return manifest
        except CheckpointError:
            if not num_left:
                raise
        if num_left:
            await asyncio.sleep(_LOOK_S)
    return None


def _served(models: dict[str, int], name: str) -> tuple[str, int]:
    """Return the model's name and number of blocks."""
    models = {model: num_blocks for model, num_blocks in models.items() if is_plain(model)}
    shown = ", ".join(list(models)[:_SHOWN_MODELS]) + (", …" if len(models) > _SHOWN_MODELS else "")
    if not models:
        raise NothingServed("the swarm serves no model: start a server with --model NAME_OR_PATH")
    name = next((each for each in default_model.names_of(name) if each in models), name)
    if name and name not in models:
        raise CheckpointError(f"the swarm does not serve {name}: it has {shown}")
    if not name and len(models) > 1:
        raise CheckpointError(
            f"the swarm serves {len(models)} models, {shown}: say which one with --model swarm://NAME"
        )
    name = name or next(iter(models))
    return name, models[name]


def _revision(servers: tuple[ServerRecord, ...], name: str, wanted: str | None, weights: bytes | None) -> str:
    """Return the majority's revision: among servers that offer the ``weights``, else any weights, else all servers."""
    known = [server for server in servers if _is_possible(server)]
    if wanted is not None:
        return _only_match(name, wanted, {server.revision for server in known})
    offering = [server for server in known if server.weights and server.state is ServerState.ONLINE]
    same = [server for server in offering if server.weights == weights]
    counts = Counter(server.revision for server in within_addresses(same or offering or known, most=MAX_PER_ADDRESS))
    if not counts:
        raise CheckpointError(f"the servers of {name} cannot be read: try again")
    return min(counts, key=lambda revision: (-counts[revision], revision))


def _only_match(name: str, wanted: str, revisions: set[str]) -> str:
    """Return the only revision that begins with ``wanted``."""
    matching = [revision for revision in revisions if revision.startswith(wanted)]
    if len(matching) != 1:
        expected = " or ".join(sorted(revisions))
        raise CheckpointError(f"the swarm does not serve {name} at {wanted}: expected {expected}")
    return matching[0]


def _is_possible(server: ServerRecord) -> bool:
    """Return whether a model of this name can have this revision: a fingerprint, or a commit of a hub model."""
    if not _REVISION.fullmatch(server.revision):
        return False
    if is_fingerprint(server.revision):
        return True
    parts = server.model.split("/")
    try:
        validate_repo_id("/".join(parts[:2]))
    except HFValidationError:
        return False
    return (len(parts) > 2) == server.model.endswith(GGUF)


def _own(name: str, revision: str, asks_hub: bool) -> ModelCheckpoint | None:
    """Return the checkpoint of this revision from this machine or the hub, or None."""
    if is_fingerprint(revision):
        path = Path(default_model.locate(name))
        try:
            found = ModelCheckpoint.open(path) if path.exists() else None
        except (CheckpointError, OSError):
            return None
        if found is None or (found.name, found.revision) != (name, revision):
            return None
        _logger.info("%s: from %s", name, path)
        return found
    is_cached = _is_cached(name, revision)
    if not (is_cached or asks_hub):
        return None
    try:
        checkpoint = ModelCheckpoint.open(name, revision)
    except CheckpointError as error:
        _logger.info("%s: not from the hub: %s", name, error)
        return None
    _logger.info("%s: from the hub%s", name, "'s cache" if is_cached else "")
    return checkpoint


def _is_cached(name: str, revision: str) -> bool:
    """Return whether the hub's cache has all files of weights."""
    owner, _, rest = name.partition("/")
    if name.endswith(GGUF):
        model, _, file = rest.partition("/")
        return isinstance(try_to_load_from_cache(f"{owner}/{model}", file, revision=revision), str)
    have = {file: try_to_load_from_cache(name, file, revision=revision) for file in (CONFIG, INDEX, SINGLE)}
    if not isinstance(have[CONFIG], str) or not any(isinstance(have[file], str) for file in (INDEX, SINGLE)):
        return False
    try:
        files = ModelCheckpoint.open(name, revision).weight_files
    except CheckpointError:
        return False
    return all(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)
