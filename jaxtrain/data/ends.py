"""Which tokens begin and end a document: settings, the model's own files, else names of special tokens.

A published tokenizer.json does not say it. The files beside it do: tokenizer_config.json, config.json and
generation_config.json, which transformers reads too. A token that opens documents is one that the model's own tokenizer
puts in front of a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jaxtrain.config import ConfigError, TokenizerConfig
from jaxtrain.data.files import unreadable

BOS, EOS = "<|bos|>", "<|eos|>"
TOKENIZER_CONFIG = "tokenizer_config.json"
ID_FILES = ("config.json", "generation_config.json")
# Names of the two tokens where no file names them; the first one found is used.
BOS_NAMES = (BOS, "<|begin_of_text|>", "<bos>", "<s>")
EOS_NAMES = (EOS, "<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")
# The order of versions that took the names of ordinary pieces too; runs of theirs go on with it.
OLD_BOS_NAMES = (BOS, "<|begin_of_text|>", "<s>", "<bos>")
OLD_EOS_NAMES = (EOS, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


@dataclass(frozen=True)
class Ends:
    """Ids of the tokens that begin (None: no such token) and end a document, and what decided each."""

    bos: int | None
    eos: int
    why_bos: str
    why_eos: str


def choose_ends(tokenizer: Tokenizer, path: Path, settings: TokenizerConfig | None = None) -> Ends:
    """The ends of a file's tokenizer; `settings` go before the model's files. Raises ConfigError where nothing ends."""
    files = {name: read_beside(path.parent / name) for name in (TOKENIZER_CONFIG, *ID_FILES)}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    special = {added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special}

    def named(names: tuple[str, ...]) -> tuple[int, str] | None:
        return next(((vocabulary[n], "its name") for n in names if n in special and n in vocabulary), None)

    def found_in_files(key: str) -> tuple[int, str] | None:
        text = _token_text(files[TOKENIZER_CONFIG].get(key), path.parent / TOKENIZER_CONFIG, key)
        if text is not None:
            return _id_of(text, vocabulary, path.parent / TOKENIZER_CONFIG, key), TOKENIZER_CONFIG
        for name in ID_FILES:
            numbers = _numbers(files[name].get(f"{key}_id"), path.parent / name, f"{key}_id")
            if numbers:
                return numbers[0], name
        return None

    eos = _setting("eos", settings, vocabulary) or found_in_files("eos_token") or named(EOS_NAMES)
    if eos is None or eos[0] is None:
        raise ConfigError(
            f"data.tokenizer.path {path} has no token that ends a document: no {TOKENIZER_CONFIG}, config.json or "
            "generation_config.json beside it names one, and no special token has a usual name; set data.tokenizer.eos"
        )
    candidate = found_in_files("bos_token")
    if candidate is not None and candidate[1] in ID_FILES and candidate[0] == eos[0]:
        candidate = None  # GPT-2's kind: one token between documents
    bos = _setting("bos", settings, vocabulary) or _opening(tokenizer, files, candidate)
    if bos is None:
        asked = any(files.values())
        bos = (
            (None, "the model's files") if asked else (named(BOS_NAMES) or (None, "no special token has a usual name"))
        )
    for (number, why), key in ((bos, "bos_token_id"), (eos, "eos_token_id")):
        if number is not None and tokenizer.id_to_token(number) is None:
            raise ConfigError(
                f"{path.parent / why}: {key} is {number}, which is no id of the tokenizer {path}: the two are of "
                f"different models; download both again, or correct {key}"
            )
    return Ends(bos[0], eos[0], bos[1], eos[1])


def old_ends(tokenizer: Tokenizer, path: Path) -> Ends:
    """The ends as versions before 0.2 chose them: by name, ordinary pieces of the vocabulary included."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    bos, eos = (
        next((vocabulary[n] for n in names if n in vocabulary), None) for names in (OLD_BOS_NAMES, OLD_EOS_NAMES)
    )
    if eos is None:
        raise ConfigError(f"{path} has no token that ends a document: set data.tokenizer.eos in a new --run")
    return Ends(bos, eos, "its name", "its name")


def ends_file(tokenizer: Tokenizer, bos: int | None, eos: int) -> str:
    """A tokenizer_config.json from which `choose_ends` reads the same ends."""
    tokens = {"bos_token": None if bos is None else tokenizer.id_to_token(bos), "eos_token": tokenizer.id_to_token(eos)}
    return json.dumps({**tokens, "add_bos_token": bos is not None, "tokenizer_class": "PreTrainedTokenizerFast"})


def stop_ids(folder: Path, eos: int) -> list[int]:
    """Ids that end a generated text: `eos`, and the eos_token_id of a generation_config.json in `folder`."""
    path = folder / "generation_config.json"
    more = _numbers(read_beside(path).get("eos_token_id"), path, "eos_token_id")
    return [eos, *(number for number in more if number != eos)]


def _opening(
    tokenizer: Tokenizer, files: Mapping[str, Mapping[str, Any]], candidate: tuple[int, str] | None
) -> tuple[int | None, str] | None:
    """The token that the model's tokenizer puts in front of a text, None where no file says."""
    first = next(iter(tokenizer.encode("", add_special_tokens=True).ids), None)
    adds = files[TOKENIZER_CONFIG].get("add_bos_token")
    if candidate is None:
        return (
            (first, "its post-processor") if first is not None and adds is not False and any(files.values()) else None
        )
    if adds is False or (adds is None and files[TOKENIZER_CONFIG] and first != candidate[0]):
        return None, f"{TOKENIZER_CONFIG} (no add_bos_token)"
    return candidate


def _setting(
    name: str, settings: TokenizerConfig | None, vocabulary: Mapping[str, int]
) -> tuple[int | None, str] | None:
    text = None if settings is None else getattr(settings, name)
    if text is None:
        return None
    return (_id_of(text, vocabulary, None, name) if text else None), f"data.tokenizer.{name}"


def _id_of(text: str, vocabulary: Mapping[str, int], where: Path | None, key: str) -> int:
    if text not in vocabulary:
        source = f"data.tokenizer.{key}" if where is None else f"{where} names the {key}"
        raise ConfigError(f"{source} {text!r}, which is not in the vocabulary: set data.tokenizer.{key[:3]} to a token")
    return vocabulary[text]


def _token_text(value: Any, path: Path, key: str) -> str | None:
    """A token of tokenizer_config.json: text, or an object with `content`; null is none."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str | None) or (isinstance(value, dict) and text is None):
        raise ConfigError(f"{path}: {key} is {value!r}, not a token's text: download it again, or correct {key}")
    return text


def _numbers(value: Any, path: Path, key: str) -> list[int]:
    """The ids of a key that holds one, several or null."""
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in numbers):
        raise ConfigError(f"{path}: {key} is {value!r}, not a token id: download it again, or correct {key}")
    return numbers


def read_beside(path: Path) -> dict[str, Any]:
    """The JSON object of a file beside a tokenizer, {} if there is no such file.

    Raises ConfigError for a file that cannot be read, is not whole or holds something else: without it, the choice of
    ends would be another one.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not path.is_symlink():
            return {}
        # In the hub's cache files are links; a link to nothing is a download that was cut off or cleaned away.
        raise ConfigError(f"{path} is a link to a file that does not exist: download it again") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not readable JSON ({unreadable(error)}): download it again, or move it away if it is not of "
            "this tokenizer"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} holds a JSON {type(found).__name__}, not an object: download it again, or move it away if it is "
            "not of this tokenizer"
        )
    return found
