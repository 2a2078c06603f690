"""Building models through transformers, whose switches are process-wide."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from transformers import AutoModel

from swarm_protocol.checkpoints.describing import describe
from tests.zoo import SUPPORTED, make_config


def test_threads_that_describe_models_at_once_leave_initialisation_switched_on():
    # Other vocabularies than elsewhere, so that no family is known already.
    configs = [make_config(name, vocab_size=131 + turn) for turn in range(2) for name in list(SUPPORTED)[:12]]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(describe, configs))
    weight = AutoModel.from_config(make_config("llama")).get_input_embeddings().weight
    assert 0.15 < weight.std() < 0.25  # the zoo's initializer_range is 0.2
