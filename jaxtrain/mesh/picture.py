"""Devices of a topology drawn: a row a node, a cell a device."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from jaxtrain.config import AXES
from jaxtrain.mesh.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def node_size(topology: Topology) -> int:
    """Devices of a node, of most nodes where they differ."""
    return Counter(device.process_index for device in topology.devices.ravel()).most_common(1)[0][1]


def figure_of(topology: Topology, panels: int) -> tuple[Figure, list[Axes]]:
    """An empty figure with `panels` axes side by side, as large as the cluster needs."""
    from matplotlib.figure import Figure

    nodes = len({device.process_index for device in topology.devices.ravel()})
    width, height = max(5.0, 0.75 * node_size(topology)), max(2.5, 0.6 * nodes + 1.2)
    figure = Figure(figsize=(min(width, 24.0) * panels, min(height, 24.0)), layout="constrained")
    return figure, [figure.add_subplot(1, panels, i + 1) for i in range(panels)]


def place_labels(topology: Topology) -> dict[int, str]:
    """Device id -> its place on the axes in use, a line an axis: d0, t1."""
    used = [i for i, axis in enumerate(AXES) if topology.sizes[axis] > 1]
    return {
        int(device.id): "\n".join(f"{AXES[i][0]}{place[i]}" for i in used)
        for place, device in np.ndenumerate(topology.devices)
    }


def draw_devices(axes: Axes, topology: Topology, colours: dict[int, int], labels: dict[int, str]) -> None:
    """A row a node, a cell a device in order of id; a gap between fast domains."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    domain = {int(d.id): int(topology.domain[place]) for place, d in np.ndenumerate(topology.devices)}
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
