"""Packed rows -> global batches that are the same whatever the number of processes, with a small exact state.

The corpus is cut into V virtual shards, a number fixed by config for a run's life. Each has its own order, packer and
place and gives global_batch / V rows an update; the global batch is their concatenation. A process owns a contiguous
range of shards, so a run may change its number of processes at any restart. Where a schedule changes the length, each
shard's rows that were planned and not given out are laid anew before the rest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice

import grain
import numpy as np

from jaxtrain.config import ConfigError, DataConfig, RunConfig
from jaxtrain.data.corpus import Documents
from jaxtrain.data.mixing import Mixture
from jaxtrain.data.packing import HostBatch, Place, Rows, Span, fill
from jaxtrain.data.phases import Phase, phase_at, phases_of
from jaxtrain.data.pieces import cut

MAX_DEFAULT_SHARDS = 64
PREFETCH = 2

StreamState = dict[str, Place]
"""Shard number as text -> its place: JSON, about 80 bytes a shard."""


def resolve_virtual_shards(data: DataConfig, *global_batches: int) -> int:
    """The number of virtual shards; null is the largest common divisor of the global batches up to 64.

    Raises ConfigError when the configured number does not divide a global batch.
    """
    shards, common = data.virtual_shards, math.gcd(*global_batches)
    if shards is None:
        return max(n for n in range(1, MAX_DEFAULT_SHARDS + 1) if common % n == 0)
    if common % shards:
        batch = next(batch for batch in global_batches if batch % shards)
        divisors = [n for n in range(1, common + 1) if common % n == 0]
        raise ConfigError(
            f"data.virtual_shards {shards} does not divide train.global_batch {batch} "
            f"({batch} / {shards} = {batch / shards:.4g} rows a shard): use one of {divisors}"
        )
    return shards


def shards_of_rows(lo: int, hi: int, global_batch: int, virtual_shards: int) -> range:
    """The virtual shards that hold rows lo..hi of the global batch; the first of their rows is start * rows a shard."""
    rows = global_batch // virtual_shards
    return range(lo // rows, -(-hi // rows))


def open_stream(
    documents: Documents, config: RunConfig, shards: range | None = None, prefetch: int = PREFETCH
) -> Stream:
    """The stream of a run over `documents`, of all virtual shards or those a process owns; see Batches."""
    return iter(Batches(documents, config, shards, prefetch))


class Batches(grain.IterDataset[HostBatch]):
    """A run's batches as a Grain dataset: Grain's transformations compose on it, and keep its exact state.

    Order, packing and prefetch are our own below Grain's interface: its shuffle costs milliseconds a read on a few
    records, and its packers replay tokens for a second or more when 64 shards resume.
    Raises ConfigError when a source has no target, or the virtual shards do not divide the global batches.
    """

    def __init__(
        self, documents: Documents, config: RunConfig, shards: range | None = None, prefetch: int = PREFETCH
    ) -> None:
        super().__init__()
        self._source = (documents, config, shards, prefetch)

    def __iter__(self) -> Stream:
        documents, config, shards, prefetch = self._source
        data, phases = config.data, phases_of(config.data, config.train)
        return Stream(
            documents,
            phases=phases,
            virtual_shards=resolve_virtual_shards(data, *(phase.global_batch for phase in phases)),
            weights=[source.weight for source in data.sources],
            epochs=[source.epochs for source in data.sources],
            packing=data.packing,
            long=data.overlong,
            packing_bins=data.packing_bins,
            seed=config.train.seed,
            shuffle=data.shuffle,
            shards=shards,
            prefetch=prefetch,
        )


@dataclass
class _Shard:
    """Rows of the current phase, the place at which the phase before ended, inputs given so far by source."""

    rows: Rows
    phase: int
    before: Place | None
    read: list[int]


class Stream(grain.DatasetIterator[HostBatch]):
    """Batches of the owned shards, int32 [len(shards) * global_batch / virtual_shards, length] of the phase a field.

    A thread prepares `prefetch` batches ahead; the state belongs to the batch last given out. `weights` and `epochs`
    are those of each source. Raises ConfigError when a source holds no target at all, and from `next` when all
    sources have had their epochs.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        phases: Sequence[Phase],
        virtual_shards: int,
        weights: Sequence[float] = (1.0,),
        epochs: Sequence[float | None] = (None,),
        packing: str = "first_fit",
        long: str = "split",
        packing_bins: int = 32,
        seed: int = 0,
        shuffle: bool = True,
        shards: range | None = None,
        prefetch: int = PREFETCH,
    ) -> None:
        super().__init__()
        # First, because Grain closes an iterator that could not be made, too.
        self._prefetch = prefetch
        self._pending: deque[Future[tuple[HostBatch, StreamState]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        assert all(phase.global_batch % virtual_shards == 0 for phase in phases), (phases, virtual_shards)
        self.virtual_shards, self.phases = virtual_shards, tuple(phases)
        self.shards = range(virtual_shards) if shards is None else shards
        assert self.shards and self.shards.step == 1 and self.shards.stop <= virtual_shards, self.shards
        self.pieces = cut(documents, max(phase.seq_len for phase in phases), sources=len(weights), long=long)
        self._mixture = Mixture(self.pieces, weights, epochs, seed=seed, shuffle=shuffle)
        self._options = {"packing": packing, "bins": packing_bins, "shuffle": shuffle}
        self._update = 0
        self._shards = {str(shard): self._born(shard) for shard in self.shards}
        self._place = self._places()

    def __next__(self) -> HostBatch:
        while len(self._pending) <= self._prefetch:
            self._pending.append(self._thread.submit(self._produce))
        batch, self._place = self._pending.popleft().result()
        return batch

    def get_state(self) -> StreamState:
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
        self._shards = {str(shard): self._at(shard, state[str(shard)]) for shard in self.shards}
        self._update = state[str(self.shards.start)]["update"]
        self._place = self._places()

    def close(self) -> None:
        """Stop the thread; the stream gives no more batches."""
        super().close()
        self._drop_pending()
        # Without waiting: the last one to let go of the stream may be its own thread, idle by then.
        self._thread.shutdown(wait=False)

    def _produce(self) -> tuple[HostBatch, StreamState]:
        index = phase_at(self.phases, self._update)
        phase = self.phases[index]
        rows: list[list[Span]] = []
        for number, shard in zip(self.shards, self._shards.values(), strict=True):
            if shard.phase != index:
                self._enter(number, shard, index)
            given = list(islice(shard.rows, phase.global_batch // self.virtual_shards))
            if len(given) < phase.global_batch // self.virtual_shards:
                raise ConfigError(
                    f"data.sources are used up after {self._update} updates, every source has had its epochs: "
                    "lower train.steps, raise epochs, or let one source repeat (epochs: null)"
                )
            for row in given:
                for source, _, size in row:
                    shard.read[source] += size
            rows += given
        self._update += 1
        return fill(self.pieces.documents, rows, phase.seq_len), self._places()

    def _born(self, shard: int, phase: int = 0, carried: Sequence[Span] = (), base: int = 0) -> _Shard:
        rows = Rows(
            self._mixture,
            length=self.phases[phase].seq_len,
            shard=shard,
            shards=self.virtual_shards,
            carried=carried,
            base=base,
            **self._options,  # type: ignore[arg-type]
        )
        return _Shard(rows, phase, None, [0] * len(self.pieces.targets))

    def _enter(self, number: int, shard: _Shard, phase: int) -> None:
        place, rest = self._place_of(shard), shard.rows.rest()
        shard.rows, shard.phase, shard.before = self._born(number, phase, *rest).rows, phase, place

    def _at(self, number: int, place: Place) -> _Shard:
        rest = self._at(number, place["before"]).rows.rest() if "before" in place else ([], 0)
        shard = self._born(number, place["phase"], *rest)
        shard.rows.go(place["cursor"], place["skip"], place["row"])
        shard.before = place.get("before")
        # A corpus that was changed on purpose may have more or fewer sources than the place.
        shard.read = [*place["read"], *shard.read][: len(shard.read)]
        return shard

    def _place_of(self, shard: _Shard) -> Place:
        rows = shard.rows
        place = {
            "update": self._update,
            "phase": shard.phase,
            "cursor": rows.cursor,
            "skip": rows.skip,
            "row": rows.row,
            "read": list(shard.read),
        }
        return place | ({"before": shard.before} if rows.carries else {})

    def _places(self) -> StreamState:
        return {name: self._place_of(shard) for name, shard in self._shards.items()}

    def _drop_pending(self) -> None:
        for future in self._pending:
            future.cancel()
        wait(self._pending)
        self._pending.clear()


def tokens_read(state: Mapping[str, Place]) -> list[int]:
    """Inputs given out so far of each source, over all shards of a state."""
    return np.sum([place["read"] for place in state.values()], axis=0).tolist()


def held_out_batches(
    documents: Documents,
    length: int,
    global_batch: int,
    batches: int,
    packing_bins: int = 32,
    packing: str = "first_fit",
) -> list[HostBatch]:
    """At most `batches` global batches, int32 [global_batch, length] a field, of one pass, the same in every process.

    The documents, of whatever source, come in one fixed shuffled order, so that a few batches are a fair sample. The
    last batch is filled up with rows of padding; a batch of nothing but padding is not given, so no documents give an
    empty list.
    """
    whole = Documents(documents.tokens, documents.starts, documents.stops, documents.names, documents.scored)
    pieces = cut(whole, length)
    if not len(pieces):
        return []
    mixture = Mixture(pieces, [1.0], [1], seed=0, shuffle=True)
    rows = list(islice(Rows(mixture, length=length, packing=packing, bins=packing_bins), batches * global_batch))
    rows += [[]] * (-len(rows) % global_batch)
    return [fill(whole, rows[lo : lo + global_batch], length) for lo in range(0, len(rows), global_batch)]
