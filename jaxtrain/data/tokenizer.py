"""Text <-> token ids: a byte-level BPE trained on the sources, or any tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxtrain.config import ConfigError, RunConfig
from jaxtrain.data.cache import build_once
from jaxtrain.data.sources import Document, fingerprint, is_held_out

BOS, EOS = "<|bos|>", "<|eos|>"
# How published tokenizers call the two, first found wins.
BOS_NAMES = (BOS, "<|begin_of_text|>", "<s>", "<bos>")
EOS_NAMES = (EOS, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# Merges hardly change beyond this much text; documents are taken in order of a hash of their content.
SAMPLE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with the ids that open (None: nothing does) and close a document, and its source text as JSON."""

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
        """Token ids of a prompt: the opening token, if there is one, then the text; nothing closes it."""
        return self._opening + self.inner.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of whole documents, opened and closed; the texts are encoded in parallel."""
        encodings = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._opening + encoding.ids + [self.eos] for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        return self.inner.decode(list(ids), skip_special_tokens=True)

    @property
    def _opening(self) -> list[int]:
        return [] if self.bos is None else [self.bos]


def prepare_tokenizer(config: RunConfig, documents: Sequence[Document], cache: Path) -> TextTokenizer:
    """Load `data.tokenizer.path`, or train (once, cached) on the documents that are not held out.

    Raises ConfigError: file unreadable, no closing token, an id beyond model.vocab_size.
    """
    settings = config.data.tokenizer
    if settings.path is None:
        path = _trained(settings.vocab_size, [d for d in documents if not is_held_out(d.name, config.data.held_out)],
                        cache)  # fmt: skip
    else:
        path = Path(settings.path).expanduser()
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"the tokenizer {path} has token ids up to {tokenizer.vocab_size - 1}, beyond the "
            f"{config.model.vocab_size} rows of the embedding table (ids 0..{config.model.vocab_size - 1}): "
            f"set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer


def load_tokenizer(path: Path) -> TextTokenizer:
    """Read a tokenizer.json; raises ConfigError when it is none, or names no token that closes a document."""
    try:
        json = path.read_text(encoding="utf-8")
        vocabulary = Tokenizer.from_str(json).get_vocab(with_added_tokens=True)
    except Exception as error:  # the tokenizers library raises bare Exception for bad JSON
        raise ConfigError(
            f"data.tokenizer.path {path} is not a readable tokenizer.json ({' '.join(str(error).split())[:200]}): "
            "name a file saved by the tokenizers library"
        ) from None
    bos = next((vocabulary[name] for name in BOS_NAMES if name in vocabulary), None)
    eos = next((vocabulary[name] for name in EOS_NAMES if name in vocabulary), None)
    if eos is None:
        raise ConfigError(
            f"data.tokenizer.path {path} has no token that closes a document: add one of {', '.join(EOS_NAMES)} to it"
        )
    return TextTokenizer(json, bos, eos)


def _trained(vocab_size: int, documents: Sequence[Document], cache: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + 2
    if vocab_size < smallest:
        raise ConfigError(
            f"data.tokenizer.vocab_size is {vocab_size}: a byte-level tokenizer needs {len(alphabet)} bytes and 2 "
            f"special tokens, at least {smallest}"
        )
    sample = _sample(documents)

    def build(path: Path) -> None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator((d.read() for d in sample), trainer, length=len(sample))
        tokenizer.save(str(path))

    key = fingerprint((d.digest for d in sample), str(vocab_size), tokenizers.__version__)
    return build_once(cache / "tokenizers" / f"{key}.json", build)


def _sample(documents: Sequence[Document]) -> list[Document]:
    def take() -> Iterator[Document]:
        left = SAMPLE_BYTES
        for document in sorted(documents, key=lambda d: d.digest):
            if left <= 0:
                return
            left -= document.size
            yield document

    return list(take())
