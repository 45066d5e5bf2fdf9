"""The run directory: a run's configuration and environment, written at its start, checked on every rerun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxtrain.config import SCHEMA, Axis, ConfigError, RunConfig, diff_configs, dump_config, load_config, to_tree
from jaxtrain.config.paths import require_local
from jaxtrain.data import Corpus, TextTokenizer
from jaxtrain.data.corpus import cache_of, list_sources, tokenizer_of
from jaxtrain.data.ends import TOKENIZER_CONFIG, ends_file
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.observe.environment import environment
from jaxtrain.observe.events import EVENTS
from jaxtrain.observe.files import write_atomic
from jaxtrain.train.lease import LEASE
from jaxtrain.train.resolve import Bound
from jaxtrain.train.state import state_bytes_per_device

TOKENIZER = "tokenizer.json"
"""The run's tokenizer, in the form of data.tokenizer.path."""

# Settings that stay fixed for a run's life: they change the shapes of the state, the meaning of its numbers or the
# order of the data. Everything else may change at a resume, which prints and records it.
FIXED = ("model.", "data.", "train.global_batch", "train.seed", "optimizer.name")
# ... but for these: RoPE scaling changes between phases with longer sequences, weights of losses and limits of experts
# as a run goes on, and the initialisation is over.
FREE = ("model.rope.", "model.init_std", "model.mtp_weight", "model.moe.balance", "model.moe.z_weight",
        "model.moe.bias_rate", "model.moe.capacity", "model.moe.buffer", "data.cache", "data.allow_changed",
        "data.tokenizer.path")  # fmt: skip
# ... and for these under data.allow_changed.
FREE_WITH_CORPUS = ("data.sources", "data.on_bad_record")
# What may be in a run directory before the run: its lease, and files of a supervisor.
BEFORE_A_RUN = (LEASE, EVENTS, "supervisor", "status", "logs")


def write_run(directory: Path, config: RunConfig, sharding: dict[str, Any], environment: dict[str, Any]) -> None:
    """Create or re-enter a run directory: config.yaml, environment.json, sharding.json."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / "config.yaml", dump_config(config).encode())
    write_atomic(directory / "environment.json", json.dumps(environment, indent=1).encode())
    write_atomic(directory / "sharding.json", json.dumps(sharding, indent=1).encode())


def checkpoint_meta(
    config: RunConfig,
    sizes: dict[Axis, int],
    corpus: Corpus,
    step: int,
    updates: int,
    tokens: int,
    skipped: int,
    origin: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The record beside a checkpoint's state: the run's position, and what must be the same when it resumes.

    origin: the checkpoint whose weights the run began with.
    """
    return {
        "schema": SCHEMA,
        "step": step,
        "updates": updates,
        "tokens": tokens,
        "skipped": skipped,
        "seed": config.train.seed,
        "corpus": corpus.fingerprint,
        "tokenizer": corpus.tokenizer_fingerprint,
        "documents": {"train": len(corpus.train), "held_out": len(corpus.held_out)},
        "mesh": sizes,
        "config": to_tree(config),
        "environment": environment(),
        **({"origin": origin} if origin else {}),
    }


def check_same_run(directory: Path, config: RunConfig) -> list[str]:
    """One line for each setting that changed since the directory's last start.

    Raises ConfigError listing the keys when a setting differs that a resumed run may not change.
    """
    require_local(directory, "--run")
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--run {directory} is a file: name a directory")
    path = directory / "config.yaml"
    if not path.exists():
        if directory.is_dir() and any(not path.name.startswith(BEFORE_A_RUN) for path in directory.iterdir()):
            raise ConfigError(f"--run {directory} is not empty and not a run (it has no config.yaml): name another one")
        return []
    try:
        old = to_tree(load_config(path, hints=False))
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n{path} cannot be read by this version of jaxtrain: use the version that wrote it, or restore or "
            "correct the file"
        ) from None
    rows = diff_configs(old, to_tree(config))
    free = FREE + (FREE_WITH_CORPUS if config.data.allow_changed else ())
    fixed = [row for row in rows if row[0].startswith(FIXED) and not row[0].startswith(free)]
    if fixed:
        table = "\n".join(f"  {key}: {a!r} there, {b!r} now" for key, a, b in fixed)
        raise ConfigError(
            f"{directory} holds a run of another configuration:\n{table}\nchange back, or start a new run with "
            f"another --run directory; --from {directory} begins it with these weights (same model)"
        )
    return [f"{key} changed from {a!r} to {b!r} since the last start" for key, a, b in rows]


def held_tokenizer(directory: Path, config: RunConfig) -> TextTokenizer | None:
    """The tokenizer that a run with checkpoints holds; None for a new run, and for one of versions that held none.

    Raises ConfigError where data.tokenizer.path now names another tokenizer.
    """
    path = directory / TOKENIZER
    if not path.is_file() or not has_checkpoints(directory):
        return None
    held, named = _load_held(directory), config.data.tokenizer.path
    if named is not None and Path(named).expanduser().is_file():
        now = tokenizer_of_path(config)
        if now.fingerprint != held.fingerprint:
            raise ConfigError(
                f"the tokenizer changed since this run began ({held.fingerprint[:12]} -> {now.fingerprint[:12]}): "
                f"data.tokenizer.path {named} is another one: set data.tokenizer.path to {path}, which the run "
                "holds, or start another --run"
            )
    return held


def has_checkpoints(directory: Path) -> bool:
    """Whether a run directory holds a committed checkpoint."""
    return any(each.name.isdecimal() for each in (directory / "checkpoints").glob("*"))


def tokenizer_of_path(config: RunConfig) -> TextTokenizer:
    """The tokenizer of data.tokenizer.path; raises ConfigError where it cannot be read."""
    assert config.data.tokenizer.path is not None
    return load_tokenizer(Path(config.data.tokenizer.path).expanduser(), config.data.tokenizer)


def _load_held(directory: Path) -> TextTokenizer:
    """RUN/tokenizer.json; runs of versions that wrote no tokenizer_config.json keep their choice of ends."""
    return load_tokenizer(directory / TOKENIZER, old=not (directory / TOKENIZER_CONFIG).is_file())


def write_tokenizer(directory: Path, tokenizer: TextTokenizer) -> None:
    """Write the tokenizer and its ends, from which generate, eval and export-hf read token ids without the corpus."""
    # The ends first: without them, a tokenizer.json is taken for one of an old version.
    files = {
        TOKENIZER_CONFIG: ends_file(tokenizer.inner, tokenizer.bos, tokenizer.eos).encode(),
        TOKENIZER: tokenizer.json.encode(),
    }
    for name, content in files.items():
        path = directory / name
        if not path.is_file() or path.read_bytes() != content:
            write_atomic(path, content)


def tokenizer_of_run(directory: Path, config: RunConfig, expected: str) -> TextTokenizer:
    """The tokenizer of a run whose checkpoint was trained with the one of the fingerprint `expected`.

    Runs of versions that held none resolve it again. Raises ConfigError where it is lost.
    """
    path, reasons = directory / TOKENIZER, []
    for resolve in (lambda: _load_held(directory), lambda: _configured_tokenizer(config)):
        try:
            found = resolve()
        except ConfigError as error:
            reasons.append(str(error))
            continue
        if found.fingerprint == expected:
            return found
    why = "is not the one that the run was trained with" if path.is_file() else "is missing"
    sources = config.data.tokenizer.path or "the corpus"
    raise ConfigError(
        f"{path} {why} (fingerprint {expected[:12]}), and {sources} does not give that one: restore {path} or {sources}"
        + "".join(f"\n  {reason}" for reason in reasons)
    )


def _configured_tokenizer(config: RunConfig) -> TextTokenizer:
    cache = cache_of(config.data)
    if config.data.tokenizer.path is not None:
        return tokenizer_of_path(config)
    return tokenizer_of(config, list_sources(config.data, cache), cache)


def check_same_data(directory: Path, config: RunConfig, meta: dict[str, Any], corpus: Corpus) -> list[str]:
    """One line for each change of the data that data.allow_changed accepts.

    Raises ConfigError where corpus or tokenizer are not those of the checkpoint of this `meta`.
    """
    lines = []
    for key, value in (("corpus", corpus.fingerprint), ("tokenizer", corpus.tokenizer_fingerprint)):
        if meta[key] == value:
            continue
        changed = f"the {key} changed since this run began ({meta[key][:12]} -> {value[:12]})"
        if key == "corpus" and config.data.allow_changed:
            lines.append(f"{changed}: data.allow_changed, the run continues at the same position of another order")
            continue
        fix = (
            "restore data.sources, start another --run, or set data.allow_changed"
            if key == "corpus"
            else f"restore {directory / TOKENIZER}, or start another --run"
        )
        raise ConfigError(f"{changed}: the data position of {directory} is meaningless for it; {fix}")
    return lines


def read_summary(directory: Path) -> dict[str, Any] | None:
    """The summary of a finished run, None where there is none; raises ConfigError where it is unreadable."""
    path = directory / "summary.json"
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}): remove it, it is written again") from None


def describe_sharding(bound: Bound) -> dict[str, Any]:
    """The content of `sharding.json`: mesh, devices and the PartitionSpecs of every parameter."""
    parameters = {
        path: {"shape": param.shape, "names": param.names, **{part: str(spec) for part, spec in specs.items()}}
        for path, (param, specs) in bound.layout.by_path(bound.model.params).items()
    }
    return {
        "mesh": bound.topology.sizes,
        "devices": [int(device.id) for device in bound.topology.devices.ravel()],
        "deferred_axes": bound.layout.deferred_axes,
        "batch": str(bound.batch_sharding.spec),
        "state_bytes_per_device": state_bytes_per_device(bound.abstract),
        "parameters": parameters,
    }
