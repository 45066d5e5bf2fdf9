"""The header of .bin token files that llm.c and modded-nanogpt write.

256 int32, little-endian: magic, version, number of tokens, the rest zero (llm.c, dev/data/data_common.py). A document
begins with a token that separates documents: the end token of GPT-2, the opening token of Llama 3.
"""

from __future__ import annotations

import struct

import numpy as np

from jaxtrain.config import ConfigError, SourceConfig
from jaxtrain.data.files import File

HEADER_BYTES = 1024
DTYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
OTHERS = {20240326: "a model of llm.c", 20240522: "an evaluation of llm.c"}


def read_header(file: File, head: bytes, source: SourceConfig) -> np.dtype | None:
    """The dtype of the tokens after a header; None where a file begins with tokens.

    Raises ConfigError: an unknown version, another number of tokens than the header says, another dtype than set.
    """
    if len(head) < 12:
        return None
    magic, version, count = struct.unpack("<3i", head[:12])
    if magic in OTHERS:
        raise ConfigError(f"{file.url} is {OTHERS[magic]}, no token file: leave it out with exclude")
    if magic not in {magic for magic, _ in DTYPES}:
        return None
    if (magic, version) not in DTYPES:
        known = ", ".join(f"{magic} with version {version}" for magic, version in DTYPES)
        raise ConfigError(
            f"{file.url} has llm.c's header with magic {magic} and version {version}; known are {known}: write it again"
        )
    dtype = np.dtype(DTYPES[magic, version]).newbyteorder("<")
    check_dtype(file, dtype, source, "its header says")
    need = HEADER_BYTES + count * dtype.itemsize
    if count < 1 or file.size != need:
        raise ConfigError(
            f"{file.url} has {file.size} bytes where llm.c's header describes {count} tokens of {dtype.name}, {need} "
            "bytes: it is truncated; fetch it again"
        )
    return dtype


def check_dtype(file: File, dtype: np.dtype, source: SourceConfig, what: str) -> None:
    """Raise ConfigError when the source's dtype has another width than the one that a file names."""
    if source.dtype is not None and np.dtype(source.dtype).itemsize != dtype.itemsize:
        raise ConfigError(
            f"{file.url} holds {dtype.name}, {what}, and dtype of the source is {source.dtype}: remove dtype, "
            "or list the files that need it as a source of their own"
        )
