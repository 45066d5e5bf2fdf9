"""The setting that an unknown name was meant to be: names of other trainers, other sections, misspellings."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from jaxtrain.config.aliases import KEYS
from jaxtrain.config.values import union_branches

# Setting -> its names in other trainers and in speech.
SYNONYMS = {
    "attention.context_parallel": "cp_method context_method ring_attention",
    "checkpoint.every": "save_every save_interval save_steps checkpoint_interval ckpt_every",
    "checkpoint.keep": "save_total_limit keep_last",
    "data.seq_len": "seq_length sequence_length block_size context_length max_length max_target_length ctx_len",
    "data.sources": "data_path dataset dataset_path train_data data_dir corpus",
    "data.tokenizer.path": "tokenizer_path tokenizer_name tokenizer_model",
    "eval.every": "eval_interval eval_steps",
    "mesh.data": "dp dp_size data_parallel data_parallel_size fsdp fsdp_size",
    "mesh.expert": "ep ep_size expert_parallel expert_parallel_size",
    "mesh.pipe": "pp pp_size pipeline_parallel pipeline_parallel_size",
    "mesh.seq": "cp cp_size sp context_parallel_size sequence_parallel",
    "mesh.tensor": "tp tp_size tensor_parallel tensor_parallel_size model_parallel_size",
    "model.d_ff": "ffn_hidden_size intermediate_size mlp_dim ff_dim d_mlp",
    "model.d_model": "hidden_size hidden_dim n_embd emb_dim embed_dim dim width",
    "model.max_seq_len": "max_position_embeddings n_positions",
    "model.moe.experts": "num_experts n_experts num_local_experts n_routed_experts",
    "model.moe.top_k": "num_experts_per_tok experts_per_token",
    "model.n_heads": "num_attention_heads num_heads n_head heads",
    "model.n_kv_heads": "num_key_value_heads num_kv_heads kv_heads",
    "model.n_layers": "num_layers num_hidden_layers n_layer layers depth",
    "model.rope.theta": "rope_theta rotary_base",
    "model.tied_head": "tie_word_embeddings tied_embeddings",
    "observe.wandb_project": "wandb project",
    "optimizer.beta1": "adam_beta1 b1",
    "optimizer.beta2": "adam_beta2 b2",
    "optimizer.clip_norm": "grad_clip max_grad_norm clip_grad clip gradient_clipping",
    "optimizer.eps": "adam_eps adam_epsilon epsilon",
    "optimizer.learning_rate": "lr peak_lr max_lr",
    "optimizer.name": "optim optimizer_type opt_type",
    "optimizer.schedule": "lr_schedule lr_scheduler scheduler lr_scheduler_type",
    "optimizer.warmup": "warmup_steps lr_warmup_steps num_warmup_steps warmup_iters",
    "optimizer.weight_decay": "wd decay_rate",
    "precision.compute": "dtype compute_dtype mixed_precision bf16 fp16 precision",
    "remat.policy": "remat_policy activation_checkpointing gradient_checkpointing recompute",
    "rules.preset": "preset sharding strategy parallelism zero zero_stage",
    "train.accumulation": "gradient_accumulation gradient_accumulation_steps grad_accum accum accumulation_steps",
    "train.global_batch": "batch_size global_batch_size bs train_batch_size batch",
    "train.microbatch": "micro_batch_size per_device_batch_size per_device_train_batch_size microbatch_size mbs",
    "train.seed": "random_seed",
    "train.steps": "max_steps num_steps total_steps train_steps iters max_iters train_iters num_train_steps",
}  # fmt: skip
_BY_SYNONYM = {name: key for key, names in SYNONYMS.items() for name in names.split()}


def setting_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a section and its sections; entries of a list share the path of the list."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for section in _sections(field.annotation):
            yield from setting_keys(section, f"{prefix}{name}.")


def suggest_key(key: str, model: type[BaseModel]) -> str | None:
    """The setting that an unknown dotted key, or a single word, was most likely meant to be."""
    section, _, leaf = key.replace("-", "_").rpartition(".")
    keys = list(setting_keys(model))
    if key in KEYS:
        return KEYS[key]
    same_name = [known for known in keys if known.rpartition(".")[2] == leaf and known != key]
    same_section = {known.rpartition(".")[2]: known for known in keys if known.rpartition(".")[0] == section}
    near = difflib.get_close_matches(leaf, list(same_section), n=1, cutoff=0.8)
    if section and near:
        return same_section[near[0]]
    if leaf in _BY_SYNONYM:
        return _BY_SYNONYM[leaf]
    if same_name:
        return max(same_name, key=lambda known: difflib.SequenceMatcher(None, known, key).ratio())
    near = near or (difflib.get_close_matches(leaf, list(same_section), n=1, cutoff=0.6) if section else [])
    if near:
        return same_section[near[0]]
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6) or difflib.get_close_matches(
        leaf, _BY_SYNONYM, n=1, cutoff=0.8
    )
    return _BY_SYNONYM.get(close[0], close[0]) if close else None


def _sections(annotation: Any) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = []
    for branch in union_branches(annotation):
        for kind in (branch, *getattr(branch, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found.append(kind)
    return found
