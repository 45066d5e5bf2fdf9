"""Text <-> token ids: a byte-level BPE trained on the sources, any tokenizer.json, or a sentencepiece model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxtrain.config import ConfigError, RunConfig, TokenizerConfig
from jaxtrain.data.cache import build_once
from jaxtrain.data.ends import BOS, EOS, TOKENIZER_CONFIG, Ends, choose_ends, old_ends
from jaxtrain.data.files import fingerprint, unreadable
from jaxtrain.data.records import Content, TokenIds, Turn
from jaxtrain.data.sentencepiece import convert
from jaxtrain.data.text_settings import IGNORED, TREATMENT, text_settings

Texts = Callable[[], Iterator[str]]


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer as JSON, with the ids of the tokens that begin (None: no such token) and end a document."""

    json: str
    bos: int | None
    eos: int
    ends: Ends | None = None
    """The same ids, and what decided them."""

    @cached_property
    def inner(self) -> Tokenizer:
        """The Hugging Face tokenizer; names of special tokens inside a text are encoded as ordinary text."""
        tokenizer = _plain(self.json)
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _texts(self) -> Tokenizer:
        """The tokenizer of texts, which never meet special tokens; ids are the same."""
        tokenizer = Tokenizer.from_str(json.dumps(text_settings(json.loads(self.json))))
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """Digest (32 hex digits) of the tokenizer's JSON, and of what old versions treated in another way."""
        try:
            old = old_ends(self.inner, Path())
        except ConfigError:
            old = None
        whole = json.loads(self.json)
        text = text_settings(whole)
        same = old is not None and (old.bos, old.eos) == (self.bos, self.eos)
        same &= all(text[key] == whole.get(key) for key in text if key not in IGNORED)
        return fingerprint([self.json] if same else [self.json, f"{self.bos} {self.eos}", TREATMENT])

    def describe(self) -> str:
        """Which tokens begin and end documents, and why, for a line of output."""
        ends, name = self.ends or Ends(self.bos, self.eos, "", ""), self.inner.id_to_token
        begin = "nothing" if ends.bos is None else f"{name(ends.bos)!r} ({ends.bos})"
        reasons = [f" [{why}]" if why else "" for why in (ends.why_bos, ends.why_eos)]
        return f"documents begin with {begin}{reasons[0]} and end with {name(ends.eos)!r} ({ends.eos}){reasons[1]}"

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return 1 + max(self.inner.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt: the token that begins a document, if there is one, then the text."""
        return self._begin + self._texts.encode(text, add_special_tokens=False).ids

    def encode_turns(self, turns: Sequence[Turn]) -> list[int]:
        """Token ids of the beginning of a chat, as in training, without the token that ends a document."""
        texts = iter(self._texts.encode_batch_fast([t.text for t in turns if not t.special], add_special_tokens=False))
        return self._document(tuple(turns), texts)[0].tolist()[:-1]

    def special_ids(self, text: str) -> list[int]:
        """Ids of the special tokens that a template's text names."""
        return [number for number in self._special(text) if number in self.special]

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of special tokens, which `decode` leaves out."""
        return frozenset(number for number, added in self.inner.get_added_tokens_decoder().items() if added.special)

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of documents with the tokens that begin and end them; the texts are encoded in parallel."""
        encodings = self._texts.encode_batch_fast(list(texts), add_special_tokens=False)
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
        encoded = iter(self._texts.encode_batch_fast(texts, add_special_tokens=False))
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
            tokenizer = _plain(self.json)
            self._specials[text] = tokenizer.encode(text, add_special_tokens=False).ids
        return self._specials[text]

    @cached_property
    def _specials(self) -> dict[str, list[int]]:
        return {}

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of token ids, without special tokens or with their names."""
        return self.inner.decode(list(ids), skip_special_tokens=not special)

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
    old = path == beside and not (path.parent / TOKENIZER_CONFIG).is_file()
    tokenizer = load_tokenizer(path, settings, old)
    rows = config.model.token_rows
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer {path} has token ids up to {tokenizer.vocab_size - 1}, beyond the "
            f"{rows} rows of the embedding table (ids 0..{rows - 1}): "
            f"set model.vocab_size (and model.unpadded_vocab_size, if set) to at least {tokenizer.vocab_size}"
        )
    return tokenizer


def load_tokenizer(path: Path, settings: TokenizerConfig | None = None, old: bool = False) -> TextTokenizer:
    """Read a tokenizer.json, or a sentencepiece .model; `settings` may name its ends (data/ends.py).

    `old`: it belongs to a run or to shards of a version that chose the ends by name alone. Raises ConfigError when it
    is neither, or has no token that ends a document.
    """
    what = "sentencepiece model" if path.suffix == ".model" else "tokenizer.json"
    try:
        text = convert(path.read_bytes()).to_str() if path.suffix == ".model" else path.read_text(encoding="utf-8")
        inner, kind = Tokenizer.from_str(text), json.loads(text)["model"].get("type")
    except Exception as error:  # the tokenizers library raises bare Exception for bad JSON
        raise ConfigError(
            f"data.tokenizer.path {path} is not a readable {what} ({unreadable(error)}): "
            "name a file saved by the tokenizers library, or a sentencepiece .model"
        ) from None
    if kind == "WordPiece":
        raise ConfigError(
            f"data.tokenizer.path {path} is a WordPiece tokenizer, whose ids do not give the text back: use a "
            "byte-level BPE, a Unigram or a sentencepiece tokenizer"
        )
    ends = old_ends(inner, path) if old else choose_ends(inner, path, settings)
    return TextTokenizer(text, ends.bos, ends.eos, ends)


def _plain(text: str) -> Tokenizer:
    """The tokenizer of a JSON, without the padding and truncation that it may carry."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
