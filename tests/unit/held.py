"""How much memory objects keep: every storage of tensors and every ``bytes`` that can be reached from them, once."""

from __future__ import annotations

import gc
import sys
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor


def held_bytes(*roots: Any) -> int:
    """What modules and classes keep does not count, nor what graphs of autograd have saved."""
    seen = {id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    sizes: dict[tuple[str, int], int] = {}
    waiting = list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FrameType):
            continue
        seen.add(id(each))
        if isinstance(each, bytes | bytearray):
            sizes["bytes", id(each)] = len(each)
        elif isinstance(each, Tensor):
            storage = each.untyped_storage()
            sizes["storage", storage.data_ptr()] = storage.nbytes()
        waiting += gc.get_referents(each)
    return sum(sizes.values())
