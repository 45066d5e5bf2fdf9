"""Goodput from hand-written events: every second once, whatever failed and whatever the clocks did."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.cli import main
from jaxtrain.observe.events import EVENTS, read_events, record_event
from jaxtrain.observe.files import METRICS
from jaxtrain.observe.goodput import CATEGORIES, goodput_of

EPOCH = 1_700_000_000.0


def event(at: float, kind: str, **values: Any) -> dict[str, Any]:
    return {"time": EPOCH + at, "mono": 500.0 + at, "boot": "b1", "kind": kind, **values}


def rows(last: int, step_s: float, wait_s: float) -> list[dict[str, Any]]:
    return [{"step": step, "step_time_s": step_s, "data_wait_s": wait_s} for step in range(1, last + 1)]


# 20 steps of 2 s (0.5 s of them waiting), a checkpoint after 10 and 20, killed in step 16; then all of it again.
KILLED = [
    event(0, "generation", number=1),
    event(8, "start", began=EPOCH + 3, step=0, resumed_from=None),
    event(12, "compiled", seconds=4.0, step=0),
    event(15, "evaluation", seconds=3.0, step=0),
    event(36, "checkpoint", step=10, blocked_s=1.0),  # 15 + 20 + 1
    event(49, "failure", status=137, cause="killed by SIGKILL", rank=1, host="n1", step=16, phase="step", ago_s=2.0),
    event(49, "restart", backoff_s=1),
    event(50, "generation", number=2),
    event(58, "lost", step=10, steps=5, written=EPOCH + 46),
    event(60, "restored", step=10, seconds=2.5, bytes=1),
    event(61, "start", began=EPOCH + 54, step=10, resumed_from=10),
    event(64, "compiled", seconds=3.0, step=10),
    event(85, "checkpoint", step=20, blocked_s=1.0),  # 64 + 20 + 1
    event(89, "end", step=20, status=0, cause="the last step is done"),
]


def test_a_killed_run_by_hand() -> None:
    found = goodput_of(KILLED, rows(20, 2.0, 0.5), EPOCH + 89)
    assert found.wall_s == pytest.approx(89)
    assert found.seconds == pytest.approx(
        {
            "productive": 30.0, "data_wait": 10.0, "evaluation": 3.0, "checkpoint": 2.0, "compile": 7.0,
            "restore": 2.5, "startup": 8.0 + 8.5, "lost": 11.0, "downtime": 3.0, "other": 4.0,
        }
    )  # fmt: skip
    assert found.steps == 20 and found.steps_lost == 5 and found.ended == "the last step is done"
    (restart,) = found.restarts
    assert (restart["rank"], restart["host"], restart["step"], restart["cause"]) == (1, "n1", 16, "killed by SIGKILL")
    assert (restart["steps_lost"], restart["lost_s"], restart["downtime_s"]) == (5, 11.0, 3.0)


def test_a_stuck_rank_is_downtime() -> None:
    stuck = {"status": 14, "cause": "stuck", "rank": 3, "host": "n0", "step": 13, "phase": "input", "since_s": 5.0}
    events = [*KILLED[:5], event(49, "failure", **stuck, ago_s=2.0), *KILLED[6:]]
    found = goodput_of(events, rows(20, 2.0, 0.5), EPOCH + 89)
    assert found.seconds["lost"] == pytest.approx(6.0) and found.seconds["downtime"] == pytest.approx(8.0)
    assert found.wall_s == pytest.approx(89)


def test_without_a_supervisor_the_lost_rows_say_when_it_died() -> None:
    events = [item for item in KILLED if item["kind"] not in ("generation", "failure", "restart")]
    found = goodput_of(events, rows(20, 2.0, 0.5), EPOCH + 89)
    assert found.wall_s == pytest.approx(86)  # the first sign of life is "began"
    assert found.seconds["lost"] == pytest.approx(46 - 36) and found.seconds["downtime"] == pytest.approx(54 - 46)
    assert found.seconds["startup"] == pytest.approx(5.0 + (60 - 54 - 2.5) + 1)
    assert "without a word" in found.restarts[0]["cause"]


def test_a_run_that_trains_now_and_one_that_failed() -> None:
    found = goodput_of(KILLED[:5], rows(14, 2.0, 0.5), EPOCH + 44)
    assert found.wall_s == pytest.approx(44) and found.ended == "it runs"
    assert found.seconds["productive"] == pytest.approx(14 * 1.5) and found.seconds["lost"] == 0.0
    found = goodput_of(KILLED[:6], rows(15, 2.0, 0.5), EPOCH + 46)
    assert found.wall_s == pytest.approx(47) and found.seconds["lost"] == pytest.approx(11.0)
    assert found.seconds["productive"] == pytest.approx(15.0)


def test_a_longer_run_and_a_fall_back_to_an_old_checkpoint() -> None:
    longer = [
        event(100, "start", began=EPOCH + 95, step=20),
        event(101, "compiled", seconds=1.0),
        event(122, "checkpoint", step=30, blocked_s=1.0),
        event(123, "end", step=30, status=0, cause=""),
    ]
    found = goodput_of([*KILLED, *longer], rows(30, 2.0, 0.5))
    assert found.wall_s == pytest.approx(123) and found.seconds["lost"] == pytest.approx(11.0)
    assert found.seconds["productive"] == pytest.approx(45.0) and found.seconds["downtime"] == pytest.approx(3 + 6)
    # Step 20 is damaged: the third start resumes at 10, and what the second one trained is lost.
    longer[0]["step"] = 10
    found = goodput_of([*KILLED, *longer], rows(30, 2.0, 0.5))
    assert found.seconds["lost"] == pytest.approx(11.0 + (89 - 64))
    assert found.wall_s == pytest.approx(123)


def test_a_rollback_undoes_the_steps_since_its_checkpoint() -> None:
    events = [*KILLED[:5], event(43, "rollback", step=13, to=10, why="a spike"), event(59, "checkpoint", step=20),
              event(60, "rollback", step=20, to=10, why="a spike"), event(61, "end", step=20, status=0)]  # fmt: skip
    found = goodput_of(events[:6], rows(13, 2.0, 0.5), EPOCH + 43)
    assert found.seconds["lost"] == pytest.approx(43 - 36) and found.seconds["productive"] == pytest.approx(15.0)
    assert found.steps_lost == 3 and found.wall_s == pytest.approx(43)
    found = goodput_of(events, rows(20, 2.0, 0.5), EPOCH + 61)
    assert found.seconds["lost"] == pytest.approx((43 - 36) + (60 - 43)) and found.wall_s == pytest.approx(61)
    assert found.seconds["productive"] == pytest.approx(15.0) and found.steps_lost == 13


def test_a_save_on_local_disks_keeps_its_steps_and_blocks_like_any_other() -> None:
    local = [*KILLED[:5], event(43, "local_checkpoint", step=13, blocked_s=0.5), *KILLED[5:]]
    local[9], local[11] = {**local[9], "step": 13, "steps": 2}, {**local[11], "step": 13, "resumed_from": 13}
    local[10] = {**local[10], "step": 13, "tier": "local"}
    found = goodput_of(local, rows(20, 2.0, 0.5), EPOCH + 89)
    assert found.seconds["checkpoint"] == pytest.approx(2.5) and found.steps_lost == 2
    # Lost is the time after the local save alone: the kill came 11 s after the durable one, which ended at 36 s.
    assert found.seconds["lost"] == pytest.approx(11.0 - (43 - 36)) and found.wall_s == pytest.approx(89)


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_jump_changes_nothing(jump: float) -> None:
    moved = [{**item, "time": item["time"] + jump * (i >= 4)} for i, item in enumerate(KILLED)]
    moved[10]["began"] += jump
    moved[8]["written"] += jump
    found = goodput_of(moved, rows(20, 2.0, 0.5), EPOCH + 89)
    assert found.seconds == pytest.approx(goodput_of(KILLED, rows(20, 2.0, 0.5), EPOCH + 89).seconds)


KINDS = [
    "generation",
    "start",
    "restored",
    "compiled",
    "checkpoint",
    "evaluation",
    "failure",
    "end",
    "lost",
    "stopped",
    "rollback",
]


@settings(max_examples=300)
@given(
    st.lists(
        st.builds(
            lambda wall, mono, boot, kind, step, seconds: {
                "time": wall, "mono": mono, "boot": boot, "kind": kind, "step": step, "seconds": seconds,
                "blocked_s": seconds, "since_s": seconds, "ago_s": seconds, "cause": "stuck", "began": wall - seconds,
                "written": wall - seconds, "to": step // 2, "status": 0,
            },
            st.floats(0, 1e4), st.floats(0, 1e4), st.sampled_from(["a", "b", None]), st.sampled_from(KINDS),
            st.integers(0, 30), st.floats(0, 1e3),
        ),
        min_size=1, max_size=25,
    )
)  # fmt: skip
def test_no_category_is_negative_and_all_add_up(events: list[dict[str, Any]]) -> None:
    found = goodput_of(events, rows(30, 1.0, 0.25), 5e3)
    assert all(value >= -1e-6 for value in found.seconds.values()), found.seconds
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s)
    assert set(found.seconds) == set(CATEGORIES) and found.wall_s < 1e6


def test_the_verb_prints_the_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / EVENTS).write_text("".join(json.dumps(item) + "\n" for item in KILLED) + '{"time": 1, "ki')
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows(20, 2.0, 0.5)))
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["share"]["productive"] == pytest.approx(30 / 89)
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "goodput 33.7 %: 20 steps and 5 that were undone; 1 restarts" in text and "SIGKILL" in text
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2 and "has no start in" in capsys.readouterr().err


def test_events_have_a_clock_that_does_not_jump(tmp_path: Path) -> None:
    record_event(tmp_path, "start", step=0)
    time.sleep(0.02)
    record_event(tmp_path, "end", status=0)
    first, second = read_events(tmp_path)
    assert first["boot"] == second["boot"] and 0.02 <= second["mono"] - first["mono"] < 5
    record_event(tmp_path / "nowhere", "end")
