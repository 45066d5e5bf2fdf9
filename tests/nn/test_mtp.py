"""Multi-token prediction: labels inside documents, the loss by hand, no gradient across document boundaries."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import AXES, ModelConfig, RematConfig, RulesConfig
from jaxtrain.mesh.constraints import use_rules
from jaxtrain.mesh.rules import resolve_rules
from jaxtrain.nn.model import build
from jaxtrain.nn.mtp import mtp_labels, shifted_fields
from jaxtrain.ops.zigzag import zigzag_order

CONFIG = ModelConfig.model_validate({
    "vocab_size": 32, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 24, "max_seq_len": 32, "mtp": 2,
    "mtp_weight": 0.6, "init_std": 0.3,
})  # fmt: skip


def packed_batch(sizes, length, seed=0):
    """Documents of these sizes, then padding; the label is the next token of the document, some are not scored."""
    rng = np.random.default_rng(seed)
    out = {name: np.zeros((1, length), np.int32) for name in ("tokens", "positions", "segments")}
    out["labels"] = np.full((1, length), -1, np.int32)
    at = 0
    for number, size in enumerate(sizes, 1):
        here = slice(at, at + size)
        out["tokens"][0, here] = rng.integers(1, 32, size)
        out["positions"][0, here], out["segments"][0, here] = np.arange(size), number
        scored = rng.random(size - 1) < 0.8
        out["labels"][0, at : at + size - 1] = np.where(scored, out["tokens"][0, at + 1 : at + size], -1)
        at += size
    return out


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=4), st.integers(0, 5), st.integers(1, 7), st.integers(0, 99))
def test_shifted_fields_stay_in_the_document(sizes, padding, depth, seed):
    batch = packed_batch(sizes, sum(sizes) + padding, seed) if sum(sizes) + padding else packed_batch([], 1)
    names = ("tokens", "segments", "labels")
    got = shifted_fields(depth, batch["segments"], *((batch[n], -1 if n == "labels" else 0) for n in names))
    ends = np.cumsum([0, *sizes])
    for name, field in zip(names, got, strict=True):
        want = np.full_like(batch[name], -1 if name == "labels" else 0)
        for start, end in itertools.pairwise(ends):
            for i in range(start, end - depth):
                want[0, i] = batch[name][0, i + depth]
        np.testing.assert_array_equal(field, want, err_msg=name)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([2, 4]), st.integers(1, 3), st.integers(1, 5), st.data())
def test_shifted_fields_are_in_the_order_of_sharded_sequences(devices, chunk, depth, data):
    length = 2 * devices * chunk
    sizes = data.draw(st.lists(st.integers(1, length), max_size=4).filter(lambda sizes: sum(sizes) <= length))
    batch, order = packed_batch(sizes, length), zigzag_order(length, devices)
    want = shifted_fields(depth, batch["segments"], (batch["tokens"], 0), (batch["labels"], -1))
    shape = [devices if axis == "seq" else 1 for axis in AXES]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(shape), AXES)
    stored = {name: field[:, order] for name, field in batch.items()}
    with use_rules(resolve_rules(RulesConfig()), mesh):
        got = shifted_fields(depth, stored["segments"], (stored["tokens"], 0), (stored["labels"], -1))
    for field, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(field, expected[:, order])


def test_worked_example():
    # A = 5 6 7 8, B = 1 2 3: depth 1 at 5 predicts 7, at 6 predicts 8; A's last two and B's last have no such token.
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0]])
    labels = np.array([[6, 7, 8, -1, 2, 3, -1, -1]])
    np.testing.assert_array_equal(
        mtp_labels(labels, segments, 2)[:, 0],
        [[7, 8, -1, -1, 3, -1, -1, -1], [8, -1, -1, -1, -1, -1, -1, -1]],
    )


def rms(x, scale):
    return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + CONFIG.norm_eps) * scale


def test_loss_is_that_of_the_definition():
    """Each depth's loss from separate documents: its block on the projected stream and next embedding (eq. 21-25).

    Rows that pad the vocabulary are no part of it.
    """
    model = build(CONFIG.model_copy(update={"vocab_size": 40, "unpadded_vocab_size": 32}))
    params = jax.jit(model.init)(jax.random.key(0))
    sizes = [7, 5, 2]
    batch = packed_batch(sizes, 16)
    x, _ = jax.jit(model.hidden)(params, batch["tokens"], batch["positions"], batch["segments"])
    totals = {"mtp_scored": jnp.array([6, 4])}
    share, sums, _ = jax.jit(lambda p, x: model.mtp_loss(p, x, batch, RematConfig(), totals))(params, x)

    losses, scored = np.zeros(2), np.zeros(2, int)
    for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        stream = np.asarray(x[:, start : start + size])
        tokens, labels = (batch[name][:, start : start + size] for name in ("tokens", "labels"))
        for depth in (1, 2):
            if size <= depth:
                break
            count = size - depth
            weights = jax.tree.map(lambda a, depth=depth: a[depth - 1], params["mtp"])
            embedded = rms(np.asarray(params["embed"]["tokens"])[tokens[:, depth:]], weights["embed_norm"]["scale"])
            joined = np.concatenate([embedded, rms(stream[:, :count], weights["hidden_norm"]["scale"])], -1)
            stream = _block(weights, joined @ weights["project"]["weight"])
            logits = stream @ np.asarray(params["head"]["weight"], np.float64)[:, :32]
            logs = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
            wanted = labels[0, depth:]
            losses[depth - 1] -= sum(logs[0, i, w] for i, w in enumerate(wanted) if w >= 0)
            scored[depth - 1] += np.sum(wanted >= 0)
    np.testing.assert_array_equal(sums["mtp_scored"], scored)
    np.testing.assert_allclose(sums["mtp_loss"], losses, rtol=2e-5)
    np.testing.assert_allclose(share, 0.6 / 2 * np.sum(losses / [6, 4]), rtol=2e-5)


# A one-layer model whose embedding table holds the stream, at most 8 positions; its norm is that of the depth.
ALONE = build(CONFIG.model_copy(update={"n_layers": 1, "mtp": 0, "vocab_size": 8, "tied_head": True}))
STREAM = jax.jit(lambda params, ids: ALONE.hidden(params, ids, ids, jnp.ones_like(ids))[0])


def _block(weights, x):
    layer = jax.tree.map(lambda a: jnp.asarray(a)[None], weights["block"])
    table = np.zeros((8, x.shape[-1]), np.float32)
    table[: x.shape[1]] = x[0]
    # The positions after the document are masked by causality.
    stream = STREAM({"embed": {"tokens": table}, "layers": layer, "norm": weights["norm"]}, jnp.arange(8)[None])
    return np.asarray(stream[:, : x.shape[1]], np.float64)


def test_no_influence_from_other_documents():
    """A token changes no loss of another document; padding changes none."""
    model = build(CONFIG)
    params = jax.jit(model.init)(jax.random.key(0))
    batch = packed_batch([6, 5], 14)

    @jax.jit
    def losses(tokens):
        fields = {**batch, "tokens": tokens}
        x, _ = model.hidden(params, tokens, batch["positions"], batch["segments"])
        first = np.where(batch["segments"] == 1, batch["labels"], -1)
        return model.mtp_loss(params, x, {**fields, "labels": first}, RematConfig(), {"mtp_scored": 1})[1]["mtp_loss"]

    before = losses(batch["tokens"])
    for at, same in ((1, False), (6, True), (12, True)):
        changed = batch["tokens"].copy()
        changed[0, at] ^= 1
        assert np.array_equal(losses(changed), before) == same, at
