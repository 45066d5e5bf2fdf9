"""What every verb is: a frozen dataclass whose fields are its arguments and whose docstrings are its help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict

VERB = ConfigDict(use_attribute_docstrings=True)
"""Configuration of the pydantic dataclass of each verb."""


@dataclass(frozen=True)
class Positional:
    """Marks a field that is given by its position, under this name in the help."""

    metavar: str


Config = Annotated[str, Positional("CONFIG")]


class Verb:
    """Arguments of one command; called with the overrides of settings."""

    example: ClassVar[str]
    """A command line, for the help."""
    __pydantic_fields__: ClassVar[dict[str, Any]]

    def __call__(self, overrides: Sequence[str]) -> int:
        """Run the verb; returns the exit status."""
        raise NotImplementedError

    def process(self) -> tuple[Any, ...] | None:
        """Arguments of `launch.distributed.join` for a verb that may run in several processes, else None."""
        return None


def run_verb(verb: Verb, overrides: Sequence[str]) -> int:
    """Run a verb, first joining its job where it may run in several processes; returns the exit status."""
    process = verb.process()
    if process is None:
        return verb(overrides)
    from jaxtrain.launch.distributed import guard, join
    from jaxtrain.launch.heartbeat import report_phase

    report_phase("join")
    join(*process)
    return guard(lambda: verb(overrides))
