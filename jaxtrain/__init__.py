"""jaxtrain: a JAX/XLA SPMD trainer for language models on GPU clusters."""

__version__ = "0.1.0"
