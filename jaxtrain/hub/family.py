"""A family's table and what follows from it: config.json <-> model settings, parameters <-> hub tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from jaxtrain.config import ConfigError, ModelConfig, nearest, validate
from jaxtrain.hub.fields import ROPE_KEYS, ROPE_TYPES, Field, Json, Settings, model_setting, windows_of
from jaxtrain.hub.mapping import ROTARY, DimRange, TensorMapping, hub_shape
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.mesh.param import Param
from jaxtrain.nn.layer_table import layer_runs
from jaxtrain.nn.model import Model

# Keys of config.json that do not describe the model: how to train, sample from or load it. auto_map names code that
# transformers does not run by itself; the tensors of such a model are checked against the family's like any other.
IGNORED_KEYS = {
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "task_specific_params", "pretraining_tp",
    "auto_map", "tokenizer_class", "_attn_implementation", "attn_implementation", "output_attentions",
    "output_hidden_states", "return_dict", "use_return_dict", "torchscript", "is_decoder", "chunk_size_feed_forward",
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "unsloth_fixed", "unsloth_version",
    "do_sample", "max_length", "min_length", "temperature", "top_k", "top_p", "typical_p", "num_beams",
    "num_beam_groups", "num_return_sequences", "repetition_penalty", "length_penalty", "diversity_penalty",
    "encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "early_stopping", "bad_words_ids", "prefix",
    "output_scores", "return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sep_token_id",
    "decoder_start_token_id", "tf_legacy_loss", "use_bfloat16", "gradient_checkpointing", "_num_labels",
    "predict_special_tokens", "_attn_implementation_autoset", "is_llama_config", "transformers.js_config",
}  # fmt: skip
# Features that no family here has: false or 0 is how they compute, anything else is refused.
OFF_KEYS = {
    "is_encoder_decoder", "tie_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "pruned_heads",
    "mlp_bias", "rope_interleaved", "use_mrope", "use_parallel_residual", "clip_qkv", "attn_logit_softcapping",
    "final_logit_softcapping",
}  # fmt: skip
# Model settings that concern training only and have no key in config.json.
TRAINING_SETTINGS = (
    "vocab_size", "unpadded_vocab_size", "mtp_weight", "init_std", "moe.balance", "moe.balance_weight", "moe.z_weight",
    "moe.capacity", "moe.buffer",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """The table of one family."""

    name: str
    """model_type of config.json."""
    architecture: str
    """Class of transformers."""
    base: str
    """Prefix of all tensors but the head; files without the head may omit it."""
    fields: tuple[Field, ...]
    """config.json <-> model settings."""
    outer: Mapping[str, TensorMapping]
    """{path: mapping} of parameters outside the blocks."""
    block: Mapping[str, TensorMapping]
    """{path within the block: mapping} of a block's parameters."""
    experts: Mapping[str, TensorMapping]
    """{path within the block: mapping} of the parameters of each expert."""
    mtp: Mapping[str, TensorMapping]
    """{path: mapping} of multi-token prediction, without its block."""
    copies: Mapping[str, str]
    """{tensor that a file may also hold: tensor that it repeats}"""
    buffers: tuple[str, ...]
    """Glob patterns of tensors that are not parameters."""
    ignored_keys: frozenset[str]
    """Keys of config.json that follow from other keys or do not affect the model."""


@dataclass(frozen=True)
class MappedParam:
    """One parameter and the hub tensors that hold it."""

    path: str
    param: Param
    mapping: TensorMapping
    layers: tuple[int, ...]
    """The hub's layer numbers along the first dim; empty if it is not stacked."""
    sizes: dict[str, int]
    """Sizes of the mapping's letters in the hub; V is the hub's vocabulary."""

    @property
    def leading_dims(self) -> int:
        """Number of leading dims that the tensors' names count: layers, experts."""
        return bool(self.layers) + ("{expert}" in self.mapping.name)

    def name(self, index: tuple[int, ...]) -> str:
        """The hub's name of the tensor at these leading indices."""
        layer = self.layers[index[0]] if self.layers else None
        return self.mapping.name.format(layer=layer, expert=index[-1] if index else None)

    def indices(self, ranges: Sequence[DimRange] | None = None) -> Iterator[tuple[int, ...]]:
        """Leading indices of all its tensors, or of those within ranges of the leading dims."""
        whole = [(0, size) for size in self.param.shape[: self.leading_dims]]
        return itertools.product(*(range(lo, hi) for lo, hi in (ranges or whole)))


def map_params(family: Family, model: Model, vocabulary: int) -> dict[str, MappedParam]:
    """{path: mapped parameter} of a model; raises ConfigError for parameters that the family has no tensor for."""
    flat = flatten_paths(model.params)
    numbers = layer_numbers(model.config)
    out, unmapped = {}, []
    for path, param in flat.items():
        mapping = _find_mapping(family, path, param)
        if mapping is None:
            unmapped.append(path)
            continue
        layers = numbers.get(path.partition("/")[0], ())
        leading = bool(layers) + ("{expert}" in mapping.name)
        sizes = dict(zip(mapping.param_dims, param.shape[leading:], strict=True)) | {ROTARY: model.config.mla.rope_dim}
        if "V" in sizes:
            sizes["V"] = min(vocabulary, sizes["V"])
        out[path] = MappedParam(path, param, mapping, tuple(layers), sizes)
    if unmapped:
        raise ConfigError(f"the hub's {family.name} has no tensor for {', '.join(unmapped)}")
    return out


def tensors_of(params: Mapping[str, MappedParam]) -> dict[str, list[tuple[MappedParam, tuple[int, ...]]]]:
    """{hub tensor: [(parameter, leading index)]} in the order of parameters."""
    out: dict[str, list[tuple[MappedParam, tuple[int, ...]]]] = {}
    for param in params.values():
        for index in param.indices():
            out.setdefault(param.name(index), []).append((param, index))
    return out


def layer_numbers(config: ModelConfig) -> dict[str, list[int]]:
    """{stack of the decoder: the hub's layer numbers, in the stack's order}"""
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


def check_tensors(
    family: Family, params: Mapping[str, MappedParam], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """{copy: original} of the copies in a file that has tensors of these shapes.

    Raises ConfigError naming every tensor that is missing, unknown or of another shape.
    """
    expected = tensors_of(params)
    copies = copies_of(family, params)
    faults = [f"{name} is missing" for name in expected if name not in shapes]
    unknown = [
        name for name in shapes
        if name not in expected and name not in copies and not any(fnmatchcase(name, glob) for glob in family.buffers)
    ]  # fmt: skip
    faults += [f"{name} {list(shapes[name])} is unknown{nearest(name, expected)}" for name in unknown]
    for name, parts in expected.items():
        param = parts[0][0]
        shape = hub_shape(param.mapping, param.sizes)
        if name in shapes and shapes[name] != shape:
            faults.append(
                f"{name} has shape {list(shapes[name])}, parameter {param.path} {list(param.param.shape)} "
                f"needs {list(shape)}"
            )
    if faults:
        more = f"\n  and {len(faults) - 12} more" if len(faults) > 12 else ""
        lines = "".join(f"\n  {fault}" for fault in faults[:12])
        raise ConfigError(f"the tensors do not match {family.name} as config.json describes it:{lines}{more}")
    return {name: original for name, original in copies.items() if name in shapes}


def copies_of(family: Family, params: Mapping[str, MappedParam]) -> dict[str, str]:
    """{copy: original} of tensors that may repeat another one and are not parameters of this model."""
    tensors = tensors_of(params)
    mtp_layers = next((param.layers for path, param in params.items() if path.startswith("mtp/")), ())
    copies = {
        name.format(layer=layer): original
        for name, original in family.copies.items()
        for layer in (mtp_layers if "{layer}" in name else [None])
    }
    return {name: original for name, original in copies.items() if name not in tensors and original in tensors}


def read_model(family: Family, hub: Json, ignore: Sequence[str] = ()) -> Settings:
    """Dotted model settings of a config.json.

    Raises ConfigError for values that the family does not support, and for keys that no field reads, unless they are
    null (not set) or `ignore` names them: false and 0 may switch off what a family does by default.
    """
    for key in {"quantization_config", "compression_config"} - {*ignore}:
        if hub.get(key):
            kind = hub[key].get("quant_method", "unknown") if isinstance(hub[key], dict) else hub[key]
            raise ConfigError(
                f"config.json: {key} ({kind}) says that the weights are quantized, which is not supported: use the "
                "weights before quantization"
            )
    known = IGNORED_KEYS | family.ignored_keys | {key for field in family.fields for key in field.keys} | {*ignore}
    unread = {
        key: value for key, value in hub.items()
        if key not in known and value is not None and (value or key not in OFF_KEYS)
    }  # fmt: skip
    if unread:
        keys = ", ".join(f"{key} {value!r}" for key, value in unread.items())
        raise ConfigError(
            f"config.json: keys of {family.name} that are not supported: {keys}. If they do not affect the model, pass "
            f"--ignore {' '.join(unread)}"
        )
    return {name: value for field in family.fields for name, value in field.read(hub).items()}


def model_of(settings: Settings) -> ModelConfig:
    """A validated model from dotted settings."""
    return validate(
        {"model": nested(settings), "data": {"seq_len": 1, "tokenizer": {"vocab_size": 1}}}, "config.json"
    ).model


def write_model(family: Family, model: ModelConfig, vocabulary: int) -> Json:
    """config.json of a model; raises ConfigError naming the settings that the family cannot express."""
    hub: Json = {"architectures": [family.architecture], "model_type": family.name}
    try:
        for field in family.fields:
            for key, value in field.write(model).items():
                both_dicts = isinstance(value, dict) and isinstance(hub.get(key), dict)
                hub[key] = {**hub[key], **value} if both_dicts else value
        hub["vocab_size"] = vocabulary
        read_back = architecture(model_of(read_model(family, hub)))
    except ConfigError as error:
        raise ConfigError(f"the hub's {family.name} cannot express this model: {error}") from None
    faults = [
        f"model.{name} {value!r} would be read as {read_back.get(name)!r}"
        for name, value in architecture(model).items()
        if not _equal(value, read_back.get(name))
    ]
    if faults:
        raise ConfigError(f"the hub's {family.name} cannot express this model: {'; '.join(faults)}")
    return hub


def architecture(model: ModelConfig) -> Settings:
    """Dotted settings that affect what a model computes, in canonical form, without those that it does not use."""
    flat = dict(_flat(model.model_dump(mode="json")))
    for name in ("n_kv_heads", "head_dim"):
        flat[name] = model_setting(model, name)
    flat["windows"] = windows_of(model)
    flat["moe.d_ff"] = model.moe.d_ff or model.d_ff
    flat["moe.bias_rate"] = model.moe.bias_rate is not None
    flat["mla.v_dim"] = model.mla.v_dim or model.width_of_head
    unused = {"rope.": model.positions != "rope", "moe.": not model.moe.experts, "mla.": not model.mla.kv_rank}
    rope = {"theta", "scaling", *ROPE_KEYS[ROPE_TYPES[model.rope.scaling][0]].values()}
    return {
        name: value for name, value in flat.items()
        if name not in TRAINING_SETTINGS
        and not any(name.startswith(section) for section, is_unused in unused.items() if is_unused)
        and not (name.startswith("rope.") and name.removeprefix("rope.") not in rope)
    }  # fmt: skip


def nested(settings: Settings) -> dict[str, Any]:
    """A tree from dotted settings."""
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


def _find_mapping(family: Family, path: str, param: Param) -> TensorMapping | None:
    stack, _, rest = path.partition("/")
    if stack not in ("layers", "dense_layers", "mtp"):
        return family.outer.get(path)
    if stack == "mtp" and not rest.startswith("block/"):
        return family.mtp.get(rest)
    rest = rest.removeprefix("block/")
    return family.experts.get(rest) if "experts" in param.names else family.block.get(rest)
