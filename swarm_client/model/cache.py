"""The cache that stock models and ``generate`` see: it has one layer, which stands for the session on the servers.

In a batch, rows whose text has ended leave the session, so that servers skip them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache
from transformers.generation.stopping_criteria import StoppingCriteriaList

from swarm_client.model.remote_blocks import RemoteSpan
from swarm_client.sessions.session import RemoteSession
from swarm_protocol.errors import RequestRejected
from swarm_protocol.wire.block_input import BlockInput


class RemoteLayer(CacheLayerMixin):
    """A cache layer without keys and values, which forwards the operations of a cache to the session on the servers.

    The session's first ``num_virtual`` positions belong to a trained prompt. Callers do not see them in the length.

    Attributes:
        runner: the object whose ``step`` a forward calls: the session, or the stand-in that a generation has set.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False  # nothing is to be allocated before the first forward

    def __init__(self, session: RemoteSession, num_virtual: int = 0) -> None:
        self.session = self.runner = session
        super().__init__()
        self._num_virtual = num_virtual

    # Models read this to distinguish a prompt, whose positions may see later ones, from what follows.
    is_initialized = property(lambda self: self.session.length > 0, lambda _self, _value: None)

    def stand_in(self, rows: UnfinishedRows) -> None:
        """Let later forwards call ``rows`` in the place of the session. They must not need ``step_through``."""
        self.runner = cast(RemoteSession, rows)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        raise RuntimeError("keys and values of remote blocks are on the servers")

    def get_seq_length(self) -> int:
        return max(0, self.session.length - self._num_virtual)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1  # for transformers: no limit

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.session.reorder(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.session.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.session.batch_size is not None:
            self.session.reorder(torch.arange(self.session.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:  # older versions of transformers meant the length to keep by a positive number
            raise RequestRejected("crop takes the number of positions to remove as a negative number")
        self.session.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        self.session.record_past()

    def reset(self) -> None:
        self.session.reset()

    def offload(self) -> None:
        pass

    def prefetch(self) -> None:
        pass


class RemoteCache(Cache):
    """The ``past_key_values`` of a distributed model. ``copy.deepcopy`` forks the session (``RemoteSession.fork``)."""

    def __init__(self, remote: RemoteSpan, reserve_tokens: int = 0, *, num_virtual: int = 0, **options: Any) -> None:
        """Open a session with the arguments of ``RemoteSpan.open_session``."""
        super().__init__(layers=[RemoteLayer(remote.open_session(reserve_tokens, **options), num_virtual)])

    @property
    def layer(self) -> RemoteLayer:
        layer = self.layers[0]
        assert isinstance(layer, RemoteLayer)
        return layer

    @property
    def session(self) -> RemoteSession:
        return self.layer.session

    def end_with_call(self) -> None:
        """Mark the cache as made by this call of ``generate``, so that nobody uses the cache afterwards."""
        self._is_user_defined = False


def session_of(cache: Cache, remote: RemoteSpan, num_virtual: int = 0) -> RemoteSession:
    """Return the session of ``cache``, or its stand-in.

    An empty dynamic or static cache becomes a remote one. Code for chats often makes such a cache itself.

    Raises:
        RequestRejected: the cache holds keys and values of a local model, or belongs to another model.
    """
    layers = cache.layers
    if len(layers) == 1 and isinstance(layers[0], RemoteLayer):
        if not layers[0].session.runs_on(remote.swarm):
            raise RequestRejected("past_key_values belongs to another distributed model, or to one that was closed")
        return layers[0].runner
    if not isinstance(cache, DynamicCache | StaticCache) or cache.get_seq_length() > 0:
        raise RequestRejected(
            f"past_key_values is a {type(cache).__name__} with keys and values on this machine: "
            "expected an empty DynamicCache or StaticCache, or one that this distributed model has filled"
        )
    layer = RemoteLayer(remote.open_session(), num_virtual)
    Cache.__init__(cache, layers=[layer])  # the object becomes the remote cache, because its owner will pass it again
    return layer.session


class UnfinishedRows:
    """A stand-in for a session in a cache: the model's batch keeps all rows, and the session the unfinished ones.

    It has only the methods that a generation uses while nothing reads hidden states between the blocks.
    """

    def __init__(self, session: RemoteSession, num_rows: int) -> None:
        self._session = session
        self._rows = list(range(num_rows))  # for each row of the session, its row in the batch

    @property
    def length(self) -> int:
        return self._session.length

    def step(self, inputs: BlockInput, num_wanted: int | None = None) -> torch.Tensor:
        """Run ``RemoteSession.step`` for the unfinished rows. The outputs of finished rows are zeros."""
        if len(self._rows) == len(inputs.hidden):
            return self._session.step(inputs, num_wanted)
        outputs = self._session.step(inputs.rows(self._rows), num_wanted)
        everything = outputs.new_zeros(len(inputs.hidden), *outputs.shape[1:])
        everything[self._rows] = outputs
        return everything

    def finish(self, are_finished: torch.Tensor) -> None:
        """Remove these rows from the session, unless none would be left. ``are_finished``: bool [rows]."""
        kept = [place for place, row in enumerate(self._rows) if not are_finished[row]]
        # The generation ends when all rows have finished, and until then a session needs a row.
        if 0 < len(kept) < len(self._rows):
            self._session.reorder(torch.tensor(kept))
            self._rows = [self._rows[place] for place in kept]


class _FinishingCriteria(StoppingCriteriaList):
    """The stopping criteria of a generation. Rows that meet them leave the session."""

    def __init__(self, criteria: StoppingCriteriaList, rows: UnfinishedRows) -> None:
        super().__init__(criteria)
        self._unfinished_rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        are_finished: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        self._unfinished_rows.finish(are_finished)
        return are_finished


def leaving_rows(criteria: StoppingCriteriaList, cache: Any, config: GenerationConfig, num_rows: int) -> Any:
    """Return criteria by which finished rows also leave the session of ``cache``; ``criteria`` if they must stay."""
    # Without a token that ends texts, stock code goes on choosing tokens for finished rows.
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    # The caller of ``generate`` may go on with all rows of a cache that it has passed, or that it gets back.
    is_own = isinstance(cache, RemoteCache) and not getattr(cache, "_is_user_defined", True)
    if num_rows == 1 or not ends or not is_own or config.return_dict_in_generate:
        return criteria
    rows = UnfinishedRows(cache.session, num_rows)
    cache.layer.stand_in(rows)
    return _FinishingCriteria(criteria, rows)
