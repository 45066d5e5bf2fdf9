"""Throughput, waiting and step times of a run, and the arithmetic that compares runs.

Effective tokens/s = scored target tokens, counted once over all replicas / elapsed time. Copies under tensor, sequence
or pipeline parallelism and padding never count, in FLOP/s and MFU neither.
"""

from __future__ import annotations

import numpy as np

from jaxtrain.config import ModelConfig
from jaxtrain.observe.flops import Compute, peak_flops, training_flops

Measures = dict[str, float | int | None]

PERCENTILES = {"step_s_p50": 50, "step_s_p90": 90, "step_s_p99": 99}


class Meter:
    """Takes one reading a step; MFU is None where the device's peak is unknown (a CPU).

    `length` is the tokens of a sequence, `devices` all devices of the job, `compute` the dtype that matmuls compute in.
    """

    def __init__(
        self,
        model: ModelConfig,
        length: int,
        device_kind: str,
        devices: int,
        compute: Compute = "bfloat16",
        matmul_precision: str | None = None,
    ) -> None:
        self.flops = training_flops(model, length)
        self.peak = peak_flops(device_kind, compute, matmul_precision)
        self.devices = devices
        self._readings: list[tuple[int, float, float]] = []

    def record(self, tokens: int, seconds: float, wait: float, compiled: bool = False) -> Measures:
        """One step: scored tokens of the global batch, its wall seconds, seconds spent waiting for data.

        `compiled` marks a step that also compiled or warmed up: it has a row, the summary leaves it out.
        """
        assert tokens >= 0 and seconds > 0 and wait >= 0, f"reading of {tokens} tokens, {seconds} s, {wait} s waiting"
        if not compiled:
            self._readings.append((tokens, seconds, wait))
        return {"step_time_s": seconds, "step_s": seconds, "data_wait_s": wait, **self._rates(tokens, seconds)}

    def summary(self) -> Measures:
        """Rates over all measured time, median tokens/s, step seconds p50/p90/p99; None where nothing was measured."""
        names = ["tokens_per_s_median", *PERCENTILES, "data_wait_share", *self._rates(0, 1.0)]
        if not self._readings:
            return {"measured_updates": 0, **dict.fromkeys(names)}
        tokens, seconds, waits = np.asarray(self._readings, dtype=float).T
        return {
            "measured_updates": len(seconds),
            "tokens_per_s_median": float(np.median(tokens / seconds)),
            **{name: float(np.percentile(seconds, q)) for name, q in PERCENTILES.items()},
            "data_wait_share": float(waits.sum() / seconds.sum()),
            **self._rates(float(tokens.sum()), float(seconds.sum())),
        }

    def _rates(self, tokens: float, seconds: float) -> Measures:
        rate = tokens_per_second(tokens, seconds)
        causal, full = (rate * a_token / self.devices for a_token in (self.flops.causal, self.flops.full))
        return {
            "tokens_per_s": rate,
            "tflops_per_device_causal": causal / 1e12,
            "tflops_per_device_full": full / 1e12,
            "mfu_causal": causal / self.peak if self.peak else None,
            "mfu_full": full / self.peak if self.peak else None,
        }


def tokens_per_second(tokens: float, seconds: float) -> float:
    """Effective throughput: scored tokens, counted once, over elapsed seconds."""
    return tokens / seconds


def scaling_efficiency(rate: float, devices: int, base_rate: float, base_devices: int = 1) -> float:
    """Share of linear scaling reached: tokens/s a device over tokens/s a device of the smallest run that fits."""
    return (rate / devices) / (base_rate / base_devices)


def hours(tokens: float, rate: float) -> float:
    """Hours to train on `tokens` at `rate` tokens/s."""
    return tokens / rate / 3600


def device_hours(tokens: float, rate: float, devices: int) -> float:
    """Device-hours to train on `tokens` at `rate` tokens/s over all devices."""
    return hours(tokens, rate) * devices
