"""Which checkpoints are kept, and when one is due by the clock."""

import time

from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.checkpoint.retention import Facts, WallClock, facts_of, retained
from jaxtrain.config import CheckpointConfig

CONFIGS = st.builds(
    CheckpointConfig,
    keep=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 20),
    keep_best=st.none() | st.integers(1, 3),
)
FACTS = st.builds(Facts, good=st.booleans(), eval_loss=st.none() | st.floats(0, 10))
CHECKPOINTS = st.dictionaries(st.integers(0, 200), FACTS, max_size=30)


@given(checkpoints=CHECKPOINTS, config=CONFIGS)
def test_what_is_kept_is_bounded_and_nothing_good_gives_way_to_a_skipped_step(checkpoints, config):
    kept = retained(checkpoints, config)
    good = sorted(step for step, facts in checkpoints.items() if facts.good)
    assert kept <= checkpoints.keys()
    assert kept >= {*good[-config.keep :]}
    assert max(checkpoints, default=None) == max(kept, default=None)
    assert all(step in kept for step in good if config.keep_every and step % config.keep_every == 0)
    assert len([step for step in kept if step not in good]) <= 1
    forever = sum(1 for step in good if config.keep_every and step % config.keep_every == 0)
    assert len(kept) <= 1 + config.keep + (config.keep_best or 0) + forever
    # Rotating after each save or once in the end leaves the same: what was removed would not have been kept later.
    assert retained({step: checkpoints[step] for step in kept}, config) == kept


@given(checkpoints=CHECKPOINTS, config=CONFIGS)
def test_the_best_are_those_with_the_lowest_loss(checkpoints, config):
    kept = retained(checkpoints, config)
    losses = {s: f.eval_loss for s, f in checkpoints.items() if f.good and f.eval_loss is not None}
    best = sorted(losses, key=lambda step: (losses[step], -step))[: config.keep_best or 0]
    assert kept >= {*best}


def test_skipped_steps_do_not_rotate_the_last_good_states_away():
    facts = {step: Facts(good=step < 80) for step in range(10, 140, 10)}
    assert retained(facts, CheckpointConfig(keep=2)) == {60, 70, 130}
    assert facts_of({"skipped": 3}) == Facts(good=True, eval_loss=None)
    assert facts_of({"good": False, "eval_loss": float("nan")}) == Facts(good=False, eval_loss=None)


def test_the_clock_is_due_after_its_minutes_and_asks_rarely(monkeypatch):
    asked, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = WallClock(10.0)
    exchange = WallClock.due.__globals__["exchange"]
    monkeypatch.setitem(WallClock.due.__globals__, "exchange", lambda *args: asked.append(args[0]) or exchange(*args))
    due = []
    for step in range(1, 1001):
        now[0] += 2.0
        if clock.due(step):
            due.append(step)
            clock.restart(step)
    assert due == [300, 600, 900]
    assert len(asked) < 40
    assert not any(WallClock(None).due(step) for step in range(10))
