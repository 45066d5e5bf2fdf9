"""The verbs `import-hf` and `export-hf`: a hub folder becomes a run at step 0; a run's weights become a hub folder."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import tokenizers
from tokenizers import processors

from jaxtrain.checkpoint import CheckpointReader, Checkpoints, gather_json
from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import ConfigError, DivergedError, RunConfig, validate
from jaxtrain.config.load import apply_overrides, read_yaml
from jaxtrain.config.paths import require_local
from jaxtrain.data import Corpus, TextTokenizer, open_stream, prepare, resolve_virtual_shards, shards_of_rows
from jaxtrain.data.ends import ends_file, read_beside, stop_ids
from jaxtrain.hub.families import FAMILIES, family_of
from jaxtrain.hub.family import Family, nested, write_model
from jaxtrain.hub.fields import Json
from jaxtrain.hub.folder import read_json
from jaxtrain.hub.load import describe_folder, load
from jaxtrain.hub.save import Dtype, new_folder, save, write_json
from jaxtrain.launch.coordination import wait_for_all
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.observe.environment import environment
from jaxtrain.optim import all_finite
from jaxtrain.train.agreement import agree_on_start
from jaxtrain.train.batch import owned_rows
from jaxtrain.train.reading import bind_here, run_config
from jaxtrain.train.resolve import Bound, bind
from jaxtrain.train.run_dir import checkpoint_meta, describe_sharding, tokenizer_of_run, write_run, write_tokenizer

ORIGIN = "hub"
"""Folder of an imported run that holds the hub's configuration and tokenizer files."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
COPIED_FILES = (
    *TOKENIZER_FILES, "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def import_run(
    directory: Path, run: Path, config: str | None = None, overrides: Sequence[str] = (), ignore: Sequence[str] = ()
) -> dict[str, Any]:
    """Create the run `run` from the model in `directory`, at step 0; returns a summary.

    config: settings of everything but the model, and of the tokenizer if the folder has none. Raises ConfigError if
    folder, configuration and data do not fit together; nothing is written before all weights are read.
    """
    family, hub, settings = describe_folder(directory, tuple(ignore))
    _check_new(run)
    _check_copied(directory)
    tree = (read_yaml(Path(config)) if config else {}) | {"model": nested(settings)}
    tokenizer = next((name for name in TOKENIZER_FILES if (directory / name).is_file()), None)

    def parsed(home: Path) -> RunConfig:
        """The run's configuration with the tokenizer file in `home`."""
        path = [f"data.tokenizer.path={(home / tokenizer).absolute()}"] if tokenizer else []
        given = _check_tokenizer(apply_overrides(apply_overrides(tree, path), overrides), directory)
        # Rows that a larger model.vocab_size adds are padding.
        if given["model"]["vocab_size"] != hub["vocab_size"]:
            given["model"].setdefault("unpadded_vocab_size", hub["vocab_size"])
        return validate(given)

    # Use the folder's tokenizer until everything is checked; then it is copied into the run.
    agree_on_start(parsed(directory))
    setup = bind(parsed(directory))
    corpus = prepare(setup.config)
    if corpus.tokenizer.vocab_size > hub["vocab_size"]:
        raise ConfigError(
            f"data.tokenizer.path {setup.config.data.tokenizer.path} has token ids up to "
            f"{corpus.tokenizer.vocab_size - 1}, beyond the {hub['vocab_size']} rows of {directory}: use the model's "
            "tokenizer"
        )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, CheckpointOrder(setup).model_order["params"])
    params = load(directory, family, setup.canonical, hub["vocab_size"], shardings)
    _write_run(directory, run, parsed(run / ORIGIN), setup, corpus, params)
    return {
        "family": family.name,
        "parameters": setup.model.count(),
        "vocabulary": hub["vocab_size"],
        "padded_rows": setup.config.model.vocab_size - hub["vocab_size"],
        "ends": corpus.tokenizer.describe(),
    }


def export_run(
    run: Path,
    directory: Path,
    dtype: Dtype = "float32",
    max_shard_gb: float = 5.0,
    family: str | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Write the weights of a run's newest intact checkpoint as a hub folder; returns counts.

    Rows of the vocabulary that the imported model did not have are left out. Raises ConfigError if no family can
    express the model, or if `directory` exists already.
    """
    config = run_config(run, overrides)
    origin = run / ORIGIN
    hub = read_json(origin / "config.json") if (origin / "config.json").is_file() else {}
    vocabulary = hub.get("vocab_size", config.model.token_rows)
    chosen, hub_config = _find_family(config, vocabulary, family or hub.get("model_type"))
    agree_on_start(config, read=run)
    setup = bind_here(config, overrides)
    step, params, tokenizer = _restore_weights(run, config, setup)
    shard_bytes = max(math.floor(max_shard_gb * 1e9), 1)
    with new_folder(directory) as temporary:
        counts = save(temporary, chosen, setup.canonical, params, vocabulary, dtype, shard_bytes)
        special = {key: hub[key] for key in SPECIAL_TOKENS if key in hub} or _special_tokens(tokenizer)
        if jax.process_index() == 0:
            write_json(temporary / "config.json", {**hub_config, **special, "dtype": dtype, "torch_dtype": dtype})
            _write_tokenizer(temporary, origin, tokenizer, special)
    return {"family": chosen.name, "update": step, "dtype": dtype, "vocabulary": vocabulary, **counts}


def _check_tokenizer(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    if (tree.get("data") or {}).get("tokenizer", {}).get("path") is None:
        raise ConfigError(
            f"{directory} has neither {' nor '.join(TOKENIZER_FILES)}: name the model's tokenizer with "
            "--data.tokenizer.path FILE"
        )
    return tree


def _check_copied(directory: Path) -> None:
    """Refuse files that are not whole, also those that are only copied: generation and export read them much later."""
    for path in (directory / name for name in COPIED_FILES):
        if path.suffix == ".json" and path.name not in TOKENIZER_FILES:
            read_beside(path)
            continue
        try:
            whole = not (path.is_symlink() or path.exists()) or path.stat().st_size > 0
            if path.suffix == ".jinja" and path.is_file():
                whole = bool(path.read_text(encoding="utf-8").strip())
        except (OSError, ValueError):
            whole = False
        if not whole:
            raise ConfigError(f"{path} is empty or not readable: download it again, or move it away")
    stop_ids(directory, eos=0)


def _check_new(run: Path) -> None:
    require_local(run, "RUN")
    if run.is_file() or (run.is_dir() and any(run.iterdir())):
        raise ConfigError(f"{run} exists already: name a new or empty run directory")


def _write_run(directory: Path, run: Path, config: RunConfig, setup: Bound, corpus: Corpus, params: Any) -> None:
    """Write the run directory and its checkpoint at step 0: a new optimizer state and the start of the data."""
    primary = jax.process_index() == 0
    wait_for_all("weights imported", 3600.0)
    if primary:
        write_run(run, config, describe_sharding(setup), environment())
        write_tokenizer(run, corpus.tokenizer)
        (run / ORIGIN).mkdir()
        for name in COPIED_FILES:
            if (directory / name).is_file():
                shutil.copyfile(directory / name, run / ORIGIN / name)
    first = setup.phases[0]
    shards = resolve_virtual_shards(config.data, *(phase.global_batch for phase in setup.phases))
    lo, hi = owned_rows(setup.batch_shapes[0], setup.batch_sharding, first.seq_len)
    stream = open_stream(corpus.train, config, shards_of_rows(lo, hi, first.global_batch, shards))
    meta = checkpoint_meta(config, setup.topology.sizes, corpus, step=0, updates=0, tokens=0, skipped=0)
    with contextlib.closing(Checkpoints(run / "checkpoints", config.checkpoint)) as checkpoints:
        checkpoints.save(0, CheckpointOrder(setup).initial_checkpoint(params), gather_json(stream.get_state()), meta)
        checkpoints.wait()


def _find_family(config: RunConfig, vocabulary: int, name: str | None) -> tuple[Family, Json]:
    """The named family, or the first that can express the model, and its config.json."""
    if name is not None:
        family = family_of(name)
        return family, write_model(family, config.model, vocabulary)
    reasons = []
    for family in FAMILIES.values():
        try:
            return family, write_model(family, config.model, vocabulary)
        except ConfigError as error:
            reasons.append(f"\n  {error}")
    raise ConfigError(f"no family of the hub can express this model:{''.join(reasons)}")


def _restore_weights(run: Path, config: RunConfig, setup: Bound) -> tuple[int, Any, TextTokenizer]:
    restored = CheckpointReader(run / "checkpoints").restore(CheckpointOrder(setup).params_layout, subset=True)
    if restored is None:
        raise ConfigError(f"{run} has no checkpoint: train it first")
    params = restored.state["params"]
    finite = jax.device_get(jax.jit(partial(jax.tree.map, all_finite))(params))
    if bad := [path for path, fine in flatten_paths(finite).items() if not fine]:
        raise DivergedError(
            f"the weights of step {restored.step} of {run} are not finite ({', '.join(bad[:4])}) and are not exported: "
            "remove that checkpoint to export the one before"
        )
    tokenizer = tokenizer_of_run(run, config, restored.meta["tokenizer"])
    return restored.step, params, tokenizer


def _special_tokens(tokenizer: TextTokenizer) -> Json:
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}


def _write_tokenizer(directory: Path, origin: Path, tokenizer: TextTokenizer, special: Json) -> None:
    """Write tokenizer.json and what generation needs: the imported model's files, or new ones."""
    for name in COPIED_FILES:
        if name != "config.json" and (origin / name).is_file():
            shutil.copyfile(origin / name, directory / name)
    (directory / TOKENIZER_FILES[0]).write_text(opening_json(tokenizer), encoding="utf-8")
    if not (directory / "generation_config.json").exists():
        write_json(directory / "generation_config.json", special)
    if not (directory / "tokenizer_config.json").exists():
        text = ends_file(tokenizer.inner, tokenizer.bos, tokenizer.eos)
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def opening_json(tokenizer: TextTokenizer) -> str:
    """The tokenizer's JSON with a post-processor that puts the opening token of training in front of a text."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.json)
    if tokenizer.bos is None or inner.encode("", add_special_tokens=True).ids[:1] == [tokenizer.bos]:
        return tokenizer.json
    name = inner.id_to_token(tokenizer.bos)
    opening = processors.TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A {name}:1 $B:1", special_tokens=[(name, tokenizer.bos)]
    )
    there = inner.post_processor
    inner.post_processor = opening if there is None else processors.Sequence([there, opening])
    return str(inner.to_str())
