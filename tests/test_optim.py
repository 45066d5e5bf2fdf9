"""Optimizers against NumPy, schedules against worked values, clipping on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config import ConfigError, OptimizerConfig
from jaxtrain.mesh.param import Param
from jaxtrain.optim import build_optimizer, clip_scale, decay_mask, global_norm, learning_rate

LAYERS, EMBED, HEADS, WIDTH, FF, VOCAB = 2, 8, 3, 2, 12, 16
PARAMS = {
    "embed": {
        "tokens": Param((VOCAB, EMBED), ("vocab", "embed")),
        "positions": Param((5, EMBED), ("positions", "embed")),
    },
    "layers": {
        "q": Param((LAYERS, EMBED, HEADS, WIDTH), ("layers", "embed", "heads", "head_dim")),
        "q_b": Param((LAYERS, HEADS, WIDTH), ("layers", "heads", "head_dim")),
        "k_b": Param((LAYERS, HEADS, WIDTH), ("layers", "kv_heads", "head_dim")),
        "q_norm": Param((LAYERS, WIDTH), ("layers", "head_dim")),
        "o": Param((LAYERS, HEADS, WIDTH, EMBED), ("layers", "heads", "head_dim", "embed")),
        "up": Param((LAYERS, EMBED, FF), ("layers", "embed", "mlp")),
        "up_b": Param((LAYERS, FF), ("layers", "mlp")),
        "experts": Param((LAYERS, 4, EMBED, FF), ("layers", "experts", "embed", "mlp")),
        "experts_b": Param((LAYERS, 4, FF), ("layers", "experts", "mlp")),
        "router": Param((LAYERS, EMBED, 4), ("layers", "embed", "experts")),
        "norm": Param((LAYERS, EMBED), ("layers", "norm")),
    },
    "final": Param((EMBED,), ("norm",)),
    "head": Param((EMBED, VOCAB), ("embed", "vocab")),
}
HIDDEN = {f"layers/{name}" for name in ("q", "o", "up", "experts", "router")}
MATRICES = HIDDEN | {"embed/tokens", "embed/positions", "head"}


def is_param(x):
    return isinstance(x, Param)


def flat(tree, is_leaf=None):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def random_tree(seed, params=PARAMS):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params, is_leaf=is_param)


def close(got, want, tolerance=2e-5):
    """Largest difference relative to the largest value."""
    assert np.max(np.abs(np.asarray(got, np.float64) - want)) <= tolerance * np.max(np.abs(want))


def descend(config, params, gradients, rate, specs=PARAMS):
    """Apply `p - rate * direction` for each gradient in turn."""
    optimizer = build_optimizer(config, specs)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        direction, state = update(gradient, state, params)
        params = jax.tree.map(lambda p, d: p - rate * d, params, direction)
    return flat(params), state


def adamw_numpy(p, gradients, rate, c, decays):
    """PyTorch's AdamW, float64: decay first, then the bias-corrected step with eps outside the root."""
    p = p.astype(np.float64)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        g = g.astype(np.float64)
        p = p * (1 - rate * c.weight_decay * decays)
        m, v = c.beta1 * m + (1 - c.beta1) * g, c.beta2 * v + (1 - c.beta2) * g * g
        denominator = np.sqrt(v) / np.sqrt(1 - c.beta2**t) + c.eps
        p = p - rate / (1 - c.beta1**t) * m / denominator
    return p


def test_decay_mask_spares_biases_and_scales_of_any_rank():
    assert {path for path, decays in flat(decay_mask(PARAMS)).items() if decays} == MATRICES


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_adamw_is_pytorchs(eps):
    c = OptimizerConfig(name="adamw", beta1=0.9, beta2=0.95, eps=eps, weight_decay=0.3)
    params, gradients = random_tree(0), [random_tree(seed) for seed in range(1, 6)]
    got, _ = descend(c, params, gradients, 0.05)
    for path, start in flat(params).items():
        steps = [flat(g)[path] for g in gradients]
        close(got[path], adamw_numpy(start, steps, 0.05, c, path in MATRICES))


def test_lion_is_the_papers():
    c = OptimizerConfig(name="lion", beta1=0.9, beta2=0.99, weight_decay=0.3)
    params, gradients = random_tree(0), [random_tree(seed) for seed in range(1, 6)]
    got, _ = descend(c, params, gradients, 0.05)
    for path, start in flat(params).items():
        p, m = start.astype(np.float64), np.zeros(start.shape)
        for g in (flat(g)[path] for g in gradients):
            p = p - 0.05 * (np.sign(0.9 * m + 0.1 * g) + 0.3 * p * (path in MATRICES))
            m = 0.99 * m + 0.01 * g
        close(got[path], p)


def newton_schulz(g):
    """Five quintic steps of Jordan 2024 on one matrix."""
    x = g / np.linalg.norm(g)
    if wide := x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if wide else x


def test_muon_orthogonalises_hidden_matrices_and_uses_adamw_for_the_rest():
    c = OptimizerConfig(name="muon", beta1=0.95, beta2=0.95, weight_decay=0.3)
    params, gradients = random_tree(0), [random_tree(seed) for seed in range(1, 4)]
    got, _ = descend(c, params, gradients, 0.05)
    matrix = {
        "layers/q": (EMBED, HEADS * WIDTH),
        "layers/o": (HEADS * WIDTH, EMBED),
        "layers/up": (EMBED, FF),
        "layers/experts": (EMBED, FF),
        "layers/router": (EMBED, 4),
    }
    assert matrix.keys() == HIDDEN
    for path, start in flat(params).items():
        steps = [flat(g)[path] for g in gradients]
        if path not in HIDDEN:
            close(got[path], adamw_numpy(start, steps, 0.05, c, path in MATRICES))
            continue
        size = (-1, *matrix[path])
        stacks = [np.asarray(a, np.float64).reshape(size) for a in (start, *steps, got[path])]
        for one, *gs, result in zip(*stacks, strict=True):
            p, m, b = one, np.zeros(matrix[path]), 0.95
            for t, g in enumerate(gs, 1):
                m = b * m + (1 - b) * g
                ahead = b * m / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)
                p = p - 0.05 * (0.2 * max(matrix[path]) ** 0.5 * newton_schulz(ahead) + 0.3 * p)
            close(result, p, 1e-4)


def test_muon_directions_have_the_rms_of_adamw():
    """Liu et al. 2025: 0.2 sqrt(max) x orthogonal has RMS near 0.2 for any shape."""
    params = {"tall": Param((256, 32), ("embed", "mlp")), "wide": Param((32, 256), ("embed", "mlp"))}
    optimizer = build_optimizer(OptimizerConfig(name="muon", weight_decay=0), params)
    tree = random_tree(0, params)
    direction, _ = optimizer.update(tree, optimizer.init(tree), tree)
    for leaf in direction.values():
        assert 0.13 < float(jnp.sqrt(jnp.mean(leaf**2))) < 0.25


def test_adafactor_factors_each_layer_by_itself():
    """Shazeer & Stern 2018, algorithm 4 without relative step. Each layer is factored alone."""
    stack, rows, columns = 130, 128, 160
    params = {
        "w": Param((stack, rows, columns), ("layers", "embed", "mlp")),
        "b": Param((stack, columns), ("layers", "mlp")),
    }
    c = OptimizerConfig(name="adafactor", weight_decay=0.1)
    start, gradients = random_tree(0, params), [random_tree(seed, params) for seed in (1, 2, 3)]
    gradients[1]["w"][7] *= 50  # one layer's clip must not touch the others
    got, state = descend(c, start, gradients, 0.05, params)
    for layer in (0, 7, 129):
        p, r, s = start["w"][layer].astype(np.float64), np.zeros(rows), np.zeros(columns)
        q, v = start["b"][layer].astype(np.float64), np.zeros(columns)
        for t, g in enumerate(gradients, 1):
            decay = 1 - t**-0.8
            square = g["w"][layer].astype(np.float64) ** 2 + 1e-30
            r, s = (decay * old + (1 - decay) * square.mean(dim) for old, dim in ((r, 1), (s, 0)))
            u = g["w"][layer] / np.sqrt(np.outer(r, s) / r.mean())
            p = p - 0.05 * (u / max(1, np.sqrt(np.mean(u**2))) + 0.1 * p)
            v = decay * v + (1 - decay) * (g["b"][layer].astype(np.float64) ** 2 + 1e-30)
            u = g["b"][layer] / np.sqrt(v)
            q = q - 0.05 * u / max(1, np.sqrt(np.mean(u**2)))
        close(got["w"][layer], p)
        close(got["b"][layer], q)
    elements = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert elements < 0.03 * stack * rows * columns


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_state_keeps_the_paths_of_parameters(name):
    optimizer = build_optimizer(OptimizerConfig(name=name), PARAMS)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), PARAMS, is_leaf=is_param)
    state = {path: leaf.shape for path, leaf in flat(jax.eval_shape(optimizer.init, shapes)).items()}
    for path, param in flat(PARAMS, is_leaf=is_param).items():
        assert any(key.endswith("/" + path) and shape == param.shape for key, shape in state.items()), path


def test_global_norm_counts_each_parameter_once_on_any_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    tree = random_tree(0)
    want = np.sqrt(sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in jax.tree.leaves(tree)))
    for spec in (P(), P("data"), P("tensor"), P(("data", "tensor")), P(None, "tensor")):

        def put(leaf, spec=spec):
            fits = all(n % 8 == 0 for n in leaf.shape[: len(spec)]) and leaf.ndim >= len(spec)
            return jax.device_put(leaf, NamedSharding(mesh, spec if fits else P()))

        norm = jax.jit(global_norm)(jax.tree.map(put, tree))
        assert norm.dtype == jnp.float32
        assert abs(float(norm) - want) < 1e-6 * want
    halves = jax.tree.map(lambda leaf: jnp.full_like(leaf, 300, jnp.float16), tree)  # 300^2 exceeds float16's range
    count = sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert abs(float(global_norm(halves)) / (300 * count**0.5) - 1) < 1e-6


@settings(deadline=None)
@given(norm=st.floats(0, 1e6, width=32), limit=st.floats(1e-3, 1e3))
def test_clip_scale_brings_the_norm_to_the_limit(norm, limit):
    scale = float(clip_scale(jnp.float32(norm), limit))
    assert scale == 1 if np.float32(norm) <= np.float32(limit) else abs(norm * scale - limit) < 1e-5 * limit
    assert float(clip_scale(jnp.float32(norm), None)) == 1


def rate(steps=0, tokens=0, **keys):
    got = learning_rate(OptimizerConfig(learning_rate=2.0, **keys), 100, jnp.int32(steps), jnp.float32(tokens))
    assert got.dtype == jnp.float32 and got.shape == ()
    return float(got)


WORKED = [
    # schedule, warmup, decay, final_ratio, [(steps, learning rate for a peak of 2)] for 100 steps
    ("cosine", 0, 0, 0.1, [(0, 2.0), (50, 1.1), (25, 0.2 + 0.9 * (1 + 0.5**0.5)), (100, 0.2), (1000, 0.2)]),
    ("cosine", 10, 0, 0.0, [(0, 0.2), (4, 1.0), (9, 2.0), (10, 2.0), (55, 1.0), (100, 0.0)]),
    ("linear", 20, 0, 0.5, [(0, 0.1), (19, 2.0), (20, 2.0), (60, 1.5), (100, 1.0), (200, 1.0)]),
    ("wsd", 10, 40, 0.1, [(0, 0.2), (10, 2.0), (59, 2.0), (60, 2.0), (80, 1.1), (100, 0.2)]),
    ("constant", 4, 0, 0.1, [(0, 0.5), (3, 2.0), (4, 2.0), (10**6, 2.0)]),
    ("constant", 0, 0, 0.1, [(0, 2.0)]),
]


@pytest.mark.parametrize(("schedule", "warmup", "decay", "final", "values"), WORKED)
def test_schedules_by_steps(schedule, warmup, decay, final, values):
    for steps, want in values:
        got = rate(steps, schedule=schedule, warmup=warmup, decay=decay, final_ratio=final)
        assert abs(got - want) < 1e-6, (steps, got, want)


def test_schedule_by_tokens_reads_tokens_only():
    keys = {"unit": "tokens", "total": 10**13, "warmup": 2 * 10**12, "schedule": "linear", "final_ratio": 0.0}
    for tokens, want in ((10**12, 1.0), (2 * 10**12, 2.0), (6 * 10**12, 1.0), (10**13, 0.0)):
        assert abs(rate(999, tokens, **keys) - want) < 1e-6
    assert rate(unit="tokens", schedule="constant") == 2.0


def test_schedule_compiles_once_for_all_steps():
    config = OptimizerConfig(warmup=10)
    traced = jax.jit(lambda u, t: learning_rate(config, 100, u, t))
    for steps in (0, 5, 50):
        np.testing.assert_allclose(traced(steps, 0.0), learning_rate(config, 100, steps, 0.0), rtol=1e-6)
    assert traced._cache_size() == 1


@settings(deadline=None, max_examples=30)
@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd"]),
    warmup=st.integers(0, 40),
    decay=st.integers(1, 60),
    final=st.floats(0, 1),
)
def test_schedules_rise_then_never_rise_again(schedule, warmup, decay, final):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup=warmup, decay=decay, final_ratio=final)
    curve = np.asarray(jax.vmap(lambda u: learning_rate(config, 100, u, 0))(jnp.arange(130)))
    assert np.all(np.diff(curve[:warmup]) > 0)
    assert abs(curve.max() - 1) < 1e-6 and abs(curve[warmup] - 1) < 1e-6
    assert np.all(np.diff(curve[warmup:]) <= 1e-6)
    np.testing.assert_allclose(curve[100:], final, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"warmup": 101}, ["optimizer.warmup 101", "100 steps", "train.steps"]),
        ({"warmup": 60, "decay": 50, "schedule": "wsd"}, ["optimizer.decay 50", "train.steps"]),
        ({"warmup": 60, "total": 50, "schedule": "linear"}, ["optimizer.warmup 60", "optimizer.total"]),
    ],
)
def test_warmup_and_decay_longer_than_the_run_are_an_error(keys, words):
    with pytest.raises(ConfigError) as error:
        rate(**keys)
    assert all(word in str(error.value) for word in words)


def test_wsd_without_decay_is_an_error():
    with pytest.raises(ConfigError, match=r"optimizer.decay is 0.*constant"):
        rate(schedule="wsd")
