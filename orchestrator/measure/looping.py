"""Whether a text repeats itself without end: such answers are easy to draft, so they make their trial look fast.

The measure is how far the text compresses, so that prose, code, tables and languages without spaces all pass.
"""

from __future__ import annotations

import zlib

# In a shorter text a loop and a list look alike.
MIN_BYTES = 256
PIECE_BYTES = 1024
LOOP_RATIO = 0.12


def is_looping(text: str) -> bool:
    """Whether a fourth or more of the text's 1 KiB pieces, or the whole text, compresses like a loop."""
    data = text.encode("utf-8", "replace")
    if len(data) < MIN_BYTES:
        return False
    if len(data) >= 2 * PIECE_BYTES and _compressed(data) < LOOP_RATIO * len(data):
        # A whole paragraph that returns is longer than a piece.
        return True
    pieces = [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)]
    if len(pieces) > 1 and len(pieces[-1]) < PIECE_BYTES:
        pieces[-1] = data[-PIECE_BYTES:]
    loops = sum(_compressed(piece) < _loop_bytes(len(piece)) for piece in pieces)
    return loops * 4 >= len(pieces)


def _compressed(data: bytes) -> int:
    return len(zlib.compress(data, 6))


def _loop_bytes(size: int) -> float:
    # A phrase of some 60 bytes and zlib's own frame must be paid once, however short the piece is.
    return 60 + LOOP_RATIO * size * 0.5
