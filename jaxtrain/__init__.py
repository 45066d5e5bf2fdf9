"""jaxtrain: a JAX/XLA SPMD trainer for language models on GPU clusters."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrain.program.compile import compile_for

__version__ = "0.2.0"
__all__ = ["__version__", "compile_for"]


def __getattr__(name: str) -> Any:
    # On first use: importing the package must cost nothing.
    if name == "compile_for":
        from jaxtrain.program.compile import compile_for

        return compile_for
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
