"""XLA compiler options of the train step, checked before a compiler sees them.

All backends of one version share one list of options, so that a GPU's options are accepted and without effect on a CPU:
one config serves both. Values of text options are read by the backend alone and are checked when it compiles.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from jaxtrain.config import ConfigError, RunConfig, nearest
from jaxtrain.ops.low_precision import recipe_of

OptionValue = bool | int | float | str
# Read by jax itself, not by name from the compiler's list.
LEVELS = {"optimization_level": ["O0", "O1", "O2", "O3"], "memory_fitting_level": ["O0", "O1", "O2", "O3"]}


def compiler_options(options: Mapping[str, OptionValue], mesh: Mesh) -> dict[str, OptionValue]:
    """The options of a run with what its devices need.

    Several CPU devices of one process share threads: independent collectives must run in the same
    order on every device, or they deadlock.
    """
    several = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    return {**({"xla_cpu_enable_concurrency_optimized_scheduler": False} if several else {}), **options}


def run_options(config: RunConfig) -> dict[str, OptionValue]:
    """The XLA options of a run: those of its recipe of low precision, and over them its own."""
    recipe = recipe_of(config.precision)
    return {**(recipe.xla if recipe else {}), **config.xla}


def check_options(options: Mapping[str, OptionValue]) -> None:
    """Raise ConfigError for an option that this version's compiler does not know, or of the wrong type."""
    _check(tuple(sorted(options.items())))


@lru_cache
def _check(options: tuple[tuple[str, OptionValue], ...]) -> None:
    for name, value in options:
        if name in LEVELS and value not in LEVELS[name]:
            raise ConfigError(f"xla.{name} is {value!r}: use {', '.join(LEVELS[name])}")
        try:
            # A scalar program: the options of a computation are parsed before it is compiled, and refused by name.
            jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
        except (JaxRuntimeError, ValueError, TypeError) as error:
            raise ConfigError(_explain(name, value, str(error))) from None


def _explain(name: str, value: OptionValue, error: str) -> str:
    if "No such compile option" in error:
        known = option_names()
        near = nearest(name, known) or nearest(f"xla_{name}", known) or nearest(f"xla_gpu_{name}", known)
        return f"xla.{name} is not an option of this version of XLA (jax {jax.__version__}){near}: see jax' XLA flags"
    wanted = re.search(r"is not a valid (\w+) value", error)
    if wanted:
        return f"xla.{name} is {value!r}: use a value of type {wanted[1]}"
    return f"xla.{name} is {value!r}: {error.splitlines()[0]}"


@lru_cache
def option_names() -> list[str]:
    """Names of the options that per-jit compilation accepts, read from the protocol description in jaxlib's library."""
    spec = find_spec("jaxlib")
    assert spec is not None and spec.submodule_search_locations
    names = set(LEVELS)
    for path in Path(spec.submodule_search_locations[0]).glob("libjax_common*"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
            # A FieldDescriptorProto: tag 1 and length, the name, tag 3.
            found = re.finditer(rb"\x0a([\x05-\x7f])(xla_[a-z0-9_]+)\x18", library)
            names |= {m[2].decode() for m in found if len(m[2]) == m[1][0]}
    return sorted(names)
