"""Blocks of tiny models, loaded once for all tests of a module, and room for their sessions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.kv.kv_cache import CacheBudget
from tests.zoo import save_checkpoint


@pytest.fixture(scope="module")
def stack_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], BlockStack]:
    """Return all blocks of a member of the zoo."""

    @functools.cache
    def load(name: str) -> BlockStack:
        directory = tmp_path_factory.mktemp(name)
        save_checkpoint(name, directory)
        checkpoint = ModelCheckpoint.open(directory)
        return load_blocks(checkpoint, checkpoint.family.all_blocks)

    return load


@pytest.fixture
def llama(stack_of: Callable[[str], BlockStack]) -> BlockStack:
    return stack_of("llama")


@pytest.fixture
def budget() -> CacheBudget:
    """Return room for more than any test needs."""
    return CacheBudget(1 << 30, 1)
