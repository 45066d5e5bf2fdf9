"""Packed sequences -> global batches that are the same for any number of processes, with a small exact state.

The corpus is cut into V virtual shards; V is fixed for a run's life. Each shard has its own order, packer and position
and gives global_batch / V sequences a step; the global batch is their concatenation. A process owns a contiguous range
of shards, so a run may change its number of processes at any restart. Where a schedule changes seq_len, the sequences
that a shard has packed and not returned are packed again at the new seq_len, before the rest.
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

from jaxtrain.config import ConfigError, DataConfig, RunConfig, SourceConfig
from jaxtrain.data.corpus import Documents
from jaxtrain.data.mixing import Mixture
from jaxtrain.data.packing import HostBatch, PackedSequences, PieceSpan, StreamPosition, fill
from jaxtrain.data.phases import Phase, phase_at, phases_of
from jaxtrain.data.pieces import cut

MAX_DEFAULT_SHARDS = 64
PREFETCH = 2

StreamState = dict[str, StreamPosition]
"""Shard number as text -> its position: JSON, about 100 bytes a shard."""


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
            f"({batch} / {shards} = {batch / shards:.4g} sequences a shard): use one of {divisors}"
        )
    return shards


def shards_of_rows(lo: int, hi: int, global_batch: int, virtual_shards: int) -> range:
    """The virtual shards that hold rows lo..hi (sequences) of the global batch.

    The first row of the range is start * global_batch / virtual_shards.
    """
    each = global_batch // virtual_shards
    return range(lo // each, -(-hi // each))


def open_stream(
    documents: Documents, config: RunConfig, shards: range | None = None, prefetch: int = PREFETCH
) -> Stream:
    """The stream of a run over `documents`, of all virtual shards or of those that a process owns; see Batches."""
    return iter(Batches(documents, config, shards, prefetch))


class Batches(grain.IterDataset[HostBatch]):
    """A run's batches as a Grain dataset: Grain's transformations compose on it and keep its exact state.

    Order, packing and prefetch are implemented here, below Grain's interface: Grain's shuffle costs milliseconds a
    read on a few records, and its packers replay tokens for a second or more when 64 shards resume.
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
        # Documents that a script brings itself need no data.sources: they are one source.
        sources = data.sources or [SourceConfig(text="")]
        return Stream(
            documents,
            phases=phases,
            virtual_shards=resolve_virtual_shards(data, *(phase.global_batch for phase in phases)),
            weights=[source.weight for source in sources],
            epochs=[source.epochs for source in sources],
            packing=data.packing,
            overlong=data.overlong,
            packing_bins=data.packing_bins,
            seed=config.train.seed,
            shuffle=data.shuffle,
            shards=shards,
            prefetch=prefetch,
        )


@dataclass
class _Shard:
    """Sequences of the current phase, the position at which the phase before ended, inputs read so far by source."""

    sequences: PackedSequences
    phase: int
    before: StreamPosition | None
    read: list[int]


class Stream(grain.DatasetIterator[HostBatch]):
    """Batches of the owned shards: for each field int32 [len(shards) * global_batch / virtual_shards, seq_len].

    global_batch and seq_len are those of the phase. A thread prepares `prefetch` batches ahead; the state belongs to
    the batch returned last. `weights` and `epochs` are those of each source. Raises ConfigError when a source has no
    target at all, and from `next` when the epochs of all sources are used up.
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
        overlong: str = "split",
        packing_bins: int = 32,
        seed: int = 0,
        shuffle: bool = True,
        shards: range | None = None,
        prefetch: int = PREFETCH,
    ) -> None:
        super().__init__()
        # Set first: Grain also calls close() on an iterator whose construction failed.
        self._prefetch = prefetch
        self._pending: deque[Future[tuple[HostBatch, StreamState]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        assert all(phase.global_batch % virtual_shards == 0 for phase in phases), (phases, virtual_shards)
        self.virtual_shards, self.phases = virtual_shards, tuple(phases)
        self.shards = range(virtual_shards) if shards is None else shards
        assert self.shards and self.shards.step == 1 and self.shards.stop <= virtual_shards, self.shards
        self.pieces = cut(documents, max(phase.seq_len for phase in phases), sources=len(weights), overlong=overlong)
        self._mixture = Mixture(self.pieces, weights, epochs, seed=seed, shuffle=shuffle)
        self._options = {"packing": packing, "bins": packing_bins, "shuffle": shuffle}
        self._step = 0
        self._shards = {str(shard): self._new_shard(shard) for shard in self.shards}
        self._state = self._positions()

    def __next__(self) -> HostBatch:
        while len(self._pending) <= self._prefetch:
            self._pending.append(self._thread.submit(self._produce))
        batch, self._state = self._pending.popleft().result()
        return batch

    def get_state(self) -> StreamState:
        """The position of every owned shard after the batch returned last."""
        return self._state

    def set_state(self, state: Mapping[str, StreamPosition]) -> None:
        """Go to the position of an earlier `get_state`; `state` may hold other shards too. Packs one block a shard.

        Raises ConfigError when an owned shard is missing.
        """
        missing = [str(shard) for shard in self.shards if str(shard) not in state]
        if missing:
            raise ConfigError(
                f"the data position of the checkpoint lacks shard {', '.join(missing)} (it has {len(state)} shards, "
                f"data.virtual_shards is {self.virtual_shards}): the number is fixed for a run's life, set it back"
            )
        self._drop_pending()
        self._shards = {str(shard): self._shard_at(shard, state[str(shard)]) for shard in self.shards}
        self._step = state[str(self.shards.start)]["update"]
        self._state = self._positions()

    @property
    def epochs_overlap(self) -> bool:
        """Whether the position is one of a version whose blocks mix the epochs of small sources; the run goes on so."""
        return not all(shard.sequences.epoch_borders for shard in self._shards.values())

    def close(self) -> None:
        """Stop the thread; the stream returns no more batches."""
        super().close()
        self._drop_pending()
        # Without waiting: the last reference to the stream may be dropped by its own thread, which is idle by then.
        self._thread.shutdown(wait=False)

    def _produce(self) -> tuple[HostBatch, StreamState]:
        index = phase_at(self.phases, self._step)
        phase = self.phases[index]
        sequences: list[list[PieceSpan]] = []
        for number, shard in zip(self.shards, self._shards.values(), strict=True):
            if shard.phase != index:
                self._begin_phase(number, shard, index)
            taken = list(islice(shard.sequences, phase.global_batch // self.virtual_shards))
            if len(taken) < phase.global_batch // self.virtual_shards:
                raise ConfigError(
                    f"data.sources are used up after {self._step} steps: every source has reached its epochs. Lower "
                    "train.steps, raise epochs, or let one source repeat (epochs: null)"
                )
            for spans in taken:
                for source, _, size in spans:
                    shard.read[source] += size
            sequences += taken
        self._step += 1
        return fill(self.pieces.documents, sequences, phase.seq_len), self._positions()

    def _new_shard(
        self,
        shard: int,
        phase: int = 0,
        carried: Sequence[PieceSpan] = (),
        base: int = 0,
        epoch_borders: bool = True,
    ) -> _Shard:
        sequences = PackedSequences(
            self._mixture,
            seq_len=self.phases[phase].seq_len,
            shard=shard,
            shards=self.virtual_shards,
            carried=carried,
            base=base,
            epoch_borders=epoch_borders,
            **self._options,  # type: ignore[arg-type]
        )
        return _Shard(sequences, phase, None, [0] * len(self.pieces.targets))

    def _begin_phase(self, number: int, shard: _Shard, phase: int) -> None:
        position, old = self._position_of(shard), shard.sequences
        shard.sequences = self._new_shard(number, phase, *old.remaining(), old.epoch_borders).sequences
        shard.phase, shard.before = phase, position

    def _shard_at(self, number: int, position: StreamPosition) -> _Shard:
        before = position.get("before")
        remaining = self._shard_at(number, before).sequences.remaining() if before else ([], 0)
        shard = self._new_shard(number, position["phase"], *remaining, position.get("epoch_borders", False))
        shard.sequences.seek(position["cursor"], position["skip"], position["row"])
        shard.before = before
        # A corpus that was changed on purpose may have more or fewer sources than the position.
        shard.read = [*position["read"], *shard.read][: len(shard.read)]
        return shard

    def _position_of(self, shard: _Shard) -> StreamPosition:
        """The keys are part of every checkpoint: "update" is the step, "row" the sequences taken from a block.

        Without "epoch_borders" it was written by version 0.1, whose blocks do not end with epochs.
        """
        sequences = shard.sequences
        position = {
            "update": self._step,
            "phase": shard.phase,
            "cursor": sequences.cursor,
            "skip": sequences.skip,
            "row": sequences.taken,
            "read": list(shard.read),
            "epoch_borders": sequences.epoch_borders,
        }
        return position | ({"before": shard.before} if sequences.has_carried else {})

    def _positions(self) -> StreamState:
        return {name: self._position_of(shard) for name, shard in self._shards.items()}

    def _drop_pending(self) -> None:
        for future in self._pending:
            future.cancel()
        wait(self._pending)
        self._pending.clear()


def tokens_read(state: Mapping[str, StreamPosition]) -> list[int]:
    """Inputs read so far of each source, over all shards of a state."""
    return np.sum([position["read"] for position in state.values()], axis=0).tolist()


def held_out_batches(
    documents: Documents,
    seq_len: int,
    global_batch: int,
    batches: int,
    packing_bins: int = 32,
    packing: str = "first_fit",
) -> list[HostBatch]:
    """At most `batches` global batches of one pass, for each field int32 [global_batch, seq_len].

    They are the same in every process. Documents of all sources come in one fixed shuffled order, so that a few batches
    are a fair sample. The last batch is filled up with padding; no documents give an empty list.
    """
    whole = Documents(documents.tokens, documents.starts, documents.stops, documents.names, documents.scored)
    pieces = cut(whole, seq_len)
    if not len(pieces):
        return []
    mixture = Mixture(pieces, [1.0], [1], seed=0, shuffle=True)
    packed = PackedSequences(mixture, seq_len=seq_len, packing=packing, bins=packing_bins)
    sequences = list(islice(packed, batches * global_batch))
    sequences += [[]] * (-len(sequences) % global_batch)
    return [fill(whole, sequences[lo : lo + global_batch], seq_len) for lo in range(0, len(sequences), global_batch)]
