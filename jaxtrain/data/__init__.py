"""Files to batches: sources, tokenizer, corpus, packing, virtual shards."""

from jaxtrain.data.corpus import Corpus, Documents, prepare
from jaxtrain.data.packing import FIELDS, HostBatch, fill_rate
from jaxtrain.data.phases import Phase, phase_at, phases_of
from jaxtrain.data.records import TokenIds, Turn
from jaxtrain.data.registered import SOURCES, DocumentSource
from jaxtrain.data.stream import (
    Batches,
    Stream,
    held_out_batches,
    open_stream,
    resolve_virtual_shards,
    shards_of_rows,
    tokens_read,
)
from jaxtrain.data.tokenizer import TextTokenizer
from jaxtrain.numerics.labels import IGNORE

__all__ = [
    "FIELDS",
    "IGNORE",
    "SOURCES",
    "Batches",
    "Corpus",
    "DocumentSource",
    "Documents",
    "HostBatch",
    "Phase",
    "Stream",
    "TextTokenizer",
    "TokenIds",
    "Turn",
    "fill_rate",
    "held_out_batches",
    "open_stream",
    "phase_at",
    "phases_of",
    "prepare",
    "resolve_virtual_shards",
    "shards_of_rows",
    "tokens_read",
]  # fmt: skip
