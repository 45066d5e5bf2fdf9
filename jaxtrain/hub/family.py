"""What a family is made of, and what follows from it: config.json <-> model settings, parameters -> tensors' names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from jaxtrain.config import ConfigError, ModelConfig, nearest, validate
from jaxtrain.hub.fields import KINDS, SCALINGS, Field, Json, Settings, setting, windows_of
from jaxtrain.hub.rows import ROTARY, Span, TensorRow, hub_shape
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.mesh.param import Param
from jaxtrain.nn.decoder import layer_runs
from jaxtrain.nn.model import Model

# What config.json says beside the model: how to train, sample or load it.
INERT = {
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "task_specific_params", "pretraining_tp",
}  # fmt: skip
# Settings of training alone: config.json has no word for them.
FREE = ("vocab_size", "mtp_weight", "init_std", "moe.balance", "moe.balance_weight", "moe.z_weight", "moe.capacity",
        "moe.buffer")  # fmt: skip


@dataclass(frozen=True)
class Family:
    """The table of one family."""

    name: str
    """config.json's model_type."""
    architecture: str
    """The class that transformers loads."""
    base: str
    """Prefix of all tensors but the head; files of the bare model leave it out."""
    fields: tuple[Field, ...]
    """config.json <-> model settings."""
    outer: Mapping[str, TensorRow]
    """Parameter outside the blocks -> row."""
    block: Mapping[str, TensorRow]
    """Parameter of a block, its path within the block -> row."""
    mixture: Mapping[str, TensorRow]
    """Parameters that the experts of a block have each."""
    ahead: Mapping[str, TensorRow]
    """Parameters of the blocks that predict further tokens, beside those blocks' own."""
    copies: Mapping[str, str]
    """A tensor that a file may hold besides -> the tensor that it repeats."""
    buffers: tuple[str, ...]
    """Names, as globs, of tensors that hold nothing learned."""
    inert: frozenset[str]
    """Further keys of config.json that follow from others or say nothing of the model."""


@dataclass(frozen=True)
class Leaf:
    """One parameter and where it lies in the hub."""

    path: str
    param: Param
    row: TensorRow
    layers: tuple[int, ...]
    """The hub's layer numbers along the first dim; empty outside stacks."""
    sizes: dict[str, int]
    """Of the row's letters, in the hub: V is the hub's vocabulary."""

    @property
    def leading(self) -> int:
        """Dims that tensors' names count: layers, experts."""
        return bool(self.layers) + ("{expert}" in self.row.name)

    def name(self, place: tuple[int, ...]) -> str:
        """The hub's name of the tensor at these leading indices."""
        layer = self.layers[place[0]] if self.layers else None
        return self.row.name.format(layer=layer, expert=place[-1] if place else None)

    def places(self, spans: Sequence[Span] | None = None) -> Iterator[tuple[int, ...]]:
        """Leading indices of all its tensors, or of those within spans of the leading dims."""
        whole = [(0, size) for size in self.param.shape[: self.leading]]
        return itertools.product(*(range(lo, hi) for lo, hi in (spans or whole)))


def leaves_of(family: Family, model: Model, vocabulary: int) -> dict[str, Leaf]:
    """Path -> leaf of every parameter; raises ConfigError for one that the family has no tensor for."""
    flat = flatten_paths(model.params)
    numbers = layer_numbers(model.config)
    out, homeless = {}, []
    for path, param in flat.items():
        row = _row_of(family, path, param)
        if row is None:
            homeless.append(path)
            continue
        layers = numbers.get(path.partition("/")[0], ())
        leading = bool(layers) + ("{expert}" in row.name)
        sizes = dict(zip(row.ours, param.shape[leading:], strict=True)) | {ROTARY: model.config.mla.rope_dim}
        if "V" in sizes:
            sizes["V"] = min(vocabulary, sizes["V"])
        out[path] = Leaf(path, param, row, tuple(layers), sizes)
    if homeless:
        raise ConfigError(f"the hub's {family.name} has no tensor for {', '.join(homeless)}")
    return out


def tensors_of(leaves: Mapping[str, Leaf]) -> dict[str, list[tuple[Leaf, tuple[int, ...]]]]:
    """The hub's tensors by name, in the order of parameters: the leaves that each makes up, and where in them."""
    out: dict[str, list[tuple[Leaf, tuple[int, ...]]]] = {}
    for leaf in leaves.values():
        for place in leaf.places():
            out.setdefault(leaf.name(place), []).append((leaf, place))
    return out


def layer_numbers(config: ModelConfig) -> dict[str, list[int]]:
    """Stack of the decoder -> the hub's layer numbers, in the stack's order."""
    found: dict[str, dict[int, int]] = {"layers": {}, "dense_layers": {}}
    number = 0
    for run in layer_runs(config):
        rows = [range(config.n_layers)[part] for _, part in run.pattern]
        for period in range(run.periods):
            for (stack, _), row in zip(run.pattern, rows, strict=True):
                found[stack][row[period]] = number
                number += 1
    numbers = {stack: [layers[row] for row in sorted(layers)] for stack, layers in found.items()}
    return numbers | {"mtp": [*range(number, number + config.mtp)]}


def check_tensors(family: Family, leaves: Mapping[str, Leaf], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The copies that a file holds (name -> what it repeats).

    Raises ConfigError naming every tensor that is missing, unknown or of another shape.
    """
    claimed = tensors_of(leaves)
    copies = copies_of(family, leaves)
    faults = [f"{name} is missing" for name in claimed if name not in shapes]
    unknown = [
        name for name in shapes
        if name not in claimed and name not in copies and not any(fnmatchcase(name, glob) for glob in family.buffers)
    ]  # fmt: skip
    faults += [f"{name} {list(shapes[name])} is unknown{nearest(name, claimed)}" for name in unknown]
    for name, claims in claimed.items():
        leaf = claims[0][0]
        expected = hub_shape(leaf.row, leaf.sizes)
        if name in shapes and shapes[name] != expected:
            faults.append(
                f"{name} has shape {list(shapes[name])}, parameter {leaf.path} {list(leaf.param.shape)} "
                f"needs {list(expected)}"
            )
    if faults:
        more = f"\n  and {len(faults) - 12} more" if len(faults) > 12 else ""
        lines = "".join(f"\n  {fault}" for fault in faults[:12])
        raise ConfigError(f"the tensors are not those of {family.name} as config.json describes it:{lines}{more}")
    return {name: original for name, original in copies.items() if name in shapes}


def copies_of(family: Family, leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """Tensors that may repeat another one, unless they are parameters of this model, -> that one."""
    claimed = tensors_of(leaves)
    ahead = next((leaf.layers for path, leaf in leaves.items() if path.startswith("mtp/")), ())
    named = {
        name.format(layer=layer): original
        for name, original in family.copies.items()
        for layer in (ahead if "{layer}" in name else [None])
    }
    return {name: original for name, original in named.items() if name not in claimed and original in claimed}


def read_model(family: Family, hub: Json, ignore: Sequence[str] = ()) -> Settings:
    """Model settings, dotted, of a config.json.

    Raises ConfigError where it asks for what the family's table cannot give, or says something that nobody reads and
    `ignore` does not name.
    """
    known = INERT | family.inert | {key for field in family.fields for key in field.keys} | {*ignore}
    unread = {key: value for key, value in hub.items() if key not in known and value}
    if unread:
        said = ", ".join(f"{key} {value!r}" for key, value in unread.items())
        raise ConfigError(
            f"config.json: {family.name} does not know {said}: where that changes nothing of the model, --ignore "
            f"{' '.join(unread)}"
        )
    return {name: value for field in family.fields for name, value in field.read(hub).items()}


def model_of(settings: Settings) -> ModelConfig:
    """Dotted settings -> a validated model."""
    return validate(
        {"model": nested(settings), "data": {"seq_len": 1, "tokenizer": {"vocab_size": 1}}}, "config.json"
    ).model


def write_model(family: Family, model: ModelConfig, vocabulary: int) -> Json:
    """config.json of a model; raises ConfigError naming the settings that the family has no words for."""
    hub: Json = {"architectures": [family.architecture], "model_type": family.name}
    try:
        for field in family.fields:
            for key, value in field.write(model).items():
                both = isinstance(value, dict) and isinstance(hub.get(key), dict)
                hub[key] = {**hub[key], **value} if both else value
        hub["vocab_size"] = vocabulary
        back = architecture(model_of(read_model(family, hub)))
    except ConfigError as error:
        raise ConfigError(f"the hub's {family.name} cannot say this model: {error}") from None
    faults = [
        f"model.{name} {value!r} would be read as {back.get(name)!r}"
        for name, value in architecture(model).items()
        if not _equal(value, back.get(name))
    ]
    if faults:
        raise ConfigError(f"the hub's {family.name} cannot say this model: {'; '.join(faults)}")
    return hub


def architecture(model: ModelConfig) -> Settings:
    """The settings that decide what a model computes, dotted, in one spelling; what it does not use is left out."""
    flat = dict(_flat(model.model_dump(mode="json")))
    for name in ("n_kv_heads", "head_dim"):
        flat[name] = setting(model, name)
    flat["windows"] = windows_of(model)
    flat["moe.d_ff"] = model.moe.d_ff or model.d_ff
    flat["moe.bias_rate"] = model.moe.bias_rate is not None
    flat["mla.v_dim"] = model.mla.v_dim or model.width_of_head
    unused = {"rope.": model.positions != "rope", "moe.": not model.moe.experts, "mla.": not model.mla.kv_rank}
    rope = {"theta", "scaling", *SCALINGS[KINDS[model.rope.scaling][0]].values()}
    return {
        name: value for name, value in flat.items()
        if name not in FREE
        and not any(name.startswith(part) for part, gone in unused.items() if gone)
        and not (name.startswith("rope.") and name.removeprefix("rope.") not in rope)
    }  # fmt: skip


def nested(settings: Settings) -> dict[str, Any]:
    """Dotted settings -> a tree."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)


def _row_of(family: Family, path: str, param: Param) -> TensorRow | None:
    stack, _, rest = path.partition("/")
    if stack not in ("layers", "dense_layers", "mtp"):
        return family.outer.get(path)
    if stack == "mtp" and not rest.startswith("block/"):
        return family.ahead.get(rest)
    rest = rest.removeprefix("block/")
    return family.mixture.get(rest) if "experts" in param.names else family.block.get(rest)
