"""Ends of documents: the conventions of published models, settings, runs of old versions, and text that names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxtrain.config import ConfigError, TokenizerConfig
from jaxtrain.data.ends import ends_file
from jaxtrain.data.files import fingerprint
from jaxtrain.data.tokenizer import TextTokenizer, load_tokenizer
from jaxtrain.hub.runs import opening_json

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")  # noqa: RUF001


def save(
    folder: Path, special: tuple[str, ...], plain: tuple[str, ...] = (), opening: str | None = None, **files: Any
) -> Path:
    """A byte-level tokenizer with special tokens, ordinary pieces, a post-processor, and JSON files beside it."""
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate([*LETTERS, *plain])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    if opening is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{opening} $A", special_tokens=[(opening, tokenizer.token_to_id(opening))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        content = content if name == "tokenizer_config" else {k: tokenizer.token_to_id(v) for k, v in content.items()}
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


# Special tokens, ordinary pieces, post-processor, files; then what begins and ends a document.
PUBLISHED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "Qwen3": (
        {"special": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "plain": ("<s>", "</s>"),
         "tokenizer_config": {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}},
        None, "<|im_end|>",
    ),
    "Qwen2.5, base": (
        {"special": ("<|endoftext|>", "<|im_end|>"),
         "tokenizer_config": {"add_bos_token": False, "bos_token": None, "eos_token": "<|endoftext|>"}},
        None, "<|endoftext|>",
    ),
    "Gemma": (
        {"special": ("<pad>", "<eos>", "<bos>"), "plain": ("<s>", "</s>"), "opening": "<bos>",
         "tokenizer_config": {"add_bos_token": True, "bos_token": "<bos>", "eos_token": "<eos>"}},
        "<bos>", "<eos>",
    ),
    "Llama 2": (
        {"special": ("<unk>", "<s>", "</s>"),
         "tokenizer_config": {"add_bos_token": True, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}},
        "<s>", "</s>",
    ),
    "Llama 3": (
        {"special": ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"), "opening": "<|begin_of_text|>",
         "tokenizer_config": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}},
        "<|begin_of_text|>", "<|end_of_text|>",
    ),
    "DeepSeek": (
        {"special": DEEPSEEK,
         "tokenizer_config": {"add_bos_token": True, "bos_token": {"content": DEEPSEEK[0]}, "eos_token": DEEPSEEK[1]}},
        *DEEPSEEK,
    ),
    "DeepSeek, config.json alone": (
        {"special": DEEPSEEK, "config": {"bos_token_id": DEEPSEEK[0], "eos_token_id": DEEPSEEK[1]}}, *DEEPSEEK,
    ),
    "GPT-2": (
        {"special": ("<|endoftext|>",),
         "tokenizer_config": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "add_prefix_space": False}},
        None, "<|endoftext|>",
    ),
    "Mistral": (
        {"special": ("<unk>", "<s>", "</s>"), "opening": "<s>",
         "tokenizer_config": {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}},
        "<s>", "</s>",
    ),
    "SmolLM2-Instruct": (
        {"special": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
         "tokenizer_config": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}},
        None, "<|im_end|>",
    ),
    "generation_config.json alone": (
        {"special": ("<a>", "<b>"), "generation_config": {"eos_token_id": "<b>"}}, None, "<b>",
    ),
    "no file, names of special tokens": ({"special": ("<bos>", "<eos>"), "plain": ("<s>", "</s>")}, "<bos>", "<eos>"),
    "no file, names of ordinary pieces": ({"special": ("<|endoftext|>",), "plain": ("<s>",)}, None, "<|endoftext|>"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_documents_begin_and_end_as_the_models_own_files_say(name: str, tmp_path: Path) -> None:
    """As transformers' tokenizers of these models do (QwenLM/Qwen3#486, deepseek-ai/DeepSeek-MoE#54)."""
    made, bos, eos = PUBLISHED[name]
    tokenizer = load_tokenizer(save(tmp_path, **made))
    token = tokenizer.inner.id_to_token
    assert (None if tokenizer.bos is None else token(tokenizer.bos), token(tokenizer.eos)) == (bos, eos)
    ids = tokenizer.encode_documents(["a</s>b"])[0]
    assert ids[-1] == tokenizer.eos and ids.count(tokenizer.eos) == 1
    assert (ids[0] == tokenizer.bos) == (bos is not None)
    assert (repr(bos) if bos else "nothing") in tokenizer.describe() and repr(eos) in tokenizer.describe()
    # A run and token shards hold the choice in a file of their own.
    held = tmp_path / "held"
    held.mkdir()
    (held / "tokenizer.json").write_text(tokenizer.json)
    (held / "tokenizer_config.json").write_text(ends_file(tokenizer.inner, tokenizer.bos, tokenizer.eos))
    again = load_tokenizer(held / "tokenizer.json")
    assert (again.bos, again.eos, again.fingerprint) == (tokenizer.bos, tokenizer.eos, tokenizer.fingerprint)
    # What is exported puts the same token in front of a text.
    exported = Tokenizer.from_str(opening_json(tokenizer)).encode("ab", add_special_tokens=True).ids
    assert exported == tokenizer.encode("ab")


def test_settings_go_before_files_and_an_old_run_keeps_its_choice(tmp_path: Path) -> None:
    path = save(tmp_path, **PUBLISHED["Qwen3"][0])
    name = load_tokenizer(path).inner.id_to_token
    chosen = load_tokenizer(path, TokenizerConfig(bos="<|im_start|>", eos="<|endoftext|>"))
    assert (name(chosen.bos), name(chosen.eos)) == ("<|im_start|>", "<|endoftext|>")
    assert "data.tokenizer.bos" in chosen.describe()
    gemma = save(tmp_path, **PUBLISHED["Gemma"][0])
    assert load_tokenizer(gemma, TokenizerConfig(bos="")).bos is None
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.eos '<end>', which is not in the vocabulary"):
        load_tokenizer(gemma, TokenizerConfig(eos="<end>"))
    path = save(tmp_path, **PUBLISHED["Qwen3"][0])
    old, new = load_tokenizer(path, old=True), load_tokenizer(path)
    assert (name(old.bos), name(old.eos)) == ("<s>", "<|endoftext|>") and old.fingerprint != new.fingerprint


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no token that ends a document.*set data\.tokenizer\.eos"):
        load_tokenizer(save(tmp_path, special=("<x>",), plain=("</s>",)))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json names the eos_token '<y>', which is not in"):
        load_tokenizer(save(tmp_path, special=("<x>",), tokenizer_config={"eos_token": "<y>"}))


def test_padding_and_truncation_of_the_file_touch_no_text(tmp_path: Path) -> None:
    """vllm-project/llm-compressor#2917: also not the texts of a template, in which names are special."""
    path = save(tmp_path, special=("<eos>", "<pad>"))
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("<pad>"), pad_token="<pad>", length=12)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path))
    loaded = load_tokenizer(path)
    assert len(loaded.encode("abcdefg")) == 7 and loaded._special("abcd<eos>") == [*loaded.encode("abcd"), loaded.eos]


def test_special_names_inside_text_are_text_in_a_unigram_model() -> None:
    """huggingface/transformers#31337: the piece </s> of the vocabulary is the end token."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(letter, -2.0 - i / 10) for i, letter in enumerate("▁abs</>")]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    inner.decoder = decoders.Metaspace(prepend_scheme="never")
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    tokenizer = TextTokenizer(inner.to_str(), 1, 2)
    [ids] = tokenizer.encode_documents(["ab</s>a<s>b"])
    assert ids[0] == 1 and ids[-1] == 2 and not {1, 2} & set(ids[1:-1])
    assert tokenizer.decode(ids) == "ab</s>a<s>b"


def words(model: Any, special: tuple[str, ...], **added: bool) -> TextTokenizer:
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    if added:
        inner.add_tokens([AddedToken("<think>", normalized=False, **added)])
    return TextTokenizer(inner.to_str(), None, inner.token_to_id(special[0]))


LETTER_IDS = {letter: i for i, letter in enumerate("ab</s>nk ")}


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (models.WordLevel({"[unk]": 0, "</s>": 1, "a": 2}, unk_token="[unk]"), "a </s> a"),
        (models.BPE({**LETTER_IDS, "</s>": 20}, [], ignore_merges=True), "a</s>b"),
        (models.BPE({**LETTER_IDS, "</": 18, "s>": 19, "</s>": 20}, [("<", "/"), ("s", ">"), ("</", "s>")]), "a</s>b"),
    ],
    ids=["whole words", "BPE that takes whole words first", "BPE with merges to it"],
)
def test_no_model_makes_a_special_token_of_a_text(model: Any, text: str) -> None:
    tokenizer = words(model, ("</s>",))
    [ids] = tokenizer.encode_documents([text])
    assert ids[-1] == tokenizer.eos and ids.count(tokenizer.eos) == 1
    # The treatment is another one than that of old versions: so is the digest, on which caches and runs rely.
    assert tokenizer.fingerprint != fingerprint([tokenizer.json])


def test_other_things_in_the_file_change_no_text() -> None:
    letters = {letter: i for i, letter in enumerate("ab <think>\n")}
    tokenizer = words(models.BPE({**letters, "ab": 30}, [("a", "b")], dropout=1.0), ("<e>",), lstrip=True, rstrip=True)
    [ids] = tokenizer.encode_documents(["ab"])
    assert ids == [30, tokenizer.eos]
    names = map(tokenizer.inner.id_to_token, tokenizer.encode("a <think> b"))
    assert list(names) == ["a", "<think>", "b"]


def test_word_pieces_are_refused(tmp_path: Path) -> None:
    Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="WordPiece tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")
