"""Corpora, tokens and caches that change or break."""

from __future__ import annotations

import signal

from faults import actions as a
from faults.fault import Fault
from faults.table.status import KILLED, REFUSED, SLOW


def corpora() -> list[Fault]:
    """The corpus, its tokens and its tokenizer between two starts."""

    def cached(name: str, how: str, *actions: a.Action) -> Fault:
        return Fault(
            name, how, begin="interrupted", overrides=("data.cache={run}.cache",), 
            before=a.both(a.copy_cache, *actions), status=(0, REFUSED), after=a.remove_cache,
        )  # fmt: skip

    records = {"data": {"sources": [{"jsonl": "{folder}/records.jsonl"}]}}
    skipping = {"data": {**records["data"], "on_bad_record": "skip"}}
    return [
        Fault(
            "a corrupt record", "a line of JSON that is cut; data.on_bad_record fail", config=records, equal=False,
            rerun=False, status=(REFUSED,), says="records.jsonl",
        ),
        Fault(
            "a corrupt record that is skipped", "data.on_bad_record skip; SIGKILL after step 5", config=skipping,
            plant=SLOW, when=a.step(5), do=a.send(signal.SIGKILL), status=(KILLED,),
        ),
        Fault(
            "the corpus is gone at resume", "data.sources renamed", begin="interrupted", before=a.hide_corpus,
            after=a.show_corpus, status=(0, REFUSED),
        ),
        Fault(
            "a file of the corpus grew", "a line appended to one file", begin="interrupted", before=a.change_corpus,
            after=a.show_corpus, status=(REFUSED,), says="corpus changed",
        ),
        cached("the cache is gone", "data.cache removed", a.remove_cache),
        cached("a flipped bit in the cached tokens", "one bit of the largest file of data.cache", a.flip_cache("*")),
        cached("the cached tokens are truncated", "half of the largest file", a.cut_cache("*")),
        cached("a flipped bit in the cached tokenizer", "one bit of tokenizer.json", a.flip_cache("*tokenizer*")),
        cached("the cached tokenizer is truncated", "half of tokenizer.json", a.cut_cache("*tokenizer*")),
    ]  # fmt: skip
