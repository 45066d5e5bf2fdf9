"""For tests that look at source lines."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def lines_in_the_cache_key() -> Iterator[None]:
    """Without it, a cached program names the source lines of the first compilation."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)
