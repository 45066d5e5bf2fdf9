"""Schedules: the worked table of two stages, closed forms of bubble and memory, refusal of invalid tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import ConfigError, PipelineConfig
from jaxtrain.pipeline.schedule import (
    MAKERS,
    Costs,
    Op,
    Order,
    PipelineShape,
    ScheduleError,
    classic_orders,
    forward_schedule,
    make_schedule,
    read_csv,
    schedule_shape,
    timeline,
    validate_schedule,
    write_csv,
)
from jaxtrain.pipeline.table import assign_slots, build_schedule

SHAPES = st.builds(PipelineShape, st.integers(1, 6), st.integers(1, 3), st.integers(1, 20))
NAMES = st.sampled_from(sorted(MAKERS))


def bubble_formula(shape: PipelineShape) -> float:
    """Requirements section 5: (P-1)/(vM+P-1)."""
    P, v, M = shape
    return (P - 1) / (v * M + P - 1)


# Requirements section 5: stage 0, stage 1, waiting at stage 0; A, B, C are microbatches 0, 1, 2.
WORKED = """
    F0 -- 0
    F1 F0 01
    -- B0 01
    B0 F1 1
    F2 B1 12
    B1 F2 2
    -- B2 2
    B2 -- -
"""


def test_two_stages_three_microbatches_as_in_the_requirements() -> None:
    shape = PipelineShape(2, 1, 3)
    # Forward and backward take one slot each.
    played = timeline(classic_orders(make_schedule("1f1b", shape)), shape, Costs(1, 1, 0))
    lines = [line.split() for line in WORKED.split("\n")[1:-1]]
    assert played.time == len(lines) == 8
    for slot, (*stages, waiting) in enumerate(lines):
        for spans, expected in zip(played.spans, stages, strict=True):
            assert ([str(s.op) for s in spans if s.start == slot] or ["--"]) == [expected], slot
        assert ("".join(map(str, played.waiting(0, slot + 1))) or "-") == waiting, slot
    assert played.in_flight[0] == 2
    all_forward_first = timeline(classic_orders(make_schedule("gpipe", shape)), shape, Costs(1, 1, 0))
    assert all_forward_first.time == 8
    assert all_forward_first.in_flight[0] == 3


def test_four_stages_32_microbatches_idle_as_in_the_requirements() -> None:
    for name in ("gpipe", "1f1b"):
        schedule = make_schedule(name, PipelineShape(4, 1, 32))
        assert round(schedule.bubble(), 3) == round(3 / 35, 3) == 0.086
        assert round(timeline(classic_orders(schedule), schedule.shape).bubble, 3) == 0.086


@settings(max_examples=120, deadline=None)
@given(NAMES, SHAPES, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_bubble_and_ticks_are_the_closed_forms(name: str, shape: PipelineShape, f: int, b: int, w: int) -> None:
    """Executor and timeline, any operation times, also where P does not divide M."""
    P, v, M = shape
    schedule = make_schedule(name, shape)
    if name == "zero_bubble" and M >= P:
        busy, idle = v * M * (f + b + w), (P - 1) * (f + b)
        assert schedule.bubble(Costs(f, b, w)) == pytest.approx(idle / (busy + idle))
        classic = timeline(classic_orders(schedule), shape)
        # ZB-H1 (Qi et al. 2023, table 2) with equal times: (P-1)(F+B-W) idle, a third of 1F1B's (P-1)(F+B+W).
        assert classic.time == 3 * v * M + P - 1
        if P > 1:
            assert schedule.bubble(Costs(f, b, w)) < bubble_formula(shape)
            assert classic.bubble < bubble_formula(shape)
    elif name != "zero_bubble" and (M >= P or v == 1):
        assert schedule.bubble(Costs(f, b, w)) == pytest.approx(bubble_formula(shape))
        assert timeline(classic_orders(schedule), shape, Costs(f, b, w)).bubble == pytest.approx(bubble_formula(shape))
        assert schedule.ticks_with("F") == schedule.ticks_with("B") == v * M + P - 1
    elif name != "zero_bubble":
        # Fewer microbatches than stages: chunks cannot follow each other without a gap.
        assert schedule.bubble() > bubble_formula(shape)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 20))
def test_microbatches_in_flight_are_the_closed_forms(P: int, v: int, M: int) -> None:
    shape, stages = PipelineShape(P, v, M), range(P)
    assert make_schedule("gpipe", shape).in_flight == [v * M] * P
    if v == 1:
        schedule = make_schedule("1f1b", shape)
        classic = timeline(classic_orders(schedule), shape)
        assert classic.in_flight == [min(M, P - s) for s in stages]
        # A tick holds an F and a B, so that the backward pass takes as many ticks as the forward pass.
        assert schedule.in_flight == [min(M, 2 * (P - 1 - s) + 1) for s in stages]
    elif M % P == 0:
        # Narayanan et al. 2021: (v-1) P + 2 (P-s-1) forwards before the first pair.
        expected = [min(v * M, (v - 1) * P + 2 * (P - 1 - s) + 1) for s in stages]
        for name in ("interleaved", "zero_bubble"):
            schedule = make_schedule(name, shape)
            assert schedule.in_flight == timeline(classic_orders(schedule), shape).in_flight == expected


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2)])
def test_slots_do_not_grow_with_microbatches(name: str, chunks: int) -> None:
    counts = []
    for M in (8, 16, 32):
        s = make_schedule(name, PipelineShape(4, chunks, M))
        counts.append((s.input_slots, s.residual_slots, s.cotangent_slots, s.weight_residual_slots))
    assert counts == [(1, 4 * (chunks - 1) + 7, 1, 4 * (name == "zero_bubble"))] * 3


def test_gpipe_has_residual_slots_for_every_microbatch() -> None:
    assert [make_schedule("gpipe", PipelineShape(4, 1, M)).residual_slots for M in (4, 8, 16, 32)] == [4, 8, 16, 32]


@settings(max_examples=150, deadline=None)
@given(NAMES, SHAPES)
def test_every_microbatch_goes_once_each_way_in_a_possible_order(name: str, shape: PipelineShape) -> None:
    """Checked from the columns alone; phases cover all ticks and operations."""
    P, v, M = shape
    schedule = make_schedule(name, shape)
    kinds = "fbw" if schedule.split else "fb"
    at = {}
    for kind in kinds:
        microbatch, chunk = schedule.columns[f"{kind}_microbatch"], schedule.columns[f"{kind}_chunk"]
        for t, s in np.argwhere(microbatch >= 0):
            unit = (kind, int(microbatch[t, s]), int(chunk[t, s]) * P + int(s))
            assert unit not in at
            at[unit] = int(t)
    assert set(at) == {(k, m, q) for k in kinds for m in range(M) for q in range(P * v)}
    for kind, m, q in at:
        if kind == "f" and q:
            assert at["f", m, q - 1] < at["f", m, q]
        if kind == "b":
            later = at["b", m, q + 1] + 1 if q < P * v - 1 else at["f", m, q]
            assert later <= at["b", m, q]
        if kind == "w":
            assert at["b", m, q] <= at["w", m, q]
    assert [p.start for p in schedule.phases] + [schedule.ticks] == [0] + [p.stop for p in schedule.phases]
    for (kind, _, _), t in at.items():
        assert any(p.start <= t < p.stop and kind.upper() in p.kinds for p in schedule.phases)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.tuples(st.integers(0, 99), st.just(0)), st.tuples(st.integers(0, 40), st.integers(0, 12))))
def test_colouring_uses_as_many_slots_as_ever_live_at_once(spans: dict) -> None:
    lives = {key: (start, start + length) for key, (start, length) in spans.items()}
    slots, count = assign_slots(lives)
    moments = range(60)
    assert count == max((sum(a <= t <= b for a, b in lives.values()) for t in moments), default=0)
    for key, (start, stop) in lives.items():
        for other, (a, b) in lives.items():
            assert key == other or slots[key] != slots[other] or stop < a or b < start


@settings(max_examples=150, deadline=None)
@given(st.data(), NAMES, st.builds(PipelineShape, st.integers(2, 4), st.integers(1, 2), st.integers(2, 8)))
def test_a_table_with_one_wrong_slot_is_refused(data: st.DataObject, name: str, shape: PipelineShape) -> None:
    schedule = make_schedule(name, shape)
    slots = [
        n for n in schedule.columns if not n.endswith(("microbatch", "chunk")) and (schedule.columns[n] >= 0).any()
    ]
    column = schedule.columns[data.draw(st.sampled_from(slots))]
    used = np.argwhere(column >= 0)
    cell = tuple(used[data.draw(st.integers(0, len(used) - 1))])
    column[cell] = data.draw(st.integers(-1, 30).filter(lambda slot: slot != column[cell]))
    with pytest.raises(ScheduleError, match=r"tick \d+, stage \d+: .* slot"):
        validate_schedule(schedule)


def test_a_slot_overwritten_before_its_last_read_is_refused() -> None:
    schedule = make_schedule("gpipe", PipelineShape(2, 1, 3))
    schedule.columns["f_residual"][:] = np.where(schedule.columns["f_residual"] >= 0, 0, -1)
    message = (
        r"tick 1, stage 0: residual slot 0 still holds microbatch 0, where microbatch 1 of virtual stage 0 is written"
    )
    with pytest.raises(ScheduleError, match=message):
        validate_schedule(schedule)


CELLS = [
    (
        ["F0,", "F1,F0", ",B0", "B0,F1", ",B1", "B1,"],
        None,
    ),
    (
        ["F0,F0", "F1,", ",B0", "B0,F1", ",B1", "B1,"],
        r"stage 1 runs F0 in tick 0, which needs F0 of stage 0 in tick 0 .*1 or later",
    ),
    (["F0,", "F1,F0", "B0,B0", ",F1", ",B1", "B1,"], r"stage 0 runs B0 in tick 2, which needs B0 of stage 1 in tick 2"),
    (["F0,", "F1,F0", ",B0", "B0,F1", ",B1"], r"stage 0 never runs B1 \(microbatch 1\): add B1 to a tick of stage 0"),
    (["F0,", "F1,F0", ",B0", "B0 F0,F1", ",B1", "B1,"], r"stage 0 runs F0 in tick 0 and again in tick 3"),
    (["F0 F1,", ",F0", ",B0", "B0,F1", ",B1", "B1,"], r"stage 0 has two F operations in tick 0"),
    (["F0,", "F2,F0", ",B0", "B0,F1", ",B1", "B1,"], r"runs F2 in tick 1, but there are 2 microbatches"),
    (["F0,", "F1,F0", ",B0", "B0,F1", ",B1", "B1,", ",W1"], r"stage 0 never runs W0"),
    (["F0,,", "F1,F0"], r"line 1: 3 columns, but mesh.pipe is 2"),
    (["F0,", "G1,F0"], r"line 2, stage 0: 'G1' is not an operation"),
]


@pytest.mark.parametrize(("lines", "error"), CELLS)
def test_a_schedule_from_a_file(lines: list[str], error: str | None, tmp_path: Path) -> None:
    path = tmp_path / "custom.csv"
    path.write_text("# two stages\n" * (error is None) + "\n".join(lines) + "\n")
    if error is None:
        schedule = make_schedule(str(path), PipelineShape(2, 1, 2))
        assert schedule.ticks == 6
        assert [phase.kinds for phase in schedule.phases] == ["F", "FB", "B"]
        assert timeline(classic_orders(schedule), schedule.shape, Costs(1, 1, 0)).time == 6
    else:
        with pytest.raises(ScheduleError, match=error):
            make_schedule(str(path), PipelineShape(2, 1, 2))


@settings(max_examples=40, deadline=None)
@given(NAMES, SHAPES)
def test_a_written_file_is_read_back(tmp_path_factory: pytest.TempPathFactory, name: str, shape: PipelineShape) -> None:
    schedule = make_schedule(name, shape)
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    path.write_text(write_csv(schedule))
    assert read_csv(path, shape) == schedule.cells
    again = build_schedule(name, schedule.cells, shape)
    assert all(np.array_equal(again.columns[n], schedule.columns[n]) for n in schedule.columns)


def test_a_custom_schedule_function() -> None:
    def pairs(shape: PipelineShape, in_lockstep: bool) -> list[Order]:
        """Two forwards, then their backwards."""
        groups = [range(m, min(m + 2, shape.microbatches)) for m in range(0, shape.microbatches, 2)]
        order = [Op(kind, m, 0) for group in groups for kind in "FB" for m in group]
        return [order] * shape.stages

    schedule = make_schedule(pairs, PipelineShape(3, 1, 6))
    assert schedule.name == "pairs"
    assert max(schedule.in_flight) == 2
    assert schedule.bubble() > bubble_formula(schedule.shape)


def test_orders_that_wait_for_each_other_are_refused() -> None:
    def crossed(shape: PipelineShape, in_lockstep: bool) -> list[Order]:
        ahead = [Op("F", 0, 0), Op("B", 0, 0), Op("F", 1, 0), Op("B", 1, 0)]
        return [ahead, [Op("F", 1, 0), Op("F", 0, 0), Op("B", 0, 0), Op("B", 1, 0)]]

    with pytest.raises(ScheduleError, match="stage 0 at B0 for B0 of stage 1; stage 1 at F1 for F1 of stage 0"):
        make_schedule(crossed, PipelineShape(2, 1, 2))
    with pytest.raises(ScheduleError, match="wait for each other"):
        timeline(crossed(PipelineShape(2, 1, 2), False), PipelineShape(2, 1, 2))


@settings(max_examples=40, deadline=None)
@given(SHAPES)
def test_evaluation_fills_and_drains_once(shape: PipelineShape) -> None:
    schedule = forward_schedule(shape)
    assert [phase.kinds for phase in schedule.phases] == ["F"]
    assert schedule.residual_slots == schedule.cotangent_slots == schedule.weight_residual_slots == 0
    if shape.microbatches >= shape.stages:
        assert schedule.ticks == shape.work + shape.stages - 1


def test_unknown_schedule_names_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"pipeline.schedule '1f1' is unknown.*1f1b.*csv"):
        make_schedule("1f1", PipelineShape(2, 1, 2))
    with pytest.raises(ConfigError, match=r"no_such.csv: No such file"):
        make_schedule("no_such.csv", PipelineShape(2, 1, 2))


def test_microbatches_are_the_accumulation() -> None:
    assert schedule_shape(PipelineConfig(schedule="interleaved"), 4, 8) == PipelineShape(4, 2, 8)
    assert schedule_shape(PipelineConfig(microbatches=8, chunks=3), 4, 8) == PipelineShape(4, 3, 8)
    with pytest.raises(ConfigError, match=r"pipeline.microbatches 4 is not train.accumulation 8"):
        schedule_shape(PipelineConfig(microbatches=4), 4, 8)
