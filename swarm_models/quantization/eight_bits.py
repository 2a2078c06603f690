"""The linear layers that ``--quant int4`` holds in 8 bits, because a model loses most by rounding these to 4."""

from __future__ import annotations

from swarm_models.checkpoints.family import Family

MORE_BITS = 0.48  # extra bits per parameter of the model; 4-bit groups take 4.5, so that the total is below 5
_DIFFERENCE = 3.6  # extra bits of a weight in 8 bits, if the scales are of rows of 320 inputs or more

_VALUE = {"v_proj", "kv_a_proj_with_mqa", "kv_b_proj"}  # the last two are DeepSeek's, for keys and values
_KEY = {"k_proj"}
_DOWN = {"down_proj", "fc2", "c_proj", "fc_out", "w2", "dense_4h_to_h"}
_ATTENTION = {"attn", "attention", "self_attn", "self_attention"}  # attention has a c_proj in some families, too


def eight_bit_layers(family: Family) -> tuple[frozenset[str], ...]:
    """Return the names of the 8-bit layers within each block, which are the same on every server of a model.

    Value projections come first, then key projections, then down projections from the first and last block inwards,
    until ``MORE_BITS`` are spent. Routed experts and fused query-key-value layers stay in 4 bits.
    """
    last = family.num_blocks - 1
    candidates = sorted(
        (kind, min(index, last - index) if kind == 2 else index, index, name, num_weights)
        for index, linears in enumerate(family.linears)
        for name, num_weights in linears
        if (kind := _sensitivity(name)) is not None
    )
    left_bits = MORE_BITS * sum(family.block_parameters)
    chosen: list[set[str]] = [set() for _ in range(family.num_blocks)]
    for _, _, index, name, num_weights in candidates:
        if _DIFFERENCE * num_weights <= left_bits:
            left_bits -= _DIFFERENCE * num_weights
            chosen[index].add(name)
    return tuple(map(frozenset, chosen))


def _sensitivity(name: str) -> int | None:
    """Return the rank of a kind of layer, 0 for the most sensitive; None for a layer that stays in 4 bits."""
    *path, kind = name.split(".")
    if "experts" in path:
        return None
    if kind in _VALUE:
        return 0
    if kind in _KEY:
        return 1
    return 2 if kind in _DOWN and _ATTENTION.isdisjoint(path) else None
