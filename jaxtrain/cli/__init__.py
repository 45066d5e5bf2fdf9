"""The command line: one file per verb, each thin (parse, call, print)."""

from jaxtrain.cli.main import main
from jaxtrain.cli.parse import split_overrides

__all__ = ["main", "split_overrides"]
