"""Packed rows -> global batches that are the same whatever the number of processes, with a small exact state.

The corpus is cut into V virtual shards, a number fixed by config for a run's life. Each has its own order, packer and
place and gives global_batch / V rows an update; the global batch is their concatenation. A process owns a contiguous
range of shards, so a run may change its number of processes at any restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice

from jaxtrain.config import ConfigError, DataConfig
from jaxtrain.data.corpus import Documents
from jaxtrain.data.packing import Batch, Place, Rows, cut, fill

MAX_DEFAULT_SHARDS = 64
PREFETCH = 2

State = dict[str, Place]
"""Shard number as text -> its place: JSON, about 30 bytes a shard."""


def resolve_virtual_shards(data: DataConfig, global_batch: int) -> int:
    """The number of virtual shards; null is the largest divisor of `global_batch` up to 64.

    Raises ConfigError when the configured number does not divide the global batch.
    """
    shards = data.virtual_shards
    if shards is None:
        return max(n for n in range(1, MAX_DEFAULT_SHARDS + 1) if global_batch % n == 0)
    if global_batch % shards:
        divisors = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
        raise ConfigError(
            f"data.virtual_shards {shards} does not divide train.global_batch {global_batch} "
            f"({global_batch} / {shards} = {global_batch / shards:.4g} rows a shard): use one of {divisors}"
        )
    return shards


def shards_of_rows(lo: int, hi: int, global_batch: int, virtual_shards: int) -> range:
    """The virtual shards that hold rows lo..hi of the global batch; the first of their rows is start * rows a shard."""
    rows = global_batch // virtual_shards
    return range(lo // rows, -(-hi // rows))


class Stream(Iterator[Batch]):
    """Endless batches of the owned shards, int32 [len(shards) * global_batch / virtual_shards, length] a field.

    A thread prepares `prefetch` batches ahead; the state belongs to the batch last given out.
    Raises ConfigError when the documents hold no target at all.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        length: int,
        global_batch: int,
        virtual_shards: int,
        packing_bins: int = 32,
        seed: int = 0,
        shuffle: bool = True,
        shards: range | None = None,
        prefetch: int = PREFETCH,
    ) -> None:
        assert global_batch % virtual_shards == 0, (global_batch, virtual_shards)
        self.virtual_shards = virtual_shards
        self.shards = range(virtual_shards) if shards is None else shards
        assert self.shards and self.shards.step == 1 and self.shards.stop <= virtual_shards, self.shards
        pieces = cut(documents, length)
        if not len(pieces):
            raise ConfigError(
                f"data.sources give {len(documents)} documents to train on and none has a token to predict: "
                "bring more text, or lower data.held_out"
            )

        self._pieces, self._length, self._share = pieces, length, global_batch // virtual_shards
        self._rows = {
            str(shard): Rows(
                pieces,
                length=length,
                bins=packing_bins,
                seed=seed,
                shuffle=shuffle,
                shard=shard,
                shards=virtual_shards,
            )
            for shard in self.shards
        }
        self._place = self._places()
        self._prefetch = prefetch
        self._pending: deque[Future[tuple[Batch, State]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")

    def __next__(self) -> Batch:
        while len(self._pending) <= self._prefetch:
            self._pending.append(self._thread.submit(self._produce))
        batch, self._place = self._pending.popleft().result()
        return batch

    def get_state(self) -> State:
        """The place of every owned shard, after the batch last given out."""
        return self._place

    def set_state(self, state: Mapping[str, Place]) -> None:
        """Go to a saved place; `state` may hold other shards too. One plan of rows a shard is made again.

        Raises ConfigError when an owned shard is missing.
        """
        missing = [str(shard) for shard in self.shards if str(shard) not in state]
        if missing:
            raise ConfigError(
                f"the saved data position lacks shard {', '.join(missing)} (it has {len(state)} shards, "
                f"data.virtual_shards is {self.virtual_shards}): the number is fixed for a run's life, set it back"
            )
        self._drop_pending()
        for name, rows in self._rows.items():
            rows.set_state(state[name])
        self._place = self._places()

    def close(self) -> None:
        """Stop the thread; the stream gives no more batches."""
        self._drop_pending()
        self._thread.shutdown()

    def _produce(self) -> tuple[Batch, State]:
        rows = [next(shard) for shard in self._rows.values() for _ in range(self._share)]
        return fill(self._pieces, rows, self._length), self._places()

    def _places(self) -> State:
        return {name: rows.get_state() for name, rows in self._rows.items()}

    def _drop_pending(self) -> None:
        for future in self._pending:
            future.cancel()
        wait(self._pending)
        self._pending.clear()


def held_out_batches(
    documents: Documents, length: int, global_batch: int, batches: int, packing_bins: int = 32
) -> list[Batch]:
    """At most `batches` global batches, int32 [global_batch, length] a field, of one pass, the same in every process.

    The documents come in one fixed shuffled order, so that a few batches are a fair sample. The last batch is filled
    up with rows of padding; a batch of nothing but padding is not given, so no documents give an empty list.
    """
    pieces = cut(documents, length)
    if not len(pieces):
        return []
    order = Rows(pieces, length=length, bins=packing_bins, seed=0, shuffle=True, epochs=1)
    rows = list(islice(order, batches * global_batch))
    rows += [[]] * (-len(rows) % global_batch)
    return [fill(pieces, rows[lo : lo + global_batch], length) for lo in range(0, len(rows), global_batch)]
