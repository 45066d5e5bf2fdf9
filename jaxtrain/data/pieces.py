"""Documents -> pieces: runs of inputs with one label each, the unit that is shuffled, mixed and packed.

A document of n tokens has n - 1 targets, and each is read exactly once an epoch: its inputs are cut every L tokens.
The label of a piece's last input is the first token of the next piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxtrain.data.corpus import Documents


@dataclass(frozen=True)
class Pieces:
    """The pieces of all documents, in order: piece i has inputs tokens[starts[i]:][:sizes[i]] and as many labels.

    `source` is the index of each piece's source. Dropped documents have no piece; their targets are counted by source.
    """

    documents: Documents
    starts: np.ndarray
    sizes: np.ndarray
    source: np.ndarray
    dropped_documents: np.ndarray
    dropped_targets: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def targets(self) -> np.ndarray:
        """Targets of each source in an epoch (int64)."""
        return np.bincount(self.source, self.sizes, minlength=len(self.dropped_targets)).astype(np.int64)


def cut(documents: Documents, seq_len: int, *, sources: int = 1, overlong: str = "split") -> Pieces:
    """Cut documents into pieces of at most `seq_len` inputs; a document of n tokens gives ceil((n - 1) / seq_len).

    `sources` is the number of sources; overlong="drop" leaves out documents of more than `seq_len` targets.
    """
    targets = documents.lengths - 1
    source = np.zeros(len(documents), np.int32) if documents.source is None else documents.source
    dropped = (targets > seq_len) & (overlong == "drop")
    counts = np.where(dropped, 0, -(-targets // seq_len))
    first = np.cumsum(counts) - counts
    within = (np.arange(counts.sum()) - np.repeat(first, counts)) * seq_len
    return Pieces(
        documents,
        np.repeat(documents.starts, counts) + within,
        np.minimum(np.repeat(targets, counts) - within, seq_len),
        np.repeat(source, counts),
        np.bincount(source[dropped], minlength=sources),
        np.bincount(source[dropped], targets[dropped], minlength=sources).astype(np.int64),
    )
