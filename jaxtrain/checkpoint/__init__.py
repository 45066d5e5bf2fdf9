"""Save and restore training state: `Checkpoints`, `digest`, `gather_json`. Importing Orbax takes a second."""

from jaxtrain.checkpoint.digest import digest
from jaxtrain.checkpoint.gather import gather_json
from jaxtrain.checkpoint.store import Checkpoints, Restored

__all__ = ["Checkpoints", "Restored", "digest", "gather_json"]
