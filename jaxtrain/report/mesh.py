"""The mesh over nodes: a table, and a figure with a row for each node and a cell for each device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxtrain.config import AXES, Axis
from jaxtrain.mesh.topology import Topology, node_size
from jaxtrain.report.tables import FittedTable, Row, format_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxtrain.inspect import Inspection

FLOW: dict[Axis, str] = {
    "data": "gradients, and weights under FSDP",
    "pipe": "activations at stage borders",
    "tensor": "activations, several times a block",
    "seq": "keys and values, every block",
    "expert": "tokens, every expert block",
}
MESH_NODES_SHOWN = 16


def mesh_table(one: Inspection) -> FittedTable:
    """Domain, devices and mesh coordinates of each node."""
    sizes = one.topology.sizes
    used = [axis for axis in AXES if sizes[axis] > 1] or ["data"]
    rows: list[Row] = [
        [
            str(row["node"]),
            format_range(row["domains"]),
            format_range(row["devices"]),
            *(format_range(row[axis]) for axis in used),
        ]
        for row in one.nodes[:MESH_NODES_SHOWN]
    ]
    if len(one.nodes) > MESH_NODES_SHOWN:
        rows.append(f"and {len(one.nodes) - MESH_NODES_SHOWN} more nodes (--json shows all)")
    name = f"{one.config.cluster.name}: " if one.topology.devices.size else ""
    return FittedTable(["node", "domain", "devices", *used], rows, f"{name}mesh {_show_sizes(sizes)} over nodes")


def crossing_table(one: Inspection) -> FittedTable:
    """How many fast domains a group of each axis spans, and what it sends."""
    rows = [
        [axis, str(one.topology.sizes[axis]), f"{spanned}: crosses" if spanned > 1 else "1: stays inside", FLOW[axis]]
        for axis, spanned in one.topology.crossings().items()
        if one.topology.sizes[axis] > 1
    ]
    return FittedTable(["axis", "size", "domains of a group", "what is sent"], rows, "What crosses domains")


def _show_sizes(sizes: dict[Axis, int]) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "of one device"


def device_figure(topology: Topology, panels: int) -> tuple[Figure, list[Axes]]:
    """An empty figure with `panels` axes side by side; its size follows the number of nodes and devices."""
    from matplotlib.figure import Figure

    nodes = len({device.process_index for device in topology.devices.ravel()})
    width, height = max(5.0, 0.75 * node_size(topology)), max(2.5, 0.6 * nodes + 1.2)
    figure = Figure(figsize=(min(width, 24.0) * panels, min(height, 24.0)), layout="constrained")
    return figure, [figure.add_subplot(1, panels, i + 1) for i in range(panels)]


def coordinate_labels(topology: Topology) -> dict[int, str]:
    """Device id -> its mesh coordinates, one line for each axis in use: d0, t1."""
    used = [i for i, axis in enumerate(AXES) if topology.sizes[axis] > 1]
    return {
        int(device.id): "\n".join(f"{AXES[i][0]}{coordinates[i]}" for i in used)
        for coordinates, device in np.ndenumerate(topology.devices)
    }


def draw_devices(axes: Axes, topology: Topology, colours: dict[int, int], labels: dict[int, str]) -> None:
    """Draw a row for each node, a cell for each device in order of id, and a gap between fast domains."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    domain = {int(d.id): int(topology.domain[coordinates]) for coordinates, d in np.ndenumerate(topology.devices)}
    nodes: dict[int, list[int]] = {}
    for device in sorted(topology.devices.ravel(), key=lambda d: (domain[int(d.id)], d.process_index, d.id)):
        nodes.setdefault(device.process_index, []).append(int(device.id))
    palette, many = colormaps["hsv" if max(colours.values()) >= 20 else "tab20"], max(colours.values()) + 1
    ticks = []
    for row, (node, ids) in enumerate(nodes.items()):
        y = row + 0.35 * domain[ids[0]]
        ticks.append((y + 0.45, f"node {node}\ndomain {domain[ids[0]]}"))
        for column, device in enumerate(ids):
            colour = palette(colours[device] / many) if many > 20 else palette(colours[device])
            axes.add_patch(Rectangle((column, y), 0.94, 0.9, facecolor=colour, edgecolor="black", alpha=0.6))
            text = f"{device}\n{labels[device]}".strip()
            axes.text(column + 0.47, y + 0.45, text, ha="center", va="center", fontsize=6)
    axes.set_xlim(-0.1, max(map(len, nodes.values())) + 0.1)
    axes.set_ylim(ticks[-1][0] + 0.6, -0.2)
    axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks], fontsize=7)
    axes.set_xticks([])


def plot_mesh(topology: Topology) -> Figure:
    """Devices on their nodes, coloured by (data, pipe) coordinate and labelled with their mesh coordinates."""
    colours = {
        int(device.id): coordinates[0] * topology.sizes["pipe"] + coordinates[1]
        for coordinates, device in np.ndenumerate(topology.devices)
    }
    figure, (axes,) = device_figure(topology, 1)
    draw_devices(axes, topology, colours, coordinate_labels(topology))
    axes.set_title("Devices on their nodes; one colour per (data, pipe) coordinate")
    return figure
