"""Phases of a schedule by steps and by tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import ConfigError, DataConfig, TrainConfig, validate
from jaxtrain.data import Phase, phase_at, phases_of

TRAIN = TrainConfig(global_batch=16)


def test_without_a_schedule_there_is_one_phase():
    assert phases_of(DataConfig(seq_len=64), TRAIN) == (Phase(0, 64, 16),)


def test_phases_by_steps_inherit_unset_values_from_the_run():
    data = DataConfig(seq_len=64, schedule=[{"start": 0, "seq_len": 32}, {"start": 10, "global_batch": 8}])
    phases = phases_of(data, TRAIN)
    assert phases == (Phase(0, 32, 16), Phase(10, 64, 8))
    assert [phase_at(phases, step) for step in (0, 9, 10, 11, 10**9)] == [0, 0, 1, 1, 1]


@given(
    entries=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=5)
)
@settings(max_examples=100, deadline=None)
def test_phases_by_tokens_begin_at_the_first_step_after_so_many_tokens(entries):
    starts = [0]
    for gap, _, _ in entries[:-1]:
        starts.append(starts[-1] + gap)
    schedule = [
        {"start": start, "seq_len": length, "global_batch": rows}
        for start, (_, length, rows) in zip(starts, entries, strict=True)
    ]
    try:
        phases = phases_of(DataConfig(schedule=schedule, schedule_unit="tokens"), TRAIN)
    except ConfigError as error:
        assert "has no step" in str(error)
        return
    tokens = 0
    for step in range(phases[-1].start + 3):
        phase = phase_at(phases, step)
        due = [index for index, start in enumerate(starts) if start <= tokens]
        assert phase == due[-1]
        tokens += phases[phase].seq_len * phases[phase].global_batch


def test_a_phase_without_a_step_is_an_error():
    schedule = [{"start": 0}, {"start": 100}, {"start": 120}]
    with pytest.raises(
        ConfigError,
        match=r"data.schedule\[1\] has no step: it begins at 1024 tokens, .* \(120\), because batches have 1024 tokens",
    ):
        phases_of(DataConfig(seq_len=64, schedule=schedule, schedule_unit="tokens"), TRAIN)


@pytest.mark.parametrize("starts", [[1], [0, 5, 5], [0, 9, 3]])
def test_starts_increase_from_zero(starts):
    with pytest.raises(ConfigError, match=r"data.schedule starts at"):
        validate({"data": {"schedule": [{"start": start} for start in starts]}})


def test_every_seq_len_must_fit_learned_positions():
    with pytest.raises(ConfigError, match=r"data.schedule\[1\].seq_len 4096 exceeds model.max_seq_len 2048"):
        validate({
            "model": {"positions": "learned"}, "data": {"schedule": [{"start": 0}, {"start": 5, "seq_len": 4096}]}
        })  # fmt: skip
