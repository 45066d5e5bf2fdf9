"""The plot of a mixture at the end of a run: load of each expert of each layer, and imbalance by step.

N mixture layers, X experts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxtrain.observe.files import read_metrics

LOAD_STEPS = 20
"""The load is summed over so many last steps."""


def draw_experts(run_dir: Path) -> Path | None:
    """Draw RUN/experts.png from RUN/metrics.jsonl; None for a run without mixtures.

    Left: load of each expert [N, X] over the last steps, as a multiple of the even share. Right, by step: the worst
    layer's imbalance, choices dropped and overflowed, and the share of tokens sent to another fast domain.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in read_metrics(run_dir) if row.get("expert_load")]
    if not rows:
        return None
    load_NX = np.sum([row["expert_load"] for row in rows[-LOAD_STEPS:]], axis=0, dtype=float)
    even_NX = load_NX / np.maximum(load_NX.mean(axis=1, keepdims=True), 1e-9)
    figure = Figure(figsize=(12, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    image = left.imshow(even_NX, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    figure.colorbar(image, ax=left, label="load, multiple of the even share", extend="max")
    left.set_xlabel("expert")
    left.set_ylabel("mixture layer")
    left.set_title(
        f"load over the last {len(rows[-LOAD_STEPS:])} steps, worst {even_NX.max():.2f}", loc="left", fontsize=10
    )
    steps = [row["step"] for row in rows]
    right.plot(
        steps, [row["imbalance"] for row in rows], color="#2f6db5", linewidth=1.2, label="imbalance, worst layer"
    )
    right.axhline(1, color="#9aa5b1", linewidth=0.8)
    right.set_xlabel("optimizer steps")
    right.set_ylabel("busiest expert over the mean")
    other = right.twinx()
    choices = np.maximum([np.sum(row["expert_load"]) for row in rows], 1)
    for key, colour in (("dropped", "#d1603d"), ("overflowed", "#8a2be2")):
        shares = np.asarray([row[key] for row in rows]) / choices
        if shares.any():
            other.plot(steps, shares, color=colour, linewidth=1, label=f"{key}, share of choices")
    crossing = [row.get("expert_crossing_share", 0.0) for row in rows]
    if any(crossing):
        other.plot(steps, crossing, color="#333a42", linewidth=1, linestyle="--", label="tokens sent across domains")
    other.set_ylim(0, 1)
    lines = [*right.get_lines()[:1], *other.get_lines()]
    right.legend(handles=lines, frameon=False, loc="upper right", fontsize=8)
    path, draft = run_dir / "experts.png", run_dir / ".experts.draft.png"
    figure.savefig(draft)
    draft.replace(path)
    return path
