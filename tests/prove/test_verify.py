"""`jaxtrain verify`: its layouts, model, data, comparison, output and exit status."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxtrain.cli import main
from jaxtrain.config import CONFIG_ROOT, ConfigError, OptimizerConfig, load_config, replace, validate
from jaxtrain.data import IGNORE
from jaxtrain.data.packing import PACKERS
from jaxtrain.pipeline.schedule import MAKERS, schedule_shape
from jaxtrain.prove.adamw import missing_in_numpy
from jaxtrain.prove.batches import adversarial_batches, randomize_masked, repack
from jaxtrain.prove.compare import BOUNDS, Check, compare, first_failure
from jaxtrain.prove.layouts import (
    ATTENTION_LAYOUTS,
    DENSE,
    EXPERTS,
    FILE,
    PIPELINE,
    SEQUENCE,
    applicable_layouts,
    parse_layout,
)
from jaxtrain.prove.measure import Outcome
from jaxtrain.prove.show import report_to_json, skipped_line, time_left, verify_progress
from jaxtrain.prove.shrink import BATCH, SEQ_LEN, VOCAB, shrink
from jaxtrain.prove.verify import ADAMW_ROW, LayoutResult, VerifyReport, verify
from jaxtrain.train.losses import LOSSES, METRICS, HeadInputs

STRUCTURES = sorted(path.stem for path in (CONFIG_ROOT / "models").glob("*.yaml"))


@pytest.fixture
def registered() -> Iterator[list[str]]:
    """A loss and a metric of user code, removed afterwards; the list grows when they are traced."""
    traced: list[str] = []

    @LOSSES.register("doubled")
    def doubled(inputs: HeadInputs) -> Any:
        traced.append("loss")
        total, sums = LOSSES["cross_entropy"](inputs)
        return 2 * total, sums | {"loss": 2 * sums["loss"]}

    @METRICS.register("label_mean")
    def label_mean(inputs: HeadInputs) -> jax.Array:
        traced.append("metric")
        return jnp.sum(jnp.where(inputs.scored, inputs.batch["labels"], 0).astype(jnp.float32))

    yield traced
    LOSSES.unregister("doubled")
    METRICS.unregister("label_mean")


def test_registered_losses_pass_and_a_refused_layout_does_not_count_as_passed(
    capsys: pytest.CaptureFixture[str], registered: list[str]
) -> None:
    layouts = "data=2,tensor=4,rules.preset=[fsdp,tensor];tensor=3"
    user_code = ["--train.loss", "doubled", "--train.metrics", "[label_mean]"]
    status = main(["verify", "models/gpt2.yaml", "--json", "--layouts", layouts, *user_code])
    assert set(registered) == {"loss", "metric"}
    out = capsys.readouterr()
    report = json.loads(out.out)
    names = [row["name"] for row in report["layouts"]]
    assert names == [ADAMW_ROW, "data=2,tensor=4,rules.preset=[fsdp,tensor]", "tensor=3"]
    assert [row["status"] for row in report["layouts"]] == ["passed", "passed", "refused"]
    assert report["layouts"][1]["worst"]["error"] <= 2e-5 and report["layouts"][1]["worst"]["kind"] == "gradient"
    assert "does not divide 8 devices" in report["layouts"][2]["reason"]
    assert status == 1 and "tensor=3" in out.err and not report["passed"]


def test_a_fault_gives_status_1_and_names_the_leaf(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxtrain.train.step import Step

    real = Step._reduce
    monkeypatch.setattr(Step, "_reduce", lambda self, gradient: real(self, gradient) / 2)
    assert main(["verify", "tiny", "--layouts", "data=2"]) == 1
    out = capsys.readouterr()
    assert "failed" in out.out and "gradient " in out.err and "relative error 5.0e-01" in out.err


def test_eight_devices_are_simulated_from_a_plain_shell() -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    command = [sys.executable, "-m", "jaxtrain", "verify", "tiny", "--layouts", "data=8", "--devices", "8", "--json"]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"]["passed"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify"], "--reference DIR"),
        (["verify", "tiny", "--mesh", "data=2"], "--layouts 'data=2'"),
        (["verify", "tiny", "--layouts", ";"], "names no layout"),
        (["verify", "tiny", "--devices", "0"], "at least 1"),
    ],
)
def test_bad_requests_end_with_status_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


# Layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_layout_of_the_table_is_valid(structure: str) -> None:
    small = shrink(load_config(f"models/{structure}.yaml"))
    for name in (*DENSE, *SEQUENCE, *PIPELINE, *EXPERTS):
        layout = parse_layout(small, name, 8)
        assert layout.devices == 8 or "data=" in name
        assert -1 in layout.config.mesh.sizes.values() or math.prod(layout.config.mesh.sizes.values()) <= 8


def test_the_table_covers_presets_policies_and_packers() -> None:
    text = "\n".join((*DENSE, *SEQUENCE, *PIPELINE, *EXPERTS))
    for word in ("zero1", "zero2", "fsdp", "hybrid_fsdp", "tensor_sequence", "accumulation=2", "accumulation=4"):
        assert word in text
    for word in ("policy=full", "policy=dots", "policy=names", *(f"packing={packing}" for packing in PACKERS)):
        assert word in text
    for word in ("ring", "all_gather", "ulysses", "gpipe", "1f1b", "interleaved", "zero_bubble"):
        assert word in text or word in ("ring", "1f1b")


def test_rows_that_do_not_apply_are_left_out_with_a_reason() -> None:
    names, skipped = applicable_layouts(shrink(load_config("tiny")), jax.devices()[:8])
    reasons = {layout.name: layout.reason for layout in skipped}
    assert names[0] == FILE and not set(names) & set(reasons)
    assert set(names[1:]) | set(reasons) == {*DENSE, *ATTENTION_LAYOUTS, *SEQUENCE, *PIPELINE, *EXPERTS}
    assert "needs NVIDIA GPUs" in reasons["data=2, attention.backend=cudnn"]
    assert all("no experts" in reasons[name] for name in EXPERTS)
    # Six layers: rows for eight do not apply.
    assert sum("pipeline.stages" in reason for reason in reasons.values()) == 3
    report = VerifyReport(load_config("tiny"), 8, (), "all", tuple(skipped))
    line = skipped_line(report)
    assert line.startswith(f"{len(skipped)} rows do not apply") and "pipeline.stages 3" in line
    assert [row["name"] for row in report_to_json(report)["not_applicable"]] == list(reasons)
    mixture = shrink(replace(load_config("tiny"), "model.moe.experts=8"))
    assert set(EXPERTS) <= set(applicable_layouts(mixture, jax.devices()[:8])[0])
    # Four devices are too few for rows that name eight.
    assert (
        "raise --devices"
        in {s.name: s.reason for s in applicable_layouts(mixture, jax.devices()[:4])[1]}["data=1, seq=8"]
    )


def test_pipelines_cover_every_schedule_and_every_other_axis() -> None:
    small = shrink(load_config("models/mixtral_8x7b.yaml"))
    rows = [parse_layout(small, name, 8).config for name in (*PIPELINE, *EXPERTS) if "pipe=" in name]
    shapes = {(c.mesh.pipe, c.pipeline.schedule, schedule_shape(c.pipeline, c.mesh.pipe, 4).chunks) for c in rows}
    assert {(stages, schedule) for stages, schedule, _ in shapes} == set(product((2, 4), MAKERS))
    assert {(4, "zero_bubble", 2), (4, "zero_bubble", 1), (2, "zero_bubble", 1), (2, "zero_bubble", 2)} <= shapes
    ratios = {c.train.accumulation / c.mesh.pipe for c in rows}
    assert min(ratios) == 1 and max(ratios) == 4 and any(ratio % 1 for ratio in ratios)
    pairs = {(c.mesh.pipe, axis) for c in rows for axis, size in c.mesh.sizes.items() if size != 1}
    assert pairs >= set(product((2, 4), ("data", "tensor", "seq", "expert")))
    presets = {preset for c in rows for preset in c.rules.preset}
    assert presets >= {"ddp", "zero1", "zero2", "fsdp", "hybrid_fsdp", "tensor", "tensor_sequence"}
    assert {c.attention.context_parallel for c in rows if c.mesh.seq > 1} == {"ring", "all_gather", "ulysses"}
    assert {c.data.packing for c in rows} >= set(PACKERS)
    assert sum(c.pipeline.stages != "auto" for c in rows) >= 3
    assert {c.remat.every for c in rows} == {1, 2}


def test_the_file_layout_keeps_rules_and_axes() -> None:
    config = shrink(load_config("llama3_405b"))
    layout = parse_layout(config, FILE, 8)
    big = load_config("llama3_405b")
    assert layout.config.rules.preset == big.rules.preset
    for axis, size in big.mesh.sizes.items():
        if axis != "data":
            assert layout.config.mesh.sizes[axis] == min(size, 2)


def test_malformed_layouts_are_errors() -> None:
    small = shrink(load_config("tiny"))
    with pytest.raises(ConfigError, match="'tensor' is not axis=size"):
        parse_layout(small, "data=2, tensor", 8)
    with pytest.raises(ConfigError, match="takes 16 devices, there are 8"):
        parse_layout(small, "data=4, tensor=4", 8)
    with pytest.raises(ConfigError, match="did you mean"):
        parse_layout(small, "data=2, remat.polcy=full", 8)


# The model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_shrinking_keeps_the_structure(structure: str) -> None:
    config = load_config(f"models/{structure}.yaml")
    model, small = config.model, shrink(config).model
    for name in ("norm", "activation", "positions", "tied_head", "qkv_bias", "out_bias", "mlp_bias", "qk_norm"):
        assert getattr(small, name) == getattr(model, name)
    grouped, small_grouped = model.n_heads // model.kv_heads, small.n_heads // small.kv_heads
    assert (grouped == 1) == (small_grouped == 1) and (model.kv_heads == 1) == (small.kv_heads == 1)
    assert (model.n_heads % 8 == 0) == (small.n_heads % 8 == 0)
    assert [w is None for w in small.windows] == [w is None for w in model.windows]
    assert all(w is None or 2 <= w <= SEQ_LEN // 2 for w in small.windows)
    assert small.rope.scaling == model.rope.scaling


def test_shrinking_a_mixture_with_latent_attention() -> None:
    deepseek = validate({
        "model": {
            "vocab_size": 129280, "d_model": 7168, "n_layers": 61, "n_heads": 128, "head_dim": 128, "d_ff": 18432,
            "moe": {
                "experts": 256, "top_k": 8, "d_ff": 2048, "shared": 1, "first_dense": 3, "router": "sigmoid_chosen",
                "groups": 8, "top_groups": 4, "balance": "sequence", "bias_rate": 1e-3, "scale": 2.5,
            },
            "mla": {"kv_rank": 512, "q_rank": 1536, "rope_dim": 64, "v_dim": 128}, "mtp": 1,
        },
    })  # fmt: skip
    small = shrink(deepseek).model
    assert (small.moe.experts, small.moe.top_k, small.moe.groups, small.moe.top_groups) == (8, 2, 2, 1)
    assert (small.moe.shared, small.moe.first_dense, small.moe.router, small.moe.scale) == (1, 1, "sigmoid_chosen", 2.5)
    assert small.moe.balance == "sequence" and small.moe.balance_weight > 0 and small.moe.bias_rate == 1e-3
    assert small.mla.kv_rank and small.mla.q_rank and small.mla.v_dim == small.width_of_head and small.mtp == 1


@given(
    st.integers(1, 130),
    st.integers(1, 16),
    st.integers(1, 40),
    st.lists(st.one_of(st.none(), st.integers(1, 5000)), min_size=1, max_size=6),
)
def test_any_head_count_and_pattern_shrinks_to_a_valid_model(
    kv: int, group: int, layers: int, windows: list[Any]
) -> None:
    heads = {"n_heads": kv * group, "n_kv_heads": kv, "head_dim": 8}
    config = validate({"model": {"d_model": 64, **heads, "n_layers": layers, "windows": windows}})
    small, pattern = shrink(config).model, math.lcm(2, len(windows))
    assert small.n_heads <= min(24, config.model.n_heads) and small.n_layers == min(pattern * -(-8 // pattern), layers)
    assert len(small.windows) == len(windows)


# The data ------------------------------------------------------------------------------------------------------------


def test_batches_are_adversarial() -> None:
    mixed, odd, half = adversarial_batches(BATCH, SEQ_LEN, VOCAB)
    sizes = [[size for _, _, size in sequence] for sequence in mixed.sequences]
    assert sizes[: BATCH // 4] == [[]] * (BATCH // 4) and [SEQ_LEN] in sizes and [1, 1, 1, SEQ_LEN - 3] in sizes
    batches = [step.packed(BATCH, SEQ_LEN) for step in (mixed, odd, half)]
    scored = [(batch["labels"] != IGNORE).sum(1) for batch in batches]
    assert scored[0][BATCH // 4] == 0 < len(sizes[BATCH // 4]), "a sequence with tokens but none scored"
    for accumulation in (2, 4):
        # Sequence g belongs to microbatch g mod A.
        assert any(scored[1][m::accumulation].sum() == 0 for m in range(accumulation))
    assert scored[2][: BATCH // 2].sum() == 0 and scored[2][BATCH // 2] == 1 and scored[2][-1] == SEQ_LEN


@pytest.mark.parametrize("packing", PACKERS)
def test_every_packer_keeps_the_same_targets(packing: str) -> None:
    for step in adversarial_batches(BATCH, SEQ_LEN, VOCAB):
        repacked = repack(step, packing, SEQ_LEN)
        packed, unpacked = repacked.packed(64, SEQ_LEN), repacked.unpacked(80, SEQ_LEN)
        for field in ("tokens", "labels", "positions"):
            got, want = (batch[field][batch["segments"] > 0] for batch in (packed, unpacked))
            np.testing.assert_array_equal(np.sort(got), np.sort(want))
        assert (packed["segments"].max() > 1) == (packing != "none")


def test_randomizing_changes_only_masked_inputs() -> None:
    batch = adversarial_batches(BATCH, SEQ_LEN, VOCAB)[0].packed(BATCH, SEQ_LEN)
    changed = randomize_masked(batch, VOCAB, SEQ_LEN, tails=True)
    np.testing.assert_array_equal(changed["labels"], batch["labels"])
    np.testing.assert_array_equal(changed["segments"], batch["segments"])
    assert (changed["positions"] != batch["positions"])[batch["segments"] > 0].sum() == 0
    differs = changed["tokens"] != batch["tokens"]
    assert differs[batch["segments"] == 0].any() and differs[batch["segments"] > 0].any()
    for row, segment in zip(*np.nonzero(differs & (batch["segments"] > 0)), strict=True):
        same = batch["segments"][row] == batch["segments"][row, segment]
        assert (batch["labels"][row, segment:][same[segment:]] == IGNORE).all()


# The comparison ------------------------------------------------------------------------------------------------------


def outcome(weight: float, bias: float, norm: float = 1.0) -> Outcome:
    params = {"head": {"weight": np.full(3, weight), "bias": np.full(3, bias)}}
    state = {"params": params, "opt": (), "steps": np.int32(1), "tokens": np.zeros(2, np.int32)}
    return Outcome([params], [{"loss": np.float32(1)}], [{"grad_norm": np.float64(norm)}], [state])


def test_the_first_failure_is_the_worst_leaf_of_the_first_kind_that_fails() -> None:
    initial = {"params": {"head": {"weight": np.zeros(3), "bias": np.zeros(3)}}}
    good = outcome(1.0, 0.5)
    assert first_failure(compare(good, good, initial)) is None
    check = first_failure(compare(outcome(1.0, 0.6, norm=9.0), good, initial))
    assert check is not None and (check.kind, check.leaf) == ("gradient", "head/bias")
    assert check.error == pytest.approx(0.2)
    check = first_failure(compare(outcome(1.0, 0.5, norm=1.1), good, initial))
    assert check is not None and (check.kind, check.leaf) == ("metric", "grad_norm")


def test_nan_fails_and_rounding_does_not() -> None:
    initial = {"params": {"head": {"weight": np.zeros(3), "bias": np.zeros(3)}}}
    check = first_failure(compare(outcome(1.0, math.nan), outcome(1.0, 0.5), initial))
    assert check is not None and check.leaf == "head/bias" and math.isnan(check.error)
    # A gradient of 0 in exact arithmetic: rounding errors of 1e-8 beside gradients of 1.
    assert first_failure(compare(outcome(1.0, 3e-8), outcome(1.0, -2e-8), initial)) is None
    assert first_failure(compare(outcome(1.0, 1e-4), outcome(1.0, -2e-8), initial)) is not None


ADAMW = OptimizerConfig(name="adamw", eps=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1)
RATE = 3e-3


def adamw_outcome(gradients: list[np.ndarray], decay: float = 0.1, initial: float = 0.1) -> Outcome:
    """Float32 states of one parameter after AdamW steps with these gradients."""
    p, m, v, states = np.full(gradients[0].shape, initial), 0.0, 0.0, []
    for step, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        p = p - RATE * (m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-4) + decay * p)
        opt = {"0": {"mu": {"w": np.float32(m)}, "nu": {"w": np.float32(v)}}}
        states.append({"params": {"w": np.float32(p)}, "opt": opt, "steps": np.int32(step), "tokens": np.zeros(2, int)})
    metrics = [{"learning_rate": np.float64(RATE)}] * len(gradients)
    return Outcome([{"w": g} for g in gradients], [{"loss": np.float32(1)}] * len(gradients), metrics, states)


def test_rounding_that_adam_amplifies_passes_and_faults_of_the_step_fail() -> None:
    rng = np.random.default_rng(0)
    initial = {"params": {"w": np.full(1000, 0.1)}}
    # Half of the elements have gradients of the size of rounding errors, which Adam divides by eps.
    size = np.where(np.arange(1000) % 2, 1e-6, 1.0)
    gradients = [size * rng.normal(size=1000) for _ in range(3)]
    want = adamw_outcome(gradients)
    rounded = adamw_outcome([g + 1e-5 * rng.normal(size=1000).clip(-2, 2) for g in gradients])
    failure = first_failure(compare(rounded, want, initial))
    assert failure is not None and failure.kind == "parameter", "a constant bound is too tight"
    assert first_failure(compare(rounded, want, initial, ADAMW)) is None
    # The same errors of the gradients do not hide a fault of the step.
    changed = adamw_outcome(gradients, decay=0.0)
    check = first_failure(compare(changed, want, initial, ADAMW))
    assert check is not None and (check.kind, check.step) == ("parameter", 1) and check.error > 100 * check.bound
    # An error of one element, within the constant bound, that its moments do not explain.
    rounded.states[2]["params"]["w"][0] += 5e-6
    check = first_failure(compare(rounded, want, initial, ADAMW))
    assert check is not None and (check.kind, check.step) == ("parameter", 3) and check.error < BOUNDS["parameter"]
    # Larger errors of gradients are reported as such.
    wrong = adamw_outcome([g + 1e-3 * rng.normal(size=1000) for g in gradients])
    check = first_failure(compare(wrong, want, initial, ADAMW))
    assert check is not None and check.kind == "gradient"


def test_second_moments_explain_no_more_than_gradients_within_their_bound() -> None:
    """Errors of small elements are far below the bound of second moments, but do not excuse a wrong step."""
    gradients = [np.where(np.arange(100) % 2, 1e-2, 1.0)] * 2
    want, got = adamw_outcome(gradients), adamw_outcome(gradients)
    for state in got.states:
        state["opt"]["0"]["nu"]["w"][1] *= 0.25
        # As if the step had used this second moment.
        state["params"]["w"][1] -= RATE * state["steps"]
    failed = [check for check in compare(got, want, {"params": {"w": np.full(100, 0.1)}}, ADAMW) if not check.passed]
    assert {check.kind for check in failed} == {"parameter"}


def test_bounds_and_order_of_kinds() -> None:
    assert BOUNDS["gradient"] == 2e-5 and next(iter(BOUNDS)) == "gradient"
    assert not Check("masked", "loss", math.inf).passed


def test_the_numpy_reference_is_left_out_where_it_has_no_rule() -> None:
    assert missing_in_numpy(ADAMW) == ""
    lion = missing_in_numpy(ADAMW.model_copy(update={"name": "lion"}))
    assert lion == "optimizer.name is lion: the NumPy reference implements adamw only"
    mine = ADAMW.model_copy(update={"schedule": "mine"})
    assert "implements cosine only" in missing_in_numpy(mine)


def test_progress_reports_every_row() -> None:
    calls: list[tuple[int, int]] = []
    verify(
        load_config("tiny"), "tensor=3;tensor=5", jax.devices()[:1], lambda done, total, _: calls.append((done, total))
    )
    assert calls == [(0, 2), (1, 2), (2, 2)]


def test_progress_without_a_terminal_is_a_line_per_row_with_the_time_left() -> None:
    out = io.StringIO()
    with verify_progress(Console(file=out), bar=False) as on_progress:
        on_progress(0, 2, None)
        on_progress(1, 2, LayoutResult("data=2, rules.preset=[fsdp]", "passed", 1.25))
        on_progress(2, 2, LayoutResult("tensor=3", "refused", 0.0))
    first, second, last = out.getvalue().splitlines()
    assert first.startswith("verify: 2 rows")
    assert second == "verify: 1 of 2, data=2, rules.preset=[fsdp]: passed in 1.2 s, about 0 s left"
    assert last == "verify: 2 of 2, tensor=3: refused in 0.0 s"
    assert time_left(60.0, 2, 8) == "about 3 min left" and time_left(60.0, 0, 8) == time_left(60.0, 8, 8) == ""


def test_a_pytorch_reference_passes(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[1] / "data" / "reference" / "gpt2"
    assert main(["verify", "--reference", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
