"""Data sources that user code registers: any iterable of documents, in place of files.

A script registers a factory under a name and a source of data.sources names it:

    from jaxtrain.data import SOURCES

    @SOURCES.register("counting")
    class Counting:
        def __init__(self, documents: int = 1000) -> None:
            self.documents = documents
            self.fingerprint = f"counting-1 {documents}"

        def __iter__(self):
            for number in range(self.documents):
                yield " ".join(str(number + i) for i in range(50))

    config = jaxtrain.load_config("run.yaml")  # data: {sources: [{registered: counting, options: {documents: 500}}]}

The documents are read once, tokenized and cached under the fingerprint, like a file. The order of batches is a function
of document numbers, so that a run resumes at the exact batch and the iterable itself needs no position. An iterable
must therefore give the same documents in the same order whenever its fingerprint is the same, in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxtrain.config import ConfigError, Registry, SourceConfig, nearest
from jaxtrain.data.files import File, unreadable
from jaxtrain.data.readers import BadRecord, FileSpan, Item, Kind, Record, whole
from jaxtrain.data.records import Content, TokenIds, Turn, UnfitError, clean_text, content_of, token_ids

REGISTERED_URL = "registered:"
Document = str | TokenIds | np.ndarray | tuple[Turn, ...] | Mapping[str, Any]
"""Text, token ids (with or without flags of what is scored), chat turns, or a mapping of the source's fields."""


class DocumentSource(Protocol):
    """An iterable of documents with a text that changes whenever the documents do."""

    @property
    def fingerprint(self) -> str:
        """Version and parameters of the documents."""
        ...

    def __iter__(self) -> Iterator[Document]:
        """The documents, in the same order each time."""
        ...


SOURCES: Registry[Callable[..., DocumentSource]] = Registry("data.sources.registered")
"""Name -> factory of a DocumentSource; `options` of the source are its keyword arguments."""


def registered_file(source: SourceConfig, where: str) -> File:
    """A registered source as one file whose digest is the fingerprint of its documents.

    Raises ConfigError: the name is not registered, the factory refuses the options, there is no fingerprint.
    """
    fingerprint = getattr(_build(source, where), "fingerprint", None)
    if not isinstance(fingerprint, str) or not fingerprint:
        raise ConfigError(
            f"{where}.registered {source.path!r} has the fingerprint {fingerprint!r}: give its objects an attribute "
            "fingerprint, a text that changes whenever the documents change"
        )
    return File(source.path, f"{REGISTERED_URL}{source.path}", 0, "", fingerprint)


def read_registered(span: FileSpan, source: SourceConfig, cache: Path) -> Iterator[Item]:
    """Each item of the iterable is a document, numbered from 0."""
    documents = iter(_build(source, "data.sources"))
    number = 0
    while True:
        try:
            document = next(documents)
        except StopIteration:
            return
        except OSError as error:
            raise ConfigError(
                f"the registered source {source.path!r} failed at document {number} ({unreadable(error)})"
            ) from error
        try:
            yield Record(span.file, number, _content(document, source))
        except UnfitError as error:
            yield BadRecord(span.file, f"{span.file.url}, document {number}: {error}", error.fix)
        number += 1


def _build(source: SourceConfig, where: str) -> DocumentSource:
    if source.path not in SOURCES:
        raise ConfigError(
            f"{where}.registered is {source.path!r}, which is not registered{nearest(source.path, SOURCES)}; known: "
            f"{', '.join(SOURCES) or 'none'}. Call jaxtrain.api from the script that registers it, after it has"
        )
    factory = SOURCES[source.path]
    try:
        return factory(**source.options)
    except TypeError as error:
        raise ConfigError(f"{where}.options of the registered source {source.path!r} do not fit: {error}") from error


def _content(document: Any, source: SourceConfig) -> Content:
    """Raises UnfitError for anything that is no Document."""
    if isinstance(document, str):
        return clean_text(document, "a document")
    if isinstance(document, Mapping):
        return content_of(document, source)
    if isinstance(document, tuple) and document and all(isinstance(turn, Turn) for turn in document):
        return document
    found = document if isinstance(document, TokenIds) else TokenIds(document)
    ids, scored = token_ids(found.ids, "token ids").ids, found.scored
    if scored is not None and (np.shape(scored) != ids.shape or np.asarray(scored).dtype != bool):
        raise UnfitError(f"{len(ids)} token ids have flags of shape {np.shape(scored)}: give a bool for each")
    return TokenIds(ids, None if scored is None else np.asarray(scored))


REGISTERED = Kind(whole, read_registered)
"""How a registered source is read."""
