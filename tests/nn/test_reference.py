"""The decoder against transformers, family by family: logits, loss, gradient norm, parameter count."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import FAMILIES, load, places, shifted

from jaxtrain.ops.loss import cross_entropy


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_transformers(family):
    ref = load(family)
    tokens = ref.arrays["input_ids"]
    positions, segments = places(tokens)
    # A router's correction is no parameter over there.
    corrections = [leaf.size for path, leaf in jax.tree.leaves_with_path(ref.params) if "correction" in str(path)]
    assert ref.model.count() - sum(corrections) == ref.numbers["parameters"]

    logits = jax.jit(ref.model.logits)(ref.params, tokens, positions, segments)
    expected = ref.arrays["logits"]
    assert np.abs(logits - expected).max() < 5e-6 * np.abs(expected).max()

    def loss(params):
        x, _ = ref.model.hidden(params, tokens, positions, segments)
        total, count = cross_entropy(x, ref.model.head(params), jnp.asarray(shifted(ref.arrays["labels"])))
        return total / count

    value, gradient = jax.jit(jax.value_and_grad(loss))(ref.params)
    np.testing.assert_allclose(value, ref.numbers["loss"], rtol=2e-6)
    np.testing.assert_allclose(optax.global_norm(gradient), ref.numbers["grad_norm"], rtol=5e-6)
    assert all(not leaf.any() for path, leaf in jax.tree.leaves_with_path(gradient) if "correction" in str(path))
