"""Files to batches: sources, tokenizer, corpus, packing, virtual shards."""

from jaxtrain.data.corpus import Corpus, Documents, prepare
from jaxtrain.data.packing import FIELDS, IGNORE, Batch, fill_rate
from jaxtrain.data.stream import Stream, held_out_batches, resolve_virtual_shards, shards_of_rows
from jaxtrain.data.tokenizer import TextTokenizer

__all__ = [
    "FIELDS", "IGNORE", "Batch", "Corpus", "Documents", "Stream", "TextTokenizer", "fill_rate", "held_out_batches",
    "prepare", "resolve_virtual_shards", "shards_of_rows",
]  # fmt: skip
