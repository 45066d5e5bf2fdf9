"""gzip and zstd streams, recognised by their first bytes: the name of a file may lack .gz or .zst."""

from __future__ import annotations

import io
from typing import Any, BinaryIO, Literal

import pyarrow as pa

from jaxtrain.data.files import READ_BLOCK

Codec = Literal["gzip", "zstd"]
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# zstd readers refuse a larger window unless they are told to reserve its memory; Arrow's cannot be told.
ZSTD_WINDOW = 2**27 + 1
WINDOW_FAULT = "too much memory for decoding"
CODEC_HEAD = 4
FRAME_HEAD = 18


def codec_of(head: bytes) -> Codec | None:
    """The codec of a stream that begins so; None is none of ours."""
    # Deflate is the only method of gzip, and three bits of its flags are always zero.
    if head[:3] == b"\x1f\x8b\x08" and not head[3:4] > b"\x1f":
        return "gzip"
    # A file may begin with a frame that readers skip, as pzstd writes it.
    skipped = head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5
    return "zstd" if head[:4] == ZSTD_MAGIC or skipped else None


def uncompressed(raw: BinaryIO) -> tuple[Any, Codec | None]:
    """A stream of the content of a file that stands at its beginning, and the file's codec."""
    codec = codec_of(raw.read(CODEC_HEAD))
    raw.seek(0)
    # Arrow's streams cannot read lines.
    return (io.BufferedReader(pa.CompressedInputStream(raw, codec), READ_BLOCK) if codec else raw), codec  # type: ignore[type-var]


def zstd_window(head: bytes) -> int:
    """Bytes of the window of a zstd frame (RFC 8878, section 3.1.1.1); 0 where `head` is none."""
    if head[:4] != ZSTD_MAGIC or len(head) < FRAME_HEAD:
        return 0
    flags = head[4]
    if not flags >> 5 & 1:
        base = 1 << (10 + (head[5] >> 3))
        return base + base // 8 * (head[5] & 7)
    # A frame of a single segment has no window: its whole content is one.
    at = 5 + (0, 1, 2, 4)[flags & 3]
    size = (1, 2, 4, 8)[flags >> 6]
    return int.from_bytes(head[at : at + size], "little") + (256 if size == 2 else 0)
