"""A sentencepiece model file -> a tokenizer of the tokenizers library, without the sentencepiece package.

The file is a protocol buffer (sentencepiece_model.proto): pieces (1: text, score, type), trainer (2: model type, ids),
normaliser (3: tables, switches). Only these fields are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

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
    escapes: bool
    suffix: bool


def convert(data: bytes) -> Tokenizer:
    """The tokenizer of a sentencepiece model's bytes, of kind unigram or BPE.

    Raises ValueError when it is neither, and names what would give other ids than the sentencepiece library.
    """
    model = _parse(data)
    _check(model)
    tokenizer = Tokenizer(_unigram(model) if model.kind == UNIGRAM else _bpe(model))
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        table = normalizers.Precompiled(model.charsmap)
        if table.normalize_str("\n") == " ":
            # The table is applied to graphemes, of which CR LF is one.
            steps.append(normalizers.Replace("\r\n", "  "))
        steps.append(table)
    if model.remove_extra:
        # A mark of the text itself that ends it counts as a blank too.
        steps += [normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if model.kind == UNIGRAM and _has_bytes(model):
        # A text that spells the name of a byte is no byte: no piece spans its first letter (see _check).
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous")
    tail = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    named = (CONTROL, UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(p, normalized=False) for p, _, kind in model.pieces if kind in named])
    tokenizer.add_tokens([AddedToken(p, normalized=False) for p, _, kind in model.pieces if kind == USER_DEFINED])
    return tokenizer


def _check(model: _Model) -> None:
    """Raise ValueError for what the tokenizers library cannot do as sentencepiece does."""
    own = [text for text, _, kind in model.pieces if kind == USER_DEFINED]
    spaced = [text for text in own if SPACE in text or " " in text]
    across = [text for text, _, kind in model.pieces if kind == NORMAL and "<0" in text]
    faults = {
        "treat_whitespace_as_suffix": model.suffix,
        "escape_whitespaces false": not model.escapes,
        # They are split off before blanks are collapsed, and before one is put in front of the text.
        f"user-defined pieces ({', '.join(own[:3])}) beside add_dummy_prefix or remove_extra_whitespaces": bool(own)
        and (model.dummy_prefix or model.remove_extra),
        f"user-defined pieces of blanks ({', '.join(spaced[:3])})": bool(spaced),
        f"byte fallback with pieces that hold <0 ({', '.join(across[:3])})": model.kind == UNIGRAM
        and _has_bytes(model)
        and bool(across),
    }
    found = [what for what, present in faults.items() if present]
    if found:
        raise ValueError(
            f"it has {' and '.join(found)}, for which no exact tokenizer.json is made here: take the model's own "
            "tokenizer.json"
        )


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
    return _Model(
        pieces, kind, charsmap, bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1)),
        bool(normalizer.get(5, 1)), bool(trainer.get(24, 0)),
    )  # fmt: skip


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
