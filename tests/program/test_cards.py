"""Target texts agree with the table, the cluster and the peak; users can bring their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxtrain.config import ClusterConfig, ConfigError, named_cluster
from jaxtrain.observe.flops import PEAKS
from jaxtrain.program.cards import CARDS, cluster_target

CLUSTERS = ["a100_8x8", "b200_8x8", "gb200_nvl72", "gb300_nvl72", "h100_8x8", "h200_8x8"]


def number(text: str, name: str) -> float:
    return float(re.search(rf"\b{name}: ([\d.]+)", text)[1])  # type: ignore[index]


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_has_all_that_compiling_needs(name: str) -> None:
    cluster = named_cluster(name)
    assert cluster.device in CARDS and cluster.domain_gb_per_s and cluster.network_gb_per_s
    assert cluster.domain_gb_per_s > 5 * cluster.network_gb_per_s
    text = cluster_target(cluster)
    assert number(text, "device_memory_size") == cluster.memory_gb * 1e9  # type: ignore[operator]
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize("name", CLUSTERS)
def test_rates_multiply_to_the_published_peaks(name: str) -> None:
    cluster = named_cluster(name)
    text, peak = cluster_target(cluster), PEAKS[cluster.device or ""]
    scalar, matrix = (
        part.split("_unit_description")[0] for part in re.split(r"(?:scalar|matrix)_unit_description", text)[1:]
    )

    def rate(part: str, kind: int) -> float:
        clock, units, ops = re.search(
            rf"key: {kind} value {{ clock_rate_ghz: (\S+) units_per_core: (\d+) ops_per_clock: (\d+)", part
        ).groups()  # type: ignore[union-attr]
        return 2 * float(clock) * int(units) * int(ops) * number(text, "core_count") / 1e3

    assert rate(matrix, 16) == pytest.approx(peak.bfloat16, rel=1e-4)
    assert rate(matrix, 11) == pytest.approx(peak.tensor32, rel=1e-4)
    assert rate(scalar, 11) == pytest.approx(peak.float32, rel=0.05)  # published at rounded boost clocks
    # The matrix units run below the boost clock at which the scalar units are published.
    assert (
        0.85
        < peak.bfloat16
        * 1e3
        / (8 * number(text, "core_count") * CARDS[cluster.device or ""].matrix_ops_per_clock)
        / number(text, "clock_rate_ghz")
        < 1.01
    )  # type: ignore[operator]


def test_a_target_file_and_its_absence(tmp_path: Path) -> None:
    (tmp_path / "card.pbtxt").write_text("gpu_device_info { core_count: 7 }")
    cluster = ClusterConfig(device="New", target=str(tmp_path / "card.pbtxt"))
    assert cluster_target(cluster) == "gpu_device_info { core_count: 7 }"
    with pytest.raises(ConfigError, match=r"not a known card.*gpu_target_config.pbtxt"):
        cluster_target(ClusterConfig(device="New"))
    with pytest.raises(ConfigError, match=r"cluster\.memory_gb is null"):
        cluster_target(ClusterConfig(device="H100"))
