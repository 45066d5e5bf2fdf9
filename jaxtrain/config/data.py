"""Settings of the data: sources, tokenizer, packing, schedules of batch shapes."""

from __future__ import annotations

import shlex
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveInt, field_validator, model_validator

from jaxtrain.config.paths import url_fault
from jaxtrain.config.section import Section

SOURCE_SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": (),
    "jsonl": tuple(f".{stem}{codec}" for stem in ("jsonl", "json", "ndjson") for codec in ("", ".gz", ".zst")),
    "parquet": (".parquet",),
    "arrayrecord": (".array_record", ".arrayrecord"),
    "tokens": (".bin",),
    "hf": (".arrow",),
}
"""Kind of source -> suffixes of its files; none is any."""
SOURCE_KINDS = (*SOURCE_SUFFIXES, "registered")
EXAMPLE_SOURCES = [{"text": "~/books", "include": ["*.txt"]}]


class SourceConfig(Section):
    """One corpus: exactly one of text, jsonl, parquet, arrayrecord, tokens, hf, registered names it."""

    text: str | None = None
    """Folder or file of UTF-8 text; every file is a document. 'stdlib' is Python's own source on this machine."""
    jsonl: str | None = None
    """File, folder or glob of JSON lines, uncompressed, .gz or .zst; local, or a URL such as gs://bucket/part-*.jsonl."""
    parquet: str | None = None
    """File, folder or glob of Parquet files with a column of text or of token lists."""
    arrayrecord: str | None = None
    """File, folder or glob of ArrayRecord files: text, JSON when a field is named, token ids when dtype is set."""
    tokens: str | None = None
    """File, folder or glob of token files: Megatron's .bin beside .idx, or flat .bin cut after the closing token."""
    hf: str | None = None
    """Folder that the Hugging Face datasets library saved (Arrow files)."""
    registered: str | None = None
    """Name of an iterable of documents that user code registered in jaxtrain.data.SOURCES."""
    options: dict[str, Any] = {}
    """Keyword arguments of a registered source's factory."""
    include: list[str] = ["*"]
    """File-name globs read from a folder, recursively."""
    exclude: list[str] = []
    """File-name globs left out."""
    max_documents: PositiveInt | None = None
    """Use only so many documents, in order of path."""
    field: str | None = None
    """JSON field or column of text or token ids; null is 'text'."""
    prompt_field: str | None = None
    """Field of a prompt that is read but not scored; goes with response_field."""
    response_field: str | None = None
    """Field of the response to that prompt; its tokens and the closing one are scored."""
    messages_field: str | None = None
    """Field of a chat: a list of {role, content}, formatted by template."""
    template: dict[str, tuple[str, str]] = {}
    """Role -> text before and after its content; the turns of assistant, model and gpt are scored."""
    dtype: Literal["uint16", "int32", "uint32", "int64"] | None = None
    """Type of token ids in a flat .bin (null is uint16) or in ArrayRecord; a tokens.json beside the files wins."""
    weight: float = Field(1.0, gt=0)
    """Share of this source in the mixture's tokens, relative to the weights of the other sources."""
    epochs: float | None = Field(None, gt=0)
    """Limit of passes over this source; null repeats it as often as its weight needs."""

    @property
    def kind(self) -> str:
        """Which of SOURCE_KINDS names this source."""
        return next(kind for kind in SOURCE_KINDS if getattr(self, kind) is not None)

    @property
    def path(self) -> str:
        """The path, URL, glob or registered name of this source."""
        return str(getattr(self, self.kind))

    @model_validator(mode="after")
    def _one_kind(self) -> SourceConfig:
        kinds = [kind for kind in SOURCE_KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"a source of data.sources has {' and '.join(kinds) or 'none'} of {', '.join(SOURCE_KINDS)}: "
                "set exactly one, and list several corpora as several sources"
            )
        if (self.prompt_field is None) != (self.response_field is None):
            raise ValueError("prompt_field and response_field of a source go together: set both or none")
        fields = [name for name in ("field", "prompt_field", "messages_field") if getattr(self, name) is not None]
        if len(fields) > 1:
            raise ValueError(f"a source has {' and '.join(fields)}: a document is one of them, set only one")
        if fields and self.kind in ("text", "tokens"):
            raise ValueError(f"{fields[0]} means nothing for a source of {self.kind}: its documents have no fields")
        if self.options and self.registered is None:
            raise ValueError(f"options means nothing for a source of {self.kind}: it goes with registered")
        if bool(self.template) != (self.messages_field is not None):
            raise ValueError(
                "messages_field and template of a source go together: set messages_field to the field of the chat and "
                "template to a mapping such as {user: ['User: ', '\\n'], assistant: ['Assistant: ', '\\n']}"
            )
        return self


def source_syntax(sources: list[dict[str, Any]]) -> str:
    """How to write these sources, in a configuration file and on the command line."""
    text = yaml.safe_dump(sources, default_flow_style=True, sort_keys=False, width=10**6).strip()
    quoted = shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'
    return f"Write data.sources: {text} in the configuration, or --data.sources {quoted}"


def _guess_source(path: Any) -> dict[str, Any]:
    """The mapping for a bare path, by its suffix; an example where there is no path."""
    if not isinstance(path, str) or not path:
        return EXAMPLE_SOURCES[0]
    kinds = (kind for kind, suffixes in SOURCE_SUFFIXES.items() if suffixes and path.endswith(suffixes))
    return {next(kinds, "text"): path}


class TokenizerConfig(Section):
    """A tokenizer file, or the size of one to train on the sources."""

    path: str | None = None
    """tokenizer.json or sentencepiece .model; null is the one beside token shards, or a byte-level BPE trained here."""
    vocab_size: PositiveInt = 4096
    """Entries of a trained tokenizer."""
    bos: str | None = None
    """Token that begins a document; null is what the model's files say, "" is none."""
    eos: str | None = Field(None, min_length=1)
    """Token that ends a document; null is what the model's files say."""

    @field_validator("path")
    @classmethod
    def _is_local(cls, path: str | None) -> str | None:
        if path is not None and (fault := url_fault(path, "data.tokenizer.path")):
            raise ValueError(fault)
        return path


class PhaseConfig(Section):
    """One phase of a schedule of batch shapes."""

    start: int = Field(0, ge=0)
    """Steps or tokens (data.schedule_unit) before it; 0 for the first phase, increasing."""
    seq_len: PositiveInt | None = None
    """Tokens of a packed sequence from then on; null is data.seq_len."""
    global_batch: PositiveInt | None = None
    """Sequences of a step from then on; null is train.global_batch."""


class DataConfig(Section):
    """Corpus to batches."""

    sources: list[SourceConfig] = []
    """What to read; whatever reads data needs at least one source."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Tokenizer."""
    seq_len: PositiveInt = 256
    """Tokens of a packed sequence."""
    packing: Literal["first_fit", "best_fit", "concat", "none"] = "first_fit"
    """How sequences are filled: whole pieces where they fit, pieces cut at sequence ends, or one piece each."""
    packing_bins: PositiveInt = 32
    """Open sequences of a shard for first_fit and best_fit."""
    overlong: Literal["split", "drop"] = "split"
    """Documents longer than a sequence (the longest of the schedule) are cut, or left out and counted."""
    schedule: list[PhaseConfig] = []
    """Phases of other sequence lengths and batches; evaluation uses data.seq_len and train.global_batch."""
    schedule_unit: Literal["steps", "tokens"] = "steps"
    """Unit of the schedule's starts; tokens are positions, padding included."""
    virtual_shards: PositiveInt | None = None
    """Slices of the corpus, fixed for a run's life; null is the largest divisor of the global batch up to 64."""
    shuffle: bool = True
    """Shuffle the documents of each epoch."""
    held_out: float = Field(0.05, ge=0, lt=1)
    """Share of documents held out for evaluation, chosen by a hash of their name."""
    cache: str = "~/.cache/jaxtrain"
    """Folder of tokenized corpora and trained tokenizers."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    """An unreadable record ends the run, or is left out and counted."""
    allow_changed: bool = False
    """Resume a run whose corpus changed since it began; its data position keeps its numbers in the new order."""

    @property
    def seq_lens(self) -> list[tuple[str, int]]:
        """Every sequence length of a run and the setting that names it."""
        phases = [(f"data.schedule[{i}].seq_len", phase.seq_len) for i, phase in enumerate(self.schedule)]
        return [("data.seq_len", self.seq_len), *((name, seq_len) for name, seq_len in phases if seq_len)]

    @field_validator("sources", mode="before")
    @classmethod
    def _mappings(cls, value: Any) -> Any:
        items = value if isinstance(value, list) else [value]
        if isinstance(value, list) and not any(isinstance(item, str) for item in items):
            return value
        fixed = [item if isinstance(item, dict) else _guess_source(item) for item in items]
        raise ValueError(
            f"data.sources is {value!r}: it must be a list of mappings, one a source. {source_syntax(fixed)}"
        )

    @field_validator("cache")
    @classmethod
    def _cache_is_local(cls, cache: str) -> str:
        if fault := url_fault(cache, "data.cache"):
            raise ValueError(fault)
        return cache

    @model_validator(mode="after")
    def _schedule_rises(self) -> DataConfig:
        starts = [phase.start for phase in self.schedule]
        if starts and (starts[0] != 0 or sorted(set(starts)) != starts):
            raise ValueError(
                f"data.schedule starts at {starts}: the first phase must start at 0, "
                "and each later phase after the previous one"
            )
        return self
