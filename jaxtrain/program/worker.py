"""Compile one train step for described devices: `python -m jaxtrain.program.worker`, one request, one answer.

It is a separate process because a fault of the compiler ends it. The request is one line of JSON on stdin, which stays
open: when the other end closes, the worker ends. Answer and artefacts are files of the folder of the request:

answer.json     {"error": text}, or numbers of the compilation
program.txt     the scheduled program
dump/           the compiler's files about memory, and the program with the names that they use
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CUDA_PLUGINS = ("xla_cuda13", "xla_cuda12")
CUDA_RUNTIMES = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# The first version that supports every card of program.cards; the library is not needed to compile.
CUDNN_VERSION = 91100
MEMORY = (
    "peak_memory_in_bytes", "argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes",
    "temp_size_in_bytes", "host_argument_size_in_bytes", "host_output_size_in_bytes", "host_temp_size_in_bytes",
    "host_alias_size_in_bytes",
)  # fmt: skip


def main() -> None:
    """Read the request, compile, write the answer."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    folder = Path(request["folder"])
    from jaxtrain.config import ConfigError

    try:
        answer = compile_request(request, folder)
    except ConfigError as error:
        answer = {"error": str(error)}
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


def compile_request(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Lower and compile the train step of request["config"]; raises ConfigError for what a user can fix."""
    import jax
    from jax.errors import JaxRuntimeError

    from jaxtrain.config import ConfigError, validate
    from jaxtrain.ops.low_precision import recipe_of
    from jaxtrain.program.saving import local_tier_bytes, save_bytes
    from jaxtrain.train.options import run_options
    from jaxtrain.train.resolve import bind
    from jaxtrain.train.step import lower_step

    # A cached executable writes no dump, and cannot be loaded without the devices.
    jax.config.update("jax_enable_compilation_cache", False)
    config = validate(request["config"])
    devices = compile_only_devices(request)
    if request["target"] == "cuda":
        _set_attention_device(devices[0])
    setup = bind(config, devices)
    attention = setup.attention[config.data.seq_len]
    begin = time.perf_counter()
    lowered = lower_step(setup.step, setup.abstract, setup.abstract_batch)
    traced = time.perf_counter()
    dump = {"xla_dump_to": str(folder / "dump"), "xla_dump_hlo_as_text": True}
    try:
        compiled = lowered.compile(compiler_options={**run_options(config), **dump})
    except JaxRuntimeError as error:
        raise ConfigError(f"the compiler refused this program: {str(error).splitlines()[0]}") from None
    done = time.perf_counter()
    (folder / "program.txt").write_text(compiled.as_text() or "", encoding="utf-8")
    memory, recipe = compiled.memory_analysis(), recipe_of(config.precision)
    return {
        "memory": {name: int(getattr(memory, name)) for name in MEMORY},
        "save": save_bytes(setup),
        "local_tier": local_tier_bytes(setup, request["nodes"]),
        "trace_seconds": traced - begin,
        "compile_seconds": done - traced,
        "sizes": dict(setup.topology.sizes),
        "domain": setup.topology.domain.tolist(),
        "ids": [int(device.id) for device in setup.topology.devices.ravel()],
        "batch_axes": list(setup.layout.batch_axes),
        "deferred_axes": list(setup.layout.deferred_axes),
        "accumulation": setup.batch_shape.accumulation,
        "microbatch": setup.batch_shape.microbatch,
        "parameters": setup.model.count(),
        "attention": str(attention),
        # Whether kernels hide the FLOPs of attention, and of routed experts; cuDNN calls list their dimensions.
        "kernels": [attention.backend.name == "tokamax", request["target"] == "cuda"],
        "device_kind": devices[0].device_kind,
        "version": jax.__version__,
        "options": run_options(config),
        "recipe": recipe
        and {
            "name": recipe.name,
            "kernels": recipe.kernels,
            "multiple": max(recipe.multiple, 16),
            "xla": {**recipe.xla},
        },
    }


def compile_only_devices(request: dict[str, Any]) -> list[Any]:
    """Devices that exist only for compilation; raises ConfigError if a package is missing."""
    import jax
    from jax.experimental import topologies

    from jaxtrain.config import ConfigError

    if request["target"] == "cpu":
        return list(jax.devices())
    if request["target"] == "cuda":
        _load_cuda_plugin(Path(request["packages"]))
        keys = {"platform": "cuda", "topology_name": "described", "topology": request["topology"]}
        keys["target_config"] = request["target_text"]
        setting = "cluster.target"
    else:
        if find_spec("libtpu") is None:
            raise ConfigError("compiling for TPUs needs libtpu, which is not installed: pip install libtpu into .venv")
        keys = {"platform": "tpu", "topology_name": request["topology"]}
        setting = f"topology {request['topology']}"
    try:
        return list(topologies.get_topology_desc(**keys).devices)
    except Exception as error:  # any exception of the plugin is about this setting
        raise ConfigError(
            f"{setting}: the compiler does not accept this target: {str(error).splitlines()[0]}"
        ) from None


def _load_cuda_plugin(packages: Path) -> None:
    from jaxtrain.config import ConfigError

    if packages.is_dir():
        sys.path.append(str(packages))
    for name in CUDA_RUNTIMES:
        spec = find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            # Mosaic kernels are linked against this library.
            os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(Path(folder) / "libmosaic_gpu_runtime.so")
    try:
        found = any(find_spec(f"jax_plugins.{name}") for name in CUDA_PLUGINS)
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ConfigError(
            "compiling for GPUs needs the GPU compiler as a package, which is not installed: run make setup-plan, or "
            "pip install 'jaxtrain[plan]' (half a GB, Linux; no GPU or driver is needed), or use --target cpu, "
            "whose memory figure is less exact"
        )


def _set_attention_device(device: Any) -> None:
    """Make attention kernels query the described device instead of the devices of this process."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax.extend import backend

    def version(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    capability = version(device.compute_capability)
    backend.get_default_device = lambda: device
    cudnn.check_compute_capability = lambda least: capability >= version(least)
    cudnn.is_cuda_compute_capability_equal = lambda other: capability == version(other)
    cudnn.check_cudnn_version = lambda: CUDNN_VERSION


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
