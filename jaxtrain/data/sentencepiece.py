"""A sentencepiece model file -> a tokenizer of the tokenizers library, without the sentencepiece package.

The file is a protocol buffer (sentencepiece_model.proto): pieces (1: text, score, type), trainer (2: model type, ids),
normaliser (3: tables, switches). Only these fields are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2


@dataclass(frozen=True)
class _Model:
    """Content of a model file: pieces (text, score, type), kind of model, normalisation table and switches."""

    pieces: list[tuple[str, float, int]]
    kind: int
    charsmap: bytes
    dummy_prefix: bool
    remove_extra: bool


def convert(data: bytes) -> Tokenizer:
    """The tokenizer of a sentencepiece model's bytes, of kind unigram or BPE; raises ValueError when it is neither."""
    model = _parse(data)
    tokenizer = Tokenizer(_unigram(model) if model.kind == UNIGRAM else _bpe(model))
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    tail = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    tokenizer.add_special_tokens([AddedToken(p, normalized=False) for p, _, kind in model.pieces if kind == CONTROL])
    tokenizer.add_tokens([AddedToken(p, normalized=False) for p, _, kind in model.pieces if kind == USER_DEFINED])
    return tokenizer


def _unigram(model: _Model) -> models.Model:
    unknown = next((i for i, piece in enumerate(model.pieces) if piece[2] == UNKNOWN), None)
    # Text that spells a control piece must not become it: such pieces score lower than any other segmentation.
    scores = [(text, -1e6 if kind == CONTROL else score) for text, score, kind in model.pieces]
    return models.Unigram(scores, unknown, _has_bytes(model))


def _bpe(model: _Model) -> models.Model:
    """The file has no merges: each piece is the merge of any two pieces that spell it, the best score first."""
    vocabulary = {text: number for number, (text, _, _) in enumerate(model.pieces)}
    unknown = next((text for text, _, kind in model.pieces if kind == UNKNOWN), None)
    merges: list[tuple[str, str]] = []
    normal = [(text, score) for text, score, kind in model.pieces if kind == NORMAL]
    for text, _ in sorted(normal, key=lambda piece: -piece[1]):
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        spelled = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(spelled, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=_has_bytes(model))


def _has_bytes(model: _Model) -> bool:
    return any(kind == BYTE for _, _, kind in model.pieces)


def _parse(data: bytes) -> _Model:
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, bytes | int] = {}
    normalizer: dict[int, bytes | int] = {}
    try:
        for number, value in _fields(data):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                text, score = piece[1], piece.get(2, b"\0\0\0\0")
                assert isinstance(text, bytes) and isinstance(score, bytes)
                pieces.append((text.decode(), struct.unpack("<f", score)[0], int(piece.get(3, NORMAL))))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
    except (AssertionError, IndexError, KeyError, UnicodeDecodeError, struct.error, TypeError) as error:
        raise ValueError(f"it is no sentencepiece model ({type(error).__name__})") from None
    kind = int(trainer.get(3, UNIGRAM))
    if not pieces or kind not in (UNIGRAM, BPE):
        raise ValueError(f"it has {len(pieces)} pieces and model type {kind}: only unigram (1) and BPE (2) are read")
    charsmap = normalizer.get(2, b"")
    assert isinstance(charsmap, bytes)
    return _Model(pieces, kind, charsmap, bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1)))


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Numbers and values of a protocol buffer's fields: integers, or the bytes of anything else."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(data):
        key = varint()
        number, encoding = key >> 3, key & 7
        if encoding == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(encoding) or (varint() if encoding == 2 else -1)
        if size < 0 or at + size > len(data):
            raise IndexError
        yield number, data[at : at + size]
        at += size
