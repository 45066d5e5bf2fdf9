"""The worked values of measuring, and a meter fed with readings whose answers are known."""

import pytest

from jaxtrain.config import ModelConfig
from jaxtrain.observe.meter import Meter, device_hours, hours, scaling_efficiency, tokens_per_second

MODEL = ModelConfig()


@pytest.mark.parametrize(("seconds", "rate"), [(2.0, 131_072), (2.5, 104_858), (2.3, 113_976), (1.8, 145_636)])
def test_effective_throughput(seconds, rate):
    assert round(tokens_per_second(262_144, seconds)) == rate


def test_scaling_efficiency():
    assert scaling_efficiency(17_000, 16, 10_000, 8) == pytest.approx(0.85, rel=1e-12)
    assert scaling_efficiency(8000, 8, 1000) == pytest.approx(1.0, rel=1e-12)


def test_hours_and_device_hours():
    assert round(hours(1e9, 10_000), 1) == 27.8
    assert round(hours(1e9, 17_000), 1) == 16.3
    assert round(device_hours(1e9, 10_000, 8), 1) == 222.2
    assert round(device_hours(1e9, 17_000, 16), 1) == 261.4


def test_rows_and_summary():
    meter = Meter(MODEL, 256, "NVIDIA H100 80GB HBM3", 8, "bfloat16")
    first = meter.record(1000, 50.0, 0.0, compiled=True)
    assert first["tokens_per_s"] == 20.0
    for i in range(1, 101):
        meter.record(262_144, i / 50, i / 500)
    total = meter.summary()
    assert total["measured_updates"] == 100
    # Seconds are 0.02 to 2.00: the q-th percentile of 1..100 lies at 1 + 0.99 q.
    assert total["step_s_p50"] == pytest.approx(50.5 / 50, rel=1e-9)
    assert total["step_s_p90"] == pytest.approx(90.1 / 50, rel=1e-9)
    assert total["step_s_p99"] == pytest.approx(99.01 / 50, rel=1e-9)
    assert total["data_wait_share"] == pytest.approx(0.1, rel=1e-9)
    assert total["tokens_per_s"] == pytest.approx(26_214_400 / 101, rel=1e-9)
    assert total["tokens_per_s_median"] == pytest.approx((262_144 * 50 / 50 + 262_144 * 50 / 51) / 2, rel=1e-9)


def test_mfu_is_model_flops_over_the_peak_of_all_devices():
    # 8B at 8,192 on 8 H100, 6 N + 12 L D T / 2: 100,000 tokens/s are about 62% of 8 x 989.4 TFLOP/s.
    model = ModelConfig(vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, d_ff=14_336)
    row = Meter(model, 8192, "NVIDIA H100 80GB HBM3", 8).record(100_000, 1.0, 0.0)
    per_token = 6 * 7_504_658_432 + 12 * 32 * 4096 * 8193 / 2
    assert row["tflops_per_device_causal"] == pytest.approx(100_000 * per_token / 8 / 1e12, rel=1e-9)
    assert row["mfu_causal"] == pytest.approx(100_000 * per_token / (8 * 989.4e12), rel=1e-9)
    assert row["mfu_full"] > row["mfu_causal"]


def test_mfu_is_absent_on_an_unknown_chip():
    meter = Meter(MODEL, 256, "cpu", 1)
    row = meter.record(4096, 0.5, 0.1)
    assert row["mfu_causal"] is None and row["mfu_full"] is None
    assert row["tflops_per_device_causal"] > 0
    assert meter.summary()["mfu_causal"] is None


def test_a_summary_of_nothing_has_the_same_names():
    empty, fed = Meter(MODEL, 256, "cpu", 1), Meter(MODEL, 256, "cpu", 1)
    empty.record(10, 1.0, 0.0, compiled=True)
    fed.record(10, 1.0, 0.0)
    assert empty.summary().keys() == fed.summary().keys()
    assert empty.summary()["step_s_p50"] is None
