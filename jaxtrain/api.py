"""Entry points for scripts and notebooks; docs/library.md has an example of each, run by the tests.

load_config       YAML and overrides -> RunConfig
resolve, bind     RunConfig -> everything that follows from it, on a topology and on real devices
train             train a run in a directory, with hooks between steps
Step              the pure train step that `train` compiles
evaluate          held-out loss of a run's newest checkpoint
generate          continue a prompt with a run's newest checkpoint
compile_for       compile the train step for a described cluster
verify            compare every layout with a reference computation

Registries that user code extends before it calls them: LOSSES, METRICS, OPTIMIZERS, LEARNING_RATES, ACTIVATIONS, NORMS,
SOURCES.
"""

from jaxtrain.config import ConfigError, Registry, RunConfig, load_config, replace
from jaxtrain.data import SOURCES
from jaxtrain.inspect import inspect
from jaxtrain.mesh.topology import Topology, build_topology
from jaxtrain.nn.activations import ACTIVATIONS, Activation
from jaxtrain.nn.layers import NORMS, NormKind
from jaxtrain.optim import LEARNING_RATES, OPTIMIZERS, DecayShape
from jaxtrain.program.compile import compile_for
from jaxtrain.prove.verify import verify
from jaxtrain.train.hooks import Hook
from jaxtrain.train.loop import train
from jaxtrain.train.losses import LOSSES, METRICS, HeadInputs
from jaxtrain.train.reading import open_run
from jaxtrain.train.resolve import Bound, Resolved, bind, resolve
from jaxtrain.train.run import Run
from jaxtrain.train.step import Step
from jaxtrain.train.use import evaluate, generate

__all__ = [
    "ACTIVATIONS",
    "LEARNING_RATES",
    "LOSSES",
    "METRICS",
    "NORMS",
    "OPTIMIZERS",
    "SOURCES",
    "Activation",
    "Bound",
    "ConfigError",
    "DecayShape",
    "HeadInputs",
    "Hook",
    "NormKind",
    "Registry",
    "Resolved",
    "Run",
    "RunConfig",
    "Step",
    "Topology",
    "bind",
    "build_topology",
    "compile_for",
    "evaluate",
    "generate",
    "inspect",
    "load_config",
    "open_run",
    "replace",
    "resolve",
    "train",
    "verify",
]  # fmt: skip
