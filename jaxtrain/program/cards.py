"""GPUs as data: the numbers that the GPU compiler needs of a card, from public specifications.

`target_text` writes them as GpuTargetConfig text. A card that is not in the table needs no code: XLA writes that text
on a machine that has the card (gpu_target_config.pbtxt under xla_dump_to), and cluster.target names the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config import ClusterConfig, ConfigError, nearest
from jaxtrain.observe.flops import peak_flops

KIB = 1024


@dataclass(frozen=True)
class Card:
    """Numbers of one card; its peak FLOP/s are in observe.flops.PEAKS, its memory is in the cluster."""

    title: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_gb_per_s: float
    l2_mib: int
    shared_kib_per_core: int
    matrix_ops_per_clock: int
    """Multiply-adds in bfloat16 of one of a core's four matrix units."""
    links: int
    """NVLink links."""
    pcie_gb_per_s: float


# Makers' architecture whitepapers and datasheets: A100 (GA100 whitepaper), H100 and H200 (GH100 whitepaper v1.04, H200
# datasheet), B200, GB200 and GB300 (HGX and NVL72 specifications, CUDA programming guide's table of capabilities).
CARDS: dict[str, Card] = {
    "A100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 2039.0, 40, 164, 256, 12, 31.5),
    "H100": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 3352.0, 50, 228, 512, 18, 63.0),
    "H200": Card("NVIDIA H200", (9, 0), 132, 128, 1.98, 4800.0, 50, 228, 512, 18, 63.0),
    "B200": Card("NVIDIA B200", (10, 0), 148, 128, 1.965, 7700.0, 126, 228, 1024, 18, 63.0),
    "GB200": Card("NVIDIA GB200", (10, 0), 152, 128, 2.062, 8000.0, 126, 228, 1024, 18, 63.0),
    "GB300": Card("NVIDIA GB300", (10, 3), 152, 128, 2.07, 8000.0, 129, 228, 1024, 18, 126.0),
}

# Element types by their number in xla_data.proto, with the rate relative to bfloat16.
_MATRIX_RATES = {2: 2.0, 6: 2.0, 10: 1.0, 11: 0.5, 16: 1.0, 19: 2.0, 20: 2.0}
_FIRST_WITH_FLOAT8 = (8, 9)
_FLOAT8 = (19, 20)
# Integers have half a core's lanes, floats all of them.
_SCALAR_SHARES = {4: 2, 8: 2, 10: 1, 11: 1, 12: 2, 16: 1}


def card_of(cluster: ClusterConfig) -> Card:
    """The card that cluster.device names; raises ConfigError with the nearest name and how to add a card."""
    name = cluster.device or ""
    if name not in CARDS:
        raise ConfigError(
            f"cluster.device {cluster.device!r} is not a known card{nearest(name, CARDS)}; cards: {', '.join(CARDS)}; "
            "for another one set cluster.target to its GpuTargetConfig text, which XLA writes on a machine that has it "
            "(gpu_target_config.pbtxt under xla_dump_to)"
        )
    return CARDS[name]


def capability_of(cluster: ClusterConfig) -> str | None:
    """Compute capability of a described cluster's card, such as "9.0"; None if the card is not in the table."""
    card = CARDS.get(cluster.device or "")
    return ".".join(map(str, card.capability)) if card else None


def cluster_target(cluster: ClusterConfig) -> str:
    """GpuTargetConfig text of a cluster's card: the file cluster.target, or written from the table.

    Raises ConfigError for an unknown card, an unreadable file, a missing memory size.
    """
    if cluster.target is not None:
        try:
            return Path(cluster.target).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cluster.target {cluster.target} cannot be read: {error}") from None
    card = card_of(cluster)
    if cluster.memory_gb is None:
        raise ConfigError(f"cluster.memory_gb is null: set the memory of one {cluster.device} in GB")
    peak = peak_flops(cluster.device or "", "bfloat16")
    assert peak is not None, f"{cluster.device} has no row in observe.flops.PEAKS"
    return target_text(card, int(cluster.memory_gb * 1e9), peak)


def target_text(card: Card, memory_bytes: int, peak: float) -> str:
    """A card as GpuTargetConfig text; `peak` is its dense bfloat16 FLOP/s, from which the matrix clock follows."""
    major, minor = card.capability
    accelerated = major >= 9
    capability = f"{major}.{minor}{'a' if accelerated else ''}"
    matrix_clock = peak / (2 * card.cores * 4 * card.matrix_ops_per_clock) / 1e9
    scalar = "".join(
        _rate(kind, card.clock_ghz, card.fpus_per_core // share, 1) for kind, share in _SCALAR_SHARES.items()
    )
    matrix = "".join(
        _rate(kind, matrix_clock, 4, int(card.matrix_ops_per_clock * share))
        for kind, share in _MATRIX_RATES.items()
        if kind not in _FLOAT8 or card.capability >= _FIRST_WITH_FLOAT8
    )
    l2, shared = card.l2_mib * KIB * KIB, card.shared_kib_per_core * KIB
    return f"""gpu_device_info {{
  name: "{card.title}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {capability}"
  model_str: "sm_{capability} with {memory_bytes}B RAM, {card.cores} cores, {card.clock_ghz} GHz, {l2}B L2"
  cuda_compute_capability {{
    major: {major} minor: {minor}{" feature_extension: ACCELERATED_FEATURES" if accelerated else ""}
  }}
  core_count: {card.cores} fpus_per_core: {card.fpus_per_core} clock_rate_ghz: {card.clock_ghz}
  device_memory_size: {memory_bytes} memory_bandwidth: {int(card.memory_gb_per_s * 1e9)} l2_cache_size: {l2}
  shared_memory_per_core: {shared} shared_memory_per_block: {48 * KIB} shared_memory_per_block_optin: {shared - KIB}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_address_bits: 64 pcie_bandwidth: {int(card.pcie_gb_per_s * 1e9)} ecc_enabled: true
  scalar_unit_description {{
{scalar}  }}
  matrix_unit_description {{
{matrix}  }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0" cub_version: "3.1.2"
  device_interconnect_info {{ active_links: {card.links} }}
  collective_memory_granularity: {2 * KIB * KIB}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{card.title}"
"""


def _rate(kind: int, clock: float, units: int, ops: int) -> str:
    return (
        f"    rate_infos {{ key: {kind} value "
        f"{{ clock_rate_ghz: {clock:.6g} units_per_core: {units} ops_per_clock: {ops} }} }}\n"
    )
