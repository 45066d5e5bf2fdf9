"""Eight simulated devices, a persistent compilation cache, no progress bars."""

import os
import tempfile

from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Without this flag independent collectives of one program may run in different order on different devices and deadlock.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_concurrency_optimized_scheduler=false"
).strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "jaxtrain-test-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Simulated devices wait for each other in threads of one pool: one that is no larger than the machine runs dry.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("MPLBACKEND", "agg")

# The same examples in each run: a change is judged by what it changes. make prove draws others each time.
# No deadline: a loaded machine is no fault.
settings.register_profile("still", derandomize=True, deadline=None)
settings.load_profile("still")
