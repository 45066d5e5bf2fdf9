"""Compare gradients in 16 bits with float32 arithmetic, leaf by leaf, in units of what 16 bits cost at least.

Three steps start from the same weights, rounded to 16 bits, and read the same 4,096 tokens, whose ids follow Zipf's
law, so that some sums have hundreds of terms:

- the truth: float32 on one device;
- the ideal: operands and stored values in 16 bits, every product and sum in float32, on one device, with the simple
  implementations of `ops/reference.py`;
- the layout.

With a recipe of 8 bits, the ideal step quantizes the same operands and multiplies in float32.
A leaf fails if its distance to the truth is more than twice that of the ideal step. Sums that are accumulated or sent
in 16 bits show here; the compiled program shows what a CPU computes in float32 anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import ConfigError, RunConfig, replace
from jaxtrain.data.packing import HostBatch
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.ops.recipes import RECIPES
from jaxtrain.ops.reference import use_reference
from jaxtrain.prove.batches import zipf_batch
from jaxtrain.prove.compare import ZERO_GRADIENT, ZERO_SCALE, Check
from jaxtrain.prove.layouts import PRECISION, applicable_layouts, listed_layouts, parse_layout, without_layout
from jaxtrain.prove.measure import StepRunner, random_state
from jaxtrain.prove.shrink import SHRINK_RULES, shrink
from jaxtrain.prove.verify import COMPILERS, FAST_CPU, CompiledLayout, LayoutResult, VerifyReport, error_result
from jaxtrain.train.resolve import Bound, bind

Tree = Any

SEQ_LEN, BATCH, VOCAB = 128, 32, 512
LOSS_SCALES = {"bfloat16": 4.0, "float16": 1024.0}
"""Compute dtype -> loss scale; powers of two, which round nothing."""
PRECISIONS: dict[str, tuple[str, str | None]] = {
    **{compute: (compute, None) for compute in LOSS_SCALES},
    **{recipe: ("bfloat16", recipe) for recipe in RECIPES},
}
"""What can be proven -> compute dtype and recipe of 8 bits."""
MARGIN = 2.0
"""Largest error of a leaf, in units of that of the ideal step."""
FLIPPED = 0.9
"""Largest distance of an 8-bit leaf to that of the ideal step, in units of the ideal step's error.

A difference in the last bit of an operand flips the 8-bit rounding of some elements: 0.42 to 0.68 were measured for the
worst leaf of a layout. Steps that quantize other values, by scales of their own, differ by the square root of 2.
"""
LEAST_ERROR, LEAST_ERROR_LOW = 1e-3, 1e-2
"""Relative error of a leaf that always passes, and of the loss; of the loss with a recipe of 8 bits."""
WRITERS = ("embed", "out", "down", "project")
"""Modules that write to the residual stream; the last dim of their parameters is that of the model."""
CLASS_SIZE, CLASS_LOGIT = 16.0, 8.0
"""What the embedding writes for a token's class, in units of its standard deviation; the routers' weight for it."""
RULES = (
    *SHRINK_RULES,
    f"--precision: {BATCH} sequences of {SEQ_LEN} tokens, vocabulary {VOCAB}, ids by Zipf's law; weights rounded to "
    "the compute dtype; routers with a clear choice for each id, so that no rounding moves a token to another expert",
    "--precision mxfp8: head_dim 32, d_ff 128, so that blocks of 32 fit",
)


def verify_precision(
    config: RunConfig,
    precision: str,
    layouts: str = "all",
    devices: list[Any] | None = None,
    on_progress: Callable[[int, int, LayoutResult | None], None] = lambda done, total, result: None,
) -> VerifyReport:
    """Compare layouts of the shrunk configuration in one of PRECISIONS with float32; other arguments as in `verify`.

    Raises ConfigError for another precision, and if `layouts` names none.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision {precision} is unknown: use {', '.join(PRECISIONS)}")
    compute, recipe = PRECISIONS[precision]
    found = jax.devices() if devices is None else devices
    small = replace(
        shrink(config), f"data.seq_len={SEQ_LEN}", f"model.max_seq_len={SEQ_LEN}", f"model.vocab_size={VOCAB}",
        "model.unpadded_vocab_size=null",
        f"data.tokenizer.vocab_size={VOCAB}", f"train.global_batch={BATCH}", f"precision.compute={compute}",
        f"precision.recipe={recipe or 'null'}",
    )  # fmt: skip
    if recipe is not None and RECIPES[recipe].multiple > 1:
        small = replace(
            small, f"model.head_dim={RECIPES[recipe].multiple}", f"model.d_ff={4 * RECIPES[recipe].multiple}"
        )
    all_rows = layouts == "all"
    names, skipped = applicable_layouts(small, found, PRECISION) if all_rows else (listed_layouts(layouts), [])
    prover, results = _Prover(small, found), []
    on_progress(0, len(names), None)
    with ThreadPoolExecutor(COMPILERS) as pool:
        for compiled in pool.map(prover.compile, names):
            results.append(prover.run(compiled))
            on_progress(len(results), len(names), results[-1])
    return VerifyReport(small, len(found), tuple(results), layouts, tuple(skipped), RULES)


class _Prover:
    def __init__(self, config: RunConfig, devices: list[Any]) -> None:
        self._config, self._devices = config, devices
        self._scale = LOSS_SCALES[config.precision.compute]
        self._options = FAST_CPU if devices[0].platform == "cpu" else {}
        self._batch = zipf_batch(BATCH, SEQ_LEN, VOCAB)

    def compile(self, name: str) -> CompiledLayout | LayoutResult:
        """The compiled step of a layout, or the result if it cannot be compiled."""
        start = time.monotonic()
        try:
            layout = parse_layout(self._config, name, len(self._devices))
            setup, runner = self._runner(layout.config, self._devices[: layout.devices])
            return CompiledLayout(layout, setup, runner, time.monotonic() - start)
        except Exception as error:
            return error_result(name, start, error)

    def run(self, compiled: CompiledLayout | LayoutResult) -> LayoutResult:
        """Run a layout and compare its gradients."""
        if isinstance(compiled, LayoutResult):
            return compiled
        name, start = compiled.layout.name, time.monotonic() - compiled.seconds
        try:
            got, sums = compiled.runner.gradients(self._initial, self._packed(compiled.setup))
        except Exception as error:
            return error_result(name, start, error)
        checks = self._checks(got, sums)
        failed = [check for check in checks if not check.passed]
        worst = max(failed or checks, key=lambda check: check.error_over_bound)
        seconds = time.monotonic() - start
        return LayoutResult(name, "failed" if failed else "passed", seconds, worst, worst if failed else None)

    def _checks(self, got: Tree, sums: Tree) -> list[Check]:
        (truth, true_sums), ideal = self._truth, self._ideal
        counts = [name for name in true_sums if name in ("scored", "load")]
        checks = [Check("sum", name, 0.0 if np.array_equal(sums[name], true_sums[name]) else np.inf) for name in counts]
        loss_limit = LEAST_ERROR if self._config.precision.recipe is None else LEAST_ERROR_LOW
        loss, true_loss = float(sums["loss"]), float(true_sums["loss"])
        checks.append(Check("sum", "loss", abs(loss - true_loss) / abs(true_loss), limit=loss_limit))
        have, wanted = flatten_paths(got), flatten_paths(truth)
        largest = max(float(np.linalg.norm(want)) for want in wanted.values())
        for name, want in wanted.items():
            # Zero in exact arithmetic (a key bias without rotary positions): what is left is rounding of other leaves.
            least = ZERO_SCALE * largest if np.linalg.norm(want) <= ZERO_GRADIENT * largest else 0.0
            limit = max(MARGIN * _distance(ideal[name], want, least), LEAST_ERROR)
            checks.append(Check("gradient", name, _distance(have[name], want, least), limit=limit))
            if self._config.precision.recipe is not None:
                least = max(np.linalg.norm(want), least)
                flipped = float(np.linalg.norm(have[name] - ideal[name]) / max(least, 1e-30))
                checks.append(Check("rounding", name, flipped, limit=max(limit * FLIPPED / MARGIN, LEAST_ERROR)))
        return checks

    @cached_property
    def _one_device(self) -> RunConfig:
        return replace(without_layout(self._config), "mesh.data=1")

    @cached_property
    def _initial(self) -> Tree:
        setup = bind(self._one_device, self._devices[:1])
        state, dtype = random_state(setup), jnp.dtype(self._config.precision.compute)
        decide_routers(state["params"], self._config)
        return {**state, "params": jax.tree.map(lambda a: np.array(a.astype(dtype), np.float32), state["params"])}

    @cached_property
    def _truth(self) -> tuple[Tree, Tree]:
        return self._reference(replace(self._one_device, "precision.compute=float32", "precision.recipe=null"))

    @cached_property
    def _ideal(self) -> dict[str, np.ndarray]:
        gradients, _ = self._reference(replace(self._one_device, "precision.reduce=float32"))
        return flatten_paths(gradients)

    def _reference(self, config: RunConfig) -> tuple[Tree, Tree]:
        with use_reference():
            setup, runner = self._runner(config, self._devices[:1])
        return runner.gradients(self._initial, self._packed(setup))

    def _runner(self, config: RunConfig, devices: list[Any]) -> tuple[Bound, StepRunner]:
        setup = bind(config.model_copy(update={"xla": self._options}), devices)
        return setup, StepRunner(setup, self._scale)

    def _packed(self, setup: Bound) -> HostBatch:
        return self._batch.packed(setup.batch_shape.global_batch, SEQ_LEN)


def decide_routers(params: Tree, config: RunConfig) -> None:
    """Change weights in place so that the id of a token decides its experts by a wide margin.

    Ids are split into as many classes as there are disjoint choices of top_k experts. The embedding writes the class
    into dims of the residual stream that nothing else writes to, and the routers read it there. Otherwise rounding
    moves tokens to other experts, which changes gradients more than any sum.
    """
    moe = config.model.moe
    if not moe.experts:
        return
    classes = moe.experts // moe.top_k
    table_VD = params["embed"]["tokens"]
    ids = np.arange(len(table_VD))
    std = table_VD.std()
    for path, leaf in flatten_paths(params).items():
        *_, module, kind = path.split("/")
        if module in WRITERS:
            leaf[..., :classes] = 0.0
            if module == "project":  # its first inputs are the embedding of the next token
                leaf[..., range(classes), range(classes)] = 1.0
        elif (module, kind) == ("router", "weight"):
            leaf *= 0.25
            leaf[..., :classes, :] = 0.0
            for expert in range(classes * moe.top_k):
                leaf[..., expert // moe.top_k, expert] = CLASS_LOGIT
    table_VD[:, :classes] = 0.0
    table_VD[ids, ids % classes] = CLASS_SIZE * std


def _distance(got: np.ndarray, want: np.ndarray, least: float) -> float:
    """Euclidean distance, relative to the length of `want`, which counts as at least `least`."""
    want = np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), least, 1e-30))
