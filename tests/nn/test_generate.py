"""Sampling: greedy against the logits of the whole text, temperature, one compilation, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import ConfigError, ModelConfig
from jaxtrain.nn import generate
from jaxtrain.nn.model import build

CONFIG = ModelConfig(
    vocab_size=32, d_model=16, n_layers=2, n_heads=2, d_ff=32, max_seq_len=12, positions="learned", init_std=0.5
)


@pytest.fixture(scope="module")
def setting():
    model = build(CONFIG)
    return model, model.init(jax.random.key(0))


def test_greedy_is_the_argmax_of_the_logits(setting):
    model, params = setting
    text = generate.sample(model, params, [3, 1, 4], 9, 0.0, jax.random.key(0))
    assert text.dtype == np.int32 and text[:3].tolist() == [3, 1, 4] and len({*text[3:].tolist()}) > 1
    logits = model.logits(params, jnp.asarray(text)[None], np.arange(12)[None], np.ones((1, 12), int))
    np.testing.assert_array_equal(np.argmax(logits[0, 2:-1], axis=-1), text[3:])


def test_temperature_draws_from_the_softmax(setting):
    model, params = setting
    draws = [generate.sample(model, params, [5], 1, 1.5, jax.random.key(i))[1] for i in range(300)]
    logits = model.logits(params, jnp.array([[5]]), np.zeros((1, 1), int), np.ones((1, 1), int))[0, 0]
    share = jax.nn.softmax(logits / 1.5)
    likely = int(np.argmax(share))
    spread = np.sqrt(share[likely] * (1 - share[likely]) / 300)
    assert abs(np.mean(np.array(draws) == likely) - share[likely]) < 4 * spread
    assert len({*draws}) > 1


def test_one_compilation_and_the_same_key_the_same_text(setting):
    model, params = setting
    before = generate._fill._cache_size()
    texts = [generate.sample(model, params, prompt, n, 0.7, jax.random.key(7)) for prompt, n in
             [([1, 2], 8), ([1, 2, 3], 7), ([1, 2], 8)]]  # fmt: skip
    assert generate._fill._cache_size() == before + 1
    np.testing.assert_array_equal(texts[0], texts[2])


def test_padded_rows_are_neither_sampled_nor_in_the_logits(setting):
    """huggingface/transformers#29219: logits of trained rows far below the zero of padded ones."""
    _, params = setting
    table = params["head"]["weight"]
    likely = {**params, "head": {"weight": table.at[:, 24:].set(0).at[:, :24].add(-30 * jnp.sign(table[:, :1]))}}
    model = build(CONFIG.model_copy(update={"unpadded_vocab_size": 24}))
    for temperature in (0.0, 5.0):
        text = generate.sample(model, likely, [3], 11, temperature, jax.random.key(1))
        assert (text < 24).all()
    logits = model.logits(likely, jnp.asarray(text)[None], np.arange(12)[None], np.ones((1, 12), int))
    assert np.isneginf(logits[..., 24:]).all() and np.isfinite(logits[..., :24]).all()


@pytest.mark.parametrize(("prompt", "n", "words"), [([], 4, "sample_prompt"), ([1] * 6, 7, "model.max_seq_len 12")])
def test_refuses(setting, prompt, n, words):
    with pytest.raises(ConfigError, match=words):
        generate.sample(*setting, prompt, n, 0.0, jax.random.key(0))


def test_ends_at_the_first_token_of_stop_that_is_drawn(setting):
    model, params = setting
    whole = generate.sample(model, params, [3, 1, 4], 9, 0.0, jax.random.key(0)).tolist()
    stop = whole[5]
    cut = generate.sample(model, params, [3, 1, 4], 9, 0.0, jax.random.key(0), [stop, 31]).tolist()
    assert cut == whole[: whole.index(stop, 3) + 1] and len(cut) < len(whole)
    # One of the prompt ends nothing.
    assert generate.sample(model, params, [3, stop, 4], 1, 0.0, jax.random.key(0), [stop]).shape == (4,)
