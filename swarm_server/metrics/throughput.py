"""The speed of this server: measured when it starts, cached for the next start, updated while it works."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
import torch

from swarm_protocol.atomic_file import written_atomically
from swarm_protocol.span import Span
from swarm_protocol.system import processor_name
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import Session, SessionStep
from swarm_server.engine.ways import opened, outputs_of
from swarm_server.machine.cores import CoreShare

_logger = logging.getLogger(__name__)
_MIN_TIME_S = 0.2  # of one measurement
_CONTEXT_TOKENS = 32  # in the cache of a measured decode step, at least
_FORWARD_TOKENS = 64  # of a measured prompt; smaller batches take more time per token
_WEIGHT = 0.02  # weight of one batch in the moving average
_CACHE_LIFETIME_S = 7 * 24 * 3600.0  # afterwards the machine is measured again
_WORTH_ANNOUNCING = 0.25  # relative: smaller changes are noise, which must not make servers move to other blocks


@dataclass(frozen=True)
class Speeds:
    """Speeds in tokens per second: of decoding one token at a time, and of many at a time (prompts, training)."""

    decode_tokens_per_s: float
    forward_tokens_per_s: float

    def per_block(self, num_blocks: int) -> Speeds:
        """Return the speeds of a single block, if ``self`` describes a span of ``num_blocks`` blocks."""
        return Speeds(self.decode_tokens_per_s * num_blocks, self.forward_tokens_per_s * num_blocks)

    def through(self, num_blocks: int) -> Speeds:
        """Return the speeds of a span of ``num_blocks`` blocks, if ``self`` describes a single block."""
        return Speeds(self.decode_tokens_per_s / num_blocks, self.forward_tokens_per_s / num_blocks)


def measure(engine: Engine, blocks: Span) -> Speeds:
    """Return the speeds through ``blocks``, from decode steps after a short prompt and from prompts of 64 tokens."""
    session = opened(engine, blocks, _FORWARD_TOKENS)
    _step(engine, session, 0, _CONTEXT_TOKENS)
    # A step at an earlier position than the last one crops the session, so that it never outgrows its room.
    decode = _per_second(lambda number: _step(engine, session, _CONTEXT_TOKENS + number % _CONTEXT_TOKENS, 1))
    engine.close(session)

    def prompt(_number: int) -> None:
        session = opened(engine, blocks, _FORWARD_TOKENS)
        _step(engine, session, 0, _FORWARD_TOKENS)
        engine.close(session)

    return Speeds(decode, _FORWARD_TOKENS * _per_second(prompt))


def _per_second(call: Callable[[int], None]) -> float:
    """Return how many calls per second take place. ``call`` gets rising numbers; the first call warms up."""
    call(0)
    start, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - start < _MIN_TIME_S:
        call(count + 1)
        count += 1
    return count / (time.perf_counter() - start)


def _step(engine: Engine, session: Session, start: int, num_tokens: int) -> None:
    hidden = torch.zeros(1, num_tokens, engine.hidden_size)
    outputs_of(engine, [(session, SessionStep(start, BlockInput(hidden)))])


# ---------------------------------------------------------------- while the server works


class Meter:
    """A moving average of real batch times, which reports the speeds when they have changed. Thread-safe.

    Decoding is measured per batch, because a session waits for its whole batch. Only one row per session counts: the
    time of its further rows is estimated from prompts and subtracted.
    """

    def __init__(self, measured: Speeds, num_blocks: int, on_change: Callable[[Speeds], None] | None) -> None:
        """Start from ``measured``. ``on_change`` gets changed speeds of one block; None turns measuring off."""
        self._announced = measured.per_block(num_blocks)
        self._decode_s = 1 / self._announced.decode_tokens_per_s  # per token in one block
        self._forward_s = 1 / self._announced.forward_tokens_per_s
        self._num_blocks = num_blocks
        self._on_change = on_change

    @property
    def speeds(self) -> Speeds:
        """Return the last reported speeds through all hosted blocks."""
        return self._announced.through(self._num_blocks)

    def add(self, num_blocks: int, num_rows: int, num_tokens: int, seconds: float, num_sessions: int = 1) -> None:
        """Add the time of a batch: ``num_rows`` rows of ``num_tokens`` tokens each, through ``num_blocks`` blocks."""
        if self._on_change is None or seconds <= 0:
            return
        if num_tokens == 1:
            further_s = (num_rows - num_sessions) * self._forward_s
            self._decode_s += _WEIGHT * (max(seconds / num_blocks - further_s, self._forward_s) - self._decode_s)
        elif num_rows * num_tokens >= _FORWARD_TOKENS:
            self._forward_s += _WEIGHT * (seconds / (num_blocks * num_rows * num_tokens) - self._forward_s)
        now = Speeds(1 / self._decode_s, 1 / self._forward_s)
        if _differ(now.decode_tokens_per_s, self._announced.decode_tokens_per_s) or _differ(
            now.forward_tokens_per_s, self._announced.forward_tokens_per_s
        ):
            self._announced = now
            self._on_change(now)


def _differ(new: float, old: float) -> bool:
    return abs(new - old) > _WORTH_ANNOUNCING * old


# ---------------------------------------------------------------- from one start to the next


class SpeedCache:
    """A cache of one-block speeds in the user's cache directory: a file per model, setting, machine and core share."""

    def __init__(self, setting: Sequence[str], cores: CoreShare, directory: Path | None = None) -> None:
        self._setting = list(setting)
        self._cores = cores
        self._directory = directory or platformdirs.user_cache_path("swarm") / "speeds"

    def read(self) -> Speeds | None:
        """Return the cached speeds; None if there are no valid ones of the last week."""
        path = self._path()
        try:
            if time.time() - path.stat().st_mtime > _CACHE_LIFETIME_S:
                return None
            cached = json.loads(path.read_text())
            speeds = Speeds(float(cached["decode_tokens_per_s"]), float(cached["forward_tokens_per_s"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return speeds if 0 < speeds.decode_tokens_per_s < 1e12 and 0 < speeds.forward_tokens_per_s < 1e12 else None

    def write(self, per_block: Speeds) -> None:
        path = self._path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_atomically(path) as partial:
                partial.write_text(json.dumps({"setting": self._key(), **asdict(per_block)}))
        except OSError as error:
            _logger.debug("the speeds could not be cached: %s", error)

    def _key(self) -> list[str]:
        return [*self._setting, torch.__version__, f"{self._cores.threads()} threads"]

    def _path(self) -> Path:
        return self._directory / f"{hashlib.sha256(json.dumps(self._key()).encode()).hexdigest()[:32]}.json"


def hardware_name(devices: Sequence[torch.device]) -> str:
    """Return the model names of the processors that compute."""
    if devices[0].type in ("cuda", "xpu"):
        return ", ".join(map(torch.get_device_module(devices[0]).get_device_name, devices))
    return processor_name()
