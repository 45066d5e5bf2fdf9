"""How the texts of documents are encoded with a tokenizer.json: nothing in it cuts, pads, drops or decorates a text."""

from __future__ import annotations

from typing import Any

from jaxtrain.data.files import fingerprint

TREATMENT = "text-2"
"""Changes when the ids of a text may change for the same tokenizer.json."""
# Parts of a tokenizer.json that belong to one call of the library, or that decorate texts.
IGNORED = ("padding", "truncation", "post_processor")


def text_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a tokenizer.json with which texts are encoded: nothing cuts, pads, drops or decorates a text.

    Special names that the model could produce from text (Unigram pieces, whole words) get a name that no text has.
    """
    special = {token["content"] for token in settings.get("added_tokens") or [] if token.get("special")}
    hidden = {name: f"\uffff{fingerprint([name, TREATMENT])}\uffff" for name in special}
    model = dict(settings["model"])
    if "dropout" in model:
        model["dropout"] = None
    reachable = special & _reachable(model)
    if reachable:
        model |= _renamed(model, {name: hidden[name] for name in reachable})
    tokens = [
        token | ({"content": hidden[token["content"]]} if token["content"] in reachable else {})
        | ({} if token.get("special") else {"lstrip": False, "rstrip": False})
        for token in settings.get("added_tokens") or []
    ]  # fmt: skip
    return settings | dict.fromkeys(IGNORED) | {"model": model, "added_tokens": tokens}


def _reachable(model: dict[str, Any]) -> set[str]:
    """The pieces that a model can produce from a text that spells them."""
    vocab = model.get("vocab") or ()
    if model.get("type", "BPE") != "BPE" or model.get("ignore_merges"):
        return {entry[0] for entry in vocab} if isinstance(vocab, list) else set(vocab)
    return {"".join(pair) for pair in _pairs(model)}


def _pairs(model: dict[str, Any]) -> list[list[str]]:
    """The merges of a BPE, in either of its two notations."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or []]


def _renamed(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The parts of a model's settings that change where pieces get other names."""
    vocab = model["vocab"]
    if isinstance(vocab, list):
        return {"vocab": [[names.get(name, name), score] for name, score in vocab]}
    pairs = _pairs(model)
    merges = [pair for pair in pairs if not {pair[0], pair[1], "".join(pair)} & set(names)]
    unknown = model.get("unk_token")
    return (
        {"vocab": {names.get(name, name): id for name, id in vocab.items()}}
        | ({"merges": merges} if len(merges) < len(pairs) else {})
        | ({"unk_token": names[unknown]} if unknown in names else {})
    )
