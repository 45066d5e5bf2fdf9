"""What the processes of a run compare before they train: settings, code, devices, run directory, corpus."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import RunConfig, to_tree
from jaxtrain.data import Corpus
from jaxtrain.launch.agreement import agree, checkpoint_steps
from jaxtrain.launch.coordination import rank_and_count
from jaxtrain.observe.environment import package_versions

PREPARE_S = 6 * 3600.0
"""Seconds that one process may prepare the corpus longer than another."""
VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
"""Environment variables that change programs."""


def agree_on_start(config: RunConfig, read: Path | None = None) -> None:
    """Compare settings, code and versions of all processes, then their devices.

    `read` is a run directory that is only read: the checkpoints that processes see in it are compared too. Raises
    ConfigError on every process, naming settings and processes. Does nothing in a single process.
    """
    if rank_and_count()[1] == 1:
        return
    same = "start every process with the same configuration and options, and install the same versions on every host"
    seen = {} if read is None else {f"checkpoints of {read.name}": checkpoint_steps(read)}
    agree("settings and versions", dict(_leaves(to_tree(config))) | code_facts() | seen, same)
    devices = jax.local_devices()
    kinds = {"device kind": devices[0].device_kind, "devices of a process": len(devices)}
    agree("devices", kinds, "give every process the same number of the same devices")


def agree_on_corpus(corpus: Corpus) -> None:
    """Compare the prepared corpus of all processes, which may take hours longer on one; raises as `agree_on_start`."""
    facts = {"corpus (fingerprint)": corpus.fingerprint, "tokenizer (fingerprint)": corpus.tokenizer_fingerprint}
    agree("corpus prepared", facts, "let data.sources and data.tokenizer name the same files on every host", PREPARE_S)


def code_facts() -> dict[str, Any]:
    """Versions of Python and packages, a hash of jaxtrain's source, and the variables that change programs."""
    versions = {f"package {name}": version for name, version in package_versions().items()}
    variables = {name: os.environ.get(name) for name in VARIABLES}
    return {"Python": platform.python_version(), "jaxtrain (source hash)": _source_hash(), **versions, **variables}


def _source_hash() -> str:
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted setting, value) of a tree of settings."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
