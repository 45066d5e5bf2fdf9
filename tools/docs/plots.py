"""Draw the plots of docs/sharding.md: `make docs-plots`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxtrain.config import load_config
from jaxtrain.inspect import inspect

PARAMETER = "layers/mlp/up/weight"
NODES = ["cluster.nodes=2", "cluster.devices_per_node=4", "cluster.domain_size=4"]
# File -> overrides of llama3_8b.
PLOTS = {
    "fsdp": ["mesh.data=8", "rules.preset=[fsdp]"],
    "tensor": ["mesh.data=2", "mesh.tensor=4", "rules.preset=[tensor]"],
    "fsdp_tensor": ["mesh.data=2", "mesh.tensor=4", "rules.preset=[fsdp, tensor]"],
}


def main() -> None:
    """One SVG per layout, and the mesh over its nodes."""
    import matplotlib

    # The same input gives the same bytes.
    matplotlib.rcParams["svg.hashsalt"] = "jaxtrain"
    folder = ROOT / "docs" / "images"
    for name, overrides in PLOTS.items():
        shown = inspect(load_config("llama3_8b", [*NODES, *overrides]))
        figure = shown.plot_parameter(PARAMETER)
        figure.savefig(folder / f"sharding_{name}.svg", metadata={"Date": None})
    shown.plot_mesh().savefig(folder / "mesh.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
