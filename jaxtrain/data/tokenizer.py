"""Text <-> token ids: a byte-level BPE trained on the sources, any tokenizer.json, or a sentencepiece model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxtrain.config import ConfigError, RunConfig
from jaxtrain.data.cache import build_once
from jaxtrain.data.files import fingerprint, unreadable
from jaxtrain.data.readers import Content, TokenIds
from jaxtrain.data.sentencepiece import convert

BOS, EOS = "<|bos|>", "<|eos|>"
# Names of the two tokens in published tokenizers; the first one found is used.
BOS_NAMES = (BOS, "<|begin_of_text|>", "<s>", "<bos>")
EOS_NAMES = (EOS, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
Texts = Callable[[], Iterator[str]]


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer as JSON, with the ids of the tokens that begin (None: no such token) and end a document."""

    json: str
    bos: int | None
    eos: int

    @cached_property
    def inner(self) -> Tokenizer:
        """The Hugging Face tokenizer; names of special tokens inside a text are encoded as ordinary text."""
        tokenizer = Tokenizer.from_str(self.json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """Digest (32 hex digits) of the tokenizer's JSON."""
        return fingerprint([self.json])

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return 1 + max(self.inner.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt: the token that begins a document, if there is one, then the text."""
        return self._begin + self.inner.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of documents with the tokens that begin and end them; the texts are encoded in parallel."""
        encodings = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._begin + encoding.ids + [self.eos] for encoding in encodings]

    def encode_contents(self, contents: Sequence[Content]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Token ids of documents and, for chat turns, which of them are scored as targets (bool; None is all).

        Texts and chats get the tokens that begin and end a document; token ids are not changed. Each turn is encoded
        separately, so that a border between turns is a border between tokens, as when the model is later prompted with
        the first turns.
        """
        texts = [
            part
            for content in contents
            for part in (
                [content] if isinstance(content, str) else
                [] if isinstance(content, TokenIds) else
                [turn.text for turn in content if not turn.special]
            )
        ]  # fmt: skip
        encoded = iter(self.inner.encode_batch_fast(texts, add_special_tokens=False))
        return [self._document(content, encoded) for content in contents]

    def _document(
        self, content: Content, encoded: Iterator[tokenizers.Encoding]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if isinstance(content, TokenIds):
            return content.ids, content.scored
        if isinstance(content, str):
            return np.array([*self._begin, *next(encoded).ids, self.eos]), None
        ids, scored = list(self._begin), [False] * len(self._begin)
        for turn in content:
            part = self._special(turn.text) if turn.special else next(encoded).ids
            ids += part
            scored += [turn.scored] * len(part)
        return np.array([*ids, self.eos]), np.array([*scored, content[-1].scored])

    def _special(self, text: str) -> list[int]:
        """Token ids of a template's text, in which names of special tokens are special."""
        if text not in self._specials:
            tokenizer = Tokenizer.from_str(self.json)
            self._specials[text] = tokenizer.encode(text, add_special_tokens=False).ids
        return self._specials[text]

    @cached_property
    def _specials(self) -> dict[str, list[int]]:
        return {}

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        return self.inner.decode(list(ids), skip_special_tokens=True)

    @property
    def _begin(self) -> list[int]:
        return [] if self.bos is None else [self.bos]


def prepare_tokenizer(config: RunConfig, beside: Path | None, key: str, texts: Texts, cache: Path) -> TextTokenizer:
    """Load `data.tokenizer.path`, or the tokenizer `beside` token shards, or train one on `texts`, once for a `key`.

    Raises ConfigError: file unreadable, no token that ends a document, an id beyond model.vocab_size.
    """
    settings = config.data.tokenizer
    if settings.path is not None:
        path = Path(settings.path).expanduser()
    else:
        path = beside or _trained(settings.vocab_size, key, texts, cache)
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"the tokenizer {path} has token ids up to {tokenizer.vocab_size - 1}, beyond the "
            f"{config.model.vocab_size} rows of the embedding table (ids 0..{config.model.vocab_size - 1}): "
            f"set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer


def load_tokenizer(path: Path) -> TextTokenizer:
    """Read a tokenizer.json, or a sentencepiece .model.

    Raises ConfigError when it is neither, or has no token that ends a document.
    """
    what = "sentencepiece model" if path.suffix == ".model" else "tokenizer.json"
    try:
        json = convert(path.read_bytes()).to_str() if path.suffix == ".model" else path.read_text(encoding="utf-8")
        vocabulary = Tokenizer.from_str(json).get_vocab(with_added_tokens=True)
    except Exception as error:  # the tokenizers library raises bare Exception for bad JSON
        raise ConfigError(
            f"data.tokenizer.path {path} is not a readable {what} ({unreadable(error)}): "
            "name a file saved by the tokenizers library, or a sentencepiece .model"
        ) from None
    bos = next((vocabulary[name] for name in BOS_NAMES if name in vocabulary), None)
    eos = next((vocabulary[name] for name in EOS_NAMES if name in vocabulary), None)
    if eos is None:
        raise ConfigError(
            f"data.tokenizer.path {path} has no token that ends a document: add one of {', '.join(EOS_NAMES)} to it"
        )
    return TextTokenizer(json, bos, eos)


def _trained(vocab_size: int, key: str, texts: Texts, cache: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + 2
    if vocab_size < smallest:
        raise ConfigError(
            f"data.tokenizer.vocab_size is {vocab_size}: a byte-level tokenizer needs {len(alphabet)} bytes and 2 "
            f"special tokens, at least {smallest}"
        )

    def build(path: Path) -> None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts(), trainer)
        tokenizer.save(str(path))

    name = fingerprint([key, str(vocab_size), tokenizers.__version__])
    return build_once(cache / "tokenizers" / f"{name}.json", build)
