"""sentencepiece models give the library's own ids on hostile text, or a refusal that names what is not converted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import ConfigError
from jaxtrain.data.tokenizer import TextTokenizer, load_tokenizer

WORDS = ("the quick brown fox jumps", "over lazy dog and runs away", "from them with their other things in a town")
PARTS = (
    "the", "fox", "ab", "QU", "12", "...", " ", "  ", "    ", "\t", "\n", "\r\n", "\u2581", "\u2581\u2581", "<s>",
    "</s>", "<unk>", "<sep>", "<ctl>", "<0x41>", "<0", "\u00e9", "e\u0301", "\ufb01", "\uff21", "\u2460",
    "\u65e5\u672c", "\U0001f600", "\u200b", "\u00a0", "\u3000", "\ufeff", "\x00", "\u00df", "\u0627", "\ufffd",
)  # fmt: skip
LLAMA = {"byte_fallback": True, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
MODELS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram", "vocab_size": 120},
    "unigram with bytes": {"model_type": "unigram", "vocab_size": 380, "byte_fallback": True},
    "unigram, blanks kept": {"model_type": "unigram", "vocab_size": 120, "remove_extra_whitespaces": False},
    "unigram, nfkc_cf": {"model_type": "unigram", "vocab_size": 120, "normalization_rule_name": "nfkc_cf"},
    "unigram, control pieces": {"model_type": "unigram", "vocab_size": 130, "control_symbols": ["<ctl>"]},
    "bpe": {"model_type": "bpe", "vocab_size": 150},
    "bpe, blanks kept": {"model_type": "bpe", "vocab_size": 150, "remove_extra_whitespaces": False},
    "bpe, nfkc": {"model_type": "bpe", "vocab_size": 150, "normalization_rule_name": "nfkc"},
    "bpe, no prefix": {"model_type": "bpe", "vocab_size": 150, "add_dummy_prefix": False},
    "bpe, digits": {"model_type": "bpe", "vocab_size": 150, "split_digits": True},
    "llama": {"model_type": "bpe", "vocab_size": 420, **LLAMA},
    "own pieces": {"model_type": "bpe", "vocab_size": 420, "add_dummy_prefix": False, **LLAMA,
                   "user_defined_symbols": ["<sep>", "\n", "\n\n", "fox"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    rng = random.Random(0)
    lines = (
        " ".join(rng.choice(" ".join(WORDS).split()) for _ in range(12)) + rng.choice([".", "!", " 12 34", ""])
        for _ in range(400)
    )
    (path / "text.txt").write_text("\n".join(lines))
    return path


def train(folder: Path, name: str, options: dict[str, Any]) -> Path:
    model = folder / f"{name}.model"
    if not model.exists():
        prefix = str(model.with_suffix(""))
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text.txt"), model_prefix=prefix, minloglevel=2, hard_vocab_limit=False, **options
        )
    return model


def ids_of(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)[tokenizer.bos is not None :]


@pytest.mark.parametrize("name", MODELS)
def test_hostile_text_gives_the_ids_of_the_library(folder: Path, name: str) -> None:
    model = train(folder, name, MODELS[name])
    reference, tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(model)), load_tokenizer(model)
    for part in PARTS:
        for text in (part, f"x{part}y", f"{part} ", f" {part}", f"{part}{part}"):
            assert ids_of(tokenizer, text) == reference.encode(text), repr(text)

    @given(st.lists(st.sampled_from(PARTS), max_size=10).map("".join))
    @settings(max_examples=60, deadline=None)
    def check(text: str) -> None:
        assert ids_of(tokenizer, text) == reference.encode(text)
        if name == "llama":
            assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(reference.encode(text))

    check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"user_defined_symbols": ["<sep>"]}, r"user-defined pieces \(<sep>\) beside add_dummy_prefix"),
        ({"user_defined_symbols": ["\u2581\u2581"], "add_dummy_prefix": False, "remove_extra_whitespaces": False},
         "user-defined pieces of blanks"),
    ],
)  # fmt: skip
def test_what_is_not_converted_is_named(folder: Path, options: dict[str, Any], words: str) -> None:
    # Ids that the library does not give would be wrong training data with exit status 0.
    options = {"model_type": "bpe", "vocab_size": 160, **options}
    model = train(folder, f"refused {len(options)} {len(words)}", options)
    with pytest.raises(ConfigError, match=f"it has {words}.*take the model's own tokenizer.json"):
        load_tokenizer(model)
