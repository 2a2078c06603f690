"""The names of codecs, from the most exact to the smallest, and their sizes in bytes. Pure."""

from __future__ import annotations

from swarm_protocol.pb import swarm_pb2 as pb

CODECS: dict[str, pb.Codec] = {
    "raw": pb.RAW,
    "bf16": pb.BFLOAT16_ELEMENTS,
    "int8": pb.INT8_BLOCKS,
    "int4": pb.INT4_BLOCKS,
}
CODEC_NAMES = {codec: name for name, codec in CODECS.items()}
LADDER = tuple(CODECS)
ALWAYS_KNOWN = frozenset({"raw", "int8"})  # every peer of this wire version reads and writes these
ANNOUNCED = tuple(name for name in LADDER if name not in ALWAYS_KNOWN)  # codecs that this version also knows
INT8_BLOCK = 64  # elements that share one scale
INT4_BLOCK = 64
_OUTLIER_EVERY = 128  # one element in this many is stored separately as an outlier
_MOST_WIDTH = 1 << 16  # the widest row whose elements two bytes can number


def encoded_bytes(name: str, num_rows: int, width: int, item_bytes: int) -> int:
    """Return the encoded size of ``num_rows`` rows of ``width`` elements; a raw element has ``item_bytes`` bytes."""
    if name == "raw":
        return num_rows * width * item_bytes
    if name == "bf16":
        return num_rows * width * 2
    if name == "int8":
        return -(-num_rows * width // INT8_BLOCK) * (INT8_BLOCK + 4)
    assert name == "int4", name
    # Per block, half a byte for each element and a scale; per outlier, an index and a value. Each of these has 2 bytes.
    return num_rows * (-(-width // INT4_BLOCK) * (INT4_BLOCK // 2 + 2) + 4 * num_outliers(width))


def num_outliers(width: int) -> int:
    """Return how many elements of a row the 4-bit codec stores separately."""
    return width // _OUTLIER_EVERY if width <= _MOST_WIDTH else 0
