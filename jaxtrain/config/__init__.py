"""Settings of a run: schema, loading, overrides, dump."""

from jaxtrain.config.data import DataConfig, PhaseConfig, SourceConfig, TokenizerConfig
from jaxtrain.config.errors import (
    ConfigError,
    CorruptionError,
    DivergedError,
    RunError,
    StoppedError,
    StorageError,
    nearest,
)
from jaxtrain.config.load import (
    CONFIG_ROOT,
    SCHEMA,
    check_schema,
    diff_configs,
    dump_config,
    is_run,
    load_config,
    named_cluster,
    replace,
    to_tree,
    validate,
)
from jaxtrain.config.model import MlaConfig, ModelConfig, MoeConfig, RopeConfig
from jaxtrain.config.registry import Registry
from jaxtrain.config.settings import (
    AXES,
    AttentionConfig,
    Axes,
    Axis,
    CheckpointConfig,
    ClusterConfig,
    EvalConfig,
    GuardConfig,
    LocalTierConfig,
    MeshConfig,
    ObserveConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    RematConfig,
    RulesConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "AXES", "CONFIG_ROOT", "SCHEMA", "AttentionConfig", "Axes", "Axis", "CheckpointConfig", "ClusterConfig",
    "ConfigError", "CorruptionError", "DataConfig", "DivergedError", "EvalConfig", "GuardConfig", "LocalTierConfig",
    "MeshConfig", "MlaConfig", "ModelConfig", "MoeConfig", "ObserveConfig", "OptimizerConfig", "PhaseConfig",
    "PipelineConfig", "PrecisionConfig", "Registry", "RematConfig", "RopeConfig", "RulesConfig", "RunConfig",
    "RunError", "SourceConfig", "StoppedError", "StorageError", "TokenizerConfig", "TrainConfig", "check_schema",
    "diff_configs", "dump_config", "is_run", "load_config", "named_cluster", "nearest", "replace", "to_tree",
    "validate",
]  # fmt: skip
