"""Save, read and restore training state. Importing Orbax takes a second."""

from jaxtrain.checkpoint.contents import inspect_checkpoint
from jaxtrain.checkpoint.digest import digest
from jaxtrain.checkpoint.gather import gather_json
from jaxtrain.checkpoint.local import LocalTier
from jaxtrain.checkpoint.reader import CheckpointReader, Restored
from jaxtrain.checkpoint.store import Checkpoints

__all__ = [
    "CheckpointReader", "Checkpoints", "LocalTier", "Restored", "digest", "gather_json", "inspect_checkpoint",
]  # fmt: skip
