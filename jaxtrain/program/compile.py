"""Compile the train step for a described cluster and report what the compiled program does."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxtrain.config import ClusterConfig, ConfigError, RunConfig, named_cluster, nearest, to_tree
from jaxtrain.observe.flops import kernel_flops, peak_flops, training_flops
from jaxtrain.program.buffers import PeakMemory, find_peak
from jaxtrain.program.cards import cluster_target
from jaxtrain.program.collectives import (
    Collective,
    Links,
    coverage,
    gradient_reductions,
    prove_tight,
    read_collectives,
    unread_collectives,
)
from jaxtrain.program.flops import count_flops
from jaxtrain.program.hlo import Program, read_program
from jaxtrain.program.low_precision import LowPrecisionMatmul, check_low_precision, low_precision_matmuls
from jaxtrain.program.partitioner import inserted_resharding, read_rematerializations
from jaxtrain.program.report import FlopsReport, LiveBuffer, MemoryReport, ProgramReport, Traffic
from jaxtrain.program.timeline import layer_timelines

Target = Literal["cuda", "cpu", "tpu"]
TARGETS: tuple[Target, ...] = ("cuda", "cpu", "tpu")
TIMEOUT_S = 600.0
# Not among the packages of the interpreter: jax loads every plugin that it finds, and warns at each start that this
# one has no runtime.
PLAN_PACKAGES = Path(sys.prefix) / "plan"
BUFFERS_SHOWN = 12
STDERR_LINES = 4
CPU_NOTE = (
    "compiled by the CPU's compiler: memory is arguments + outputs - aliased + temporaries, measured -21% to +38% off "
    "the GPU's; nothing is asynchronous, and reductions are not fused into reduce-scatters"
)


def compile_for(
    config: RunConfig,
    cluster: str | Path | ClusterConfig | None = None,
    devices: int | None = None,
    target: Target = "cuda",
    timeout: float = TIMEOUT_S,
) -> ProgramReport:
    """Compile a configuration's train step for a described cluster, in a separate process, and report.

    `cluster`: a name of configs/clusters, a YAML file, a ClusterConfig, or None for config.cluster; `devices` scales
    it. Raises ConfigError for what training would refuse, a missing package, an unknown card, options that XLA refuses,
    and a compiler that crashes or takes longer than `timeout` seconds. A program that does not fit the card is a
    result: see ProgramReport.memory.
    """
    config = _on_cluster(config, cluster)
    request = make_request(config, devices, target)
    with tempfile.TemporaryDirectory(prefix="jaxtrain-compile-") as folder:
        answer, stderr = run_worker({**request, "folder": folder}, timeout)
        text = Path(folder, "program.txt").read_text(encoding="utf-8")
        dumps = _dumped(Path(folder), "live-range"), _dumped(Path(folder), "buffer-assignment")
    return make_report(config, request, answer, text, stderr, dumps)


def make_request(config: RunConfig, devices: int | None, target: Target) -> dict[str, Any]:
    """The request to the worker; ConfigError for an unknown target or card or an impossible number of devices."""
    if target not in TARGETS:
        raise ConfigError(f"target {target!r} is unknown{nearest(target, TARGETS)}; targets: {', '.join(TARGETS)}")
    cluster = config.cluster
    per_node = cluster.devices_per_node
    if devices is None:
        if cluster.nodes is None or per_node is None:
            raise ConfigError(
                "there is no cluster to compile for: name one (--cluster h100_8x8), set cluster.nodes and "
                "cluster.devices_per_node, or give the number of devices (--devices 8)"
            )
        devices = cluster.nodes * per_node
    per_node = min(per_node or devices, devices)
    if devices < 1 or devices % per_node:
        raise ConfigError(f"devices is {devices}: use a multiple of cluster.devices_per_node {per_node}")
    request: dict[str, Any] = {"config": to_tree(config), "target": target, "devices": devices}
    request["nodes"] = devices // per_node
    if target == "cuda":
        # Slices x hosts x cards, a node being a slice: the compiler aborts on several hosts of one slice.
        request |= {"topology": f"{devices // per_node}x1x{per_node}", "target_text": cluster_target(cluster)}
        request["packages"] = str(PLAN_PACKAGES)
    elif target == "tpu":
        if cluster.target is None:
            raise ConfigError("cluster.target is null: set it to the TPU's topology, such as v5e:4x4")
        request |= {"topology": cluster.target}
    return request


def run_worker(request: dict[str, Any], timeout: float) -> tuple[dict[str, Any], str]:
    """The worker's answer and its stderr; the worker ends with this call, and with this process.

    Raises ConfigError with the worker's message, or when it ends without an answer or takes too long.
    """
    folder = Path(request["folder"])
    with (folder / "stderr.txt").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxtrain.program.worker"], env=_environment(request), stdin=subprocess.PIPE,
            stdout=stderr, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"compiling for {request['devices']} devices took longer than {timeout:g} seconds and was ended: give "
                "it more (--timeout), or compile fewer layers or devices"
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
    text = (folder / "stderr.txt").read_text(encoding="utf-8", errors="replace")
    return _answer(folder / "answer.json", process.returncode, text, request), text


def make_report(
    config: RunConfig,
    request: dict[str, Any],
    answer: dict[str, Any],
    text: str,
    stderr: str,
    dumps: tuple[str, str] = ("", ""),
) -> ProgramReport:
    """Read a compiled program and the compiler's files; `dumps`: live ranges and buffer assignment, or ''."""
    program = read_program(text)
    domain = np.array(answer["domain"])
    links, notes = _links(config)
    notes.append(f"attention: {answer['attention']}")
    collectives = read_collectives(program, domain, links)
    model = training_flops(config.model, config.data.seq_len)
    tokens = config.train.global_batch * config.data.seq_len / domain.size
    flops = count_flops(program)
    per_node = domain.size // request["nodes"]
    unknown = (*program.unknown, *unread_collectives(program))
    matmuls = low_precision_matmuls(program, answer["recipe"])
    notes += _check_matmuls(config, request, answer, matmuls)
    if request["target"] == "cpu":
        notes.append(CPU_NOTE)
    return ProgramReport(
        config=request["config"],
        cluster=config.cluster.name,
        card=answer["device_kind"],
        target=request["target"],
        devices=domain.size,
        sizes=answer["sizes"],
        domain=domain,
        nodes=np.array(answer["ids"]).reshape(domain.shape) // per_node,
        accumulation=answer["accumulation"],
        microbatch=answer["microbatch"],
        parameters=answer["parameters"],
        memory=_memory(config, request, answer, program, dumps),
        flops=FlopsReport(
            executed=flops.total,
            causal=model.causal * tokens,
            full=model.full * tokens,
            in_kernels=kernel_flops(config.model, config.data.seq_len, *answer["kernels"]) * tokens,
            by_source=flops.by_source,
            opaque=flops.opaque,
        ),
        traffic=sum_traffic(collectives),
        collectives=collectives,
        reductions=gradient_reductions(collectives, answer["batch_axes"]),
        coverage={str(link): share for link, share in coverage(collectives).items()},
        inserted_resharding=inserted_resharding(program, collectives),
        rematerializations=read_rematerializations(stderr, program),
        proof=prove_tight(collectives, domain),
        timelines=layer_timelines(program, collectives, links),
        trace_seconds=answer["trace_seconds"],
        compile_seconds=answer["compile_seconds"],
        options=answer["options"],
        version=answer["version"],
        notes=tuple(notes),
        unknown=tuple((one.what, one.where) for one in unknown),
        local_tier=answer["local_tier"],
        low_precision=matmuls,
    )


def _check_matmuls(
    config: RunConfig, request: dict[str, Any], answer: dict[str, Any], matmuls: Sequence[LowPrecisionMatmul]
) -> list[str]:
    """How 8-bit matmuls are counted, one note; raises ConfigError for one that a GPU's program computes in 16 bits."""
    if request["target"] == "cuda":
        check_low_precision(matmuls, answer["recipe"], config.precision.compute)
    counted = (
        f"matmuls in 8 bits are counted at the card's {config.precision.compute} peak: they are shorter, and cover "
        "less of the transfers than is shown"
    )
    return [counted] if matmuls else []


def sum_traffic(collectives: tuple[Collective, ...]) -> tuple[Traffic, ...]:
    """Collectives summed by axes, kind, link and asynchrony, the most time first."""
    grouped: dict[tuple[str, str, str, bool], list[Collective]] = defaultdict(list)
    for one in collectives:
        grouped[one.axes_label, one.kind, one.link, one.asynchronous].append(one)
    summed = []
    for (axes, kind, link, asynchronous), group in grouped.items():
        seconds = sum(one.calls * one.seconds for one in group)
        hidden = sum(one.calls * one.seconds * one.covered for one in group)
        heavy = sorted(group, key=lambda one: -one.calls * one.payload)
        summed.append(
            Traffic(
                axes=axes,
                kind=kind,
                link=link,
                asynchronous=asynchronous,
                calls=sum(one.calls for one in group),
                payload=sum(one.calls * one.payload for one in group),
                bytes_sent=sum(one.calls * one.bytes_sent for one in group),
                seconds=seconds,
                covered=hidden / seconds if seconds else 0.0,
                groups=heavy[0].groups,
                sources=tuple(dict.fromkeys(requesting_source(one.stack) for one in heavy if one.stack)),
            )
        )
    return tuple(sorted(summed, key=lambda row: -row.seconds))


def _dumped(folder: Path, what: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (folder / "dump").glob(f"*jit_train_step*{what}.txt"))


def requesting_source(stack: tuple[str, ...]) -> str:
    """The innermost source line that is not a helper of sharding constraints."""
    lines = [line for line in stack if not re.search(r"mesh/(constraints|shard_map)\.py:\d+$", line)] or list(stack)
    return re.sub(r"^.*/(?=jaxtrain/)", "", lines[0]) if lines else ""


def live_buffers(peak: PeakMemory) -> tuple[LiveBuffer, ...]:
    """The largest buffers alive at the peak, with the operation and the line that made them."""
    return tuple(
        LiveBuffer(one.name, one.bytes, one.shape, one.op_name.replace("\\'", "'"), requesting_source(one.stack))
        for one in peak.buffers[:BUFFERS_SHOWN]
    )


def _memory(
    config: RunConfig, request: dict[str, Any], answer: dict[str, Any], program: Program, dumps: tuple[str, str]
) -> MemoryReport:
    sizes: dict[str, int] = answer["memory"]
    exact = request["target"] != "cpu"
    parts = {name: sizes[f"{name}_size_in_bytes"] for name in ("argument", "output", "alias", "temp")}
    host = sum(sizes[f"host_{name}_size_in_bytes"] * (-1 if name == "alias" else 1) for name in parts)
    summed = parts["argument"] + parts["output"] - parts["alias"] + parts["temp"]
    found = find_peak(dumps[0], dumps[1], program) if dumps[0] and dumps[1] else None
    # The compiler counts arguments in host memory as part of the peak.
    peak = sizes["peak_memory_in_bytes"] - sizes["host_argument_size_in_bytes"] if exact else summed
    gb = config.cluster.memory_gb
    return MemoryReport(
        peak=peak,
        card=None if gb is None else int(gb * 1e9),
        host=host,
        arguments=parts["argument"],
        outputs=parts["output"],
        aliased=parts["alias"],
        temporaries=parts["temp"],
        exact=exact,
        live=found.bytes if found else summed,
        largest=live_buffers(found) if found else (),
        save=answer["save"],
        # The results of a replay do not replace the state (train/replay.py).
        replay=None if config.guard.replay_every is None else peak + parts["alias"],
    )


def _links(config: RunConfig) -> tuple[Links, list[str]]:
    """Speeds of the cluster; an unknown speed is infinite, so that it takes or covers no time, and is noted."""
    cluster, notes = config.cluster, []
    peak = peak_flops(cluster.device or "", config.precision.compute)
    for name in ("domain_gb_per_s", "network_gb_per_s"):
        if getattr(cluster, name) is None:
            notes.append(f"cluster.{name} is null: transfers over it are counted as taking no time")
    if peak is None:
        notes.append(f"the peak FLOP/s of cluster.device {cluster.device!r} is not known: matmuls cover nothing")
    fast, network = ((gb or math.inf) * 1e9 for gb in (cluster.domain_gb_per_s, cluster.network_gb_per_s))
    return Links(fast, network, peak or math.inf), notes


def _on_cluster(config: RunConfig, cluster: str | Path | ClusterConfig | None) -> RunConfig:
    if cluster is None:
        return config
    described = cluster if isinstance(cluster, ClusterConfig) else named_cluster(cluster)
    return config.model_copy(update={"cluster": described})


def _environment(request: dict[str, Any]) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "0", "TPU_SKIP_MDS_QUERY": "1"}
    # jax refuses two settings of the number of CPU devices.
    flags = env.get("XLA_FLAGS", "").split()
    env["XLA_FLAGS"] = " ".join(flag for flag in flags if "force_host_platform_device_count" not in flag)
    env["JAX_NUM_CPU_DEVICES"] = str(request["devices"] if request["target"] == "cpu" else 1)
    # Import this package from any working directory.
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    return env


def _answer(path: Path, status: int, stderr: str, request: dict[str, Any]) -> dict[str, Any]:
    if path.is_file():
        answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"F\d{4} |.*(Check failed|FATAL|Error)", line)] or lines
    printed = "\n".join(f"  {line[:300]}" for line in errors[:STDERR_LINES])
    raise ConfigError(
        f"the compiler {how} while compiling for {request['devices']} devices "
        f"({request.get('topology', request['target'])}); its last messages:\n{printed}\n"
        "this is a fault of the compiler: try other xla: options, another layout, or --target cpu"
    )
