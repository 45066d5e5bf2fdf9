"""Global batches of a run, in order, sharded over the devices of this process."""

from __future__ import annotations

import time
from typing import Any

from jaxtrain.checkpoint import gather_json
from jaxtrain.data import Corpus, open_stream, resolve_virtual_shards, shards_of_rows, tokens_read
from jaxtrain.train.batch import owned_rows, shard_batch
from jaxtrain.train.resolve import Bound
from jaxtrain.train.step import Batch


class BatchFeed:
    """The data stream of this process; its position is the same for every mesh.

    Raises ConfigError where data.virtual_shards does not fit the batches.
    """

    def __init__(self, bound: Bound, corpus: Corpus) -> None:
        self._bound = bound
        shards = resolve_virtual_shards(bound.config.data, *(phase.global_batch for phase in bound.phases))
        first = bound.phases[0]
        # The same shards in every phase: a process holds the same share of every global batch.
        lo, hi = owned_rows(bound.batch_shapes[0], bound.batch_sharding, first.seq_len)
        self._owned = shards_of_rows(lo, hi, first.global_batch, shards)
        self._stream = open_stream(corpus.train, bound.config, self._owned)

    def next(self, phase: int) -> tuple[Batch, float]:
        """The next global batch [A, B, L] of a phase, and the seconds that were spent waiting for it."""
        begin = time.perf_counter()
        sequences = next(self._stream)
        wait = time.perf_counter() - begin
        shape = self._bound.batch_shapes[phase]
        first = self._owned.start * shape.global_batch // self._stream.virtual_shards
        return shard_batch(sequences, first, shape, self._bound.batch_sharding), wait

    def get_state(self) -> dict[str, Any]:
        """The position of all processes as JSON; every process must call it."""
        return gather_json(self._stream.get_state())

    def set_state(self, state: dict[str, Any]) -> None:
        """Move to a position that `get_state` gave."""
        self._stream.set_state(state)

    def notes(self) -> list[str]:
        """What the position of an older version changes, one line."""
        if not self._stream.epochs_overlap:
            return []
        return [
            "data: this run goes on with blocks of an older version, in which epochs of a small corpus overlap: some "
            "documents come twice before others come once; a new --run keeps epochs apart"
        ]

    def source_shares(self) -> list[dict[str, Any]]:
        """Tokens that each source gave since the run began, their share of all tokens, and epochs."""
        read, targets = tokens_read(self.get_state()), self._stream.pieces.targets.tolist()
        return [
            {"source": f"{source.kind}: {source.path}", "tokens": tokens, "share": tokens / max(sum(read), 1),
             "epochs": tokens / epoch}
            for source, tokens, epoch in zip(self._bound.config.data.sources, read, targets, strict=True)
        ]  # fmt: skip

    def close(self) -> None:
        """Stop the thread that prepares batches."""
        self._stream.close()
