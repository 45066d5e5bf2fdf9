"""What inspect shows is what jax does: shards, bytes, differences, refusals; the notebook runs."""

import io
import json
import math
from pathlib import Path

import jax
import nbformat
import numpy as np
import pytest
from jax.sharding import NamedSharding
from nbclient import NotebookClient
from rich.console import Console

from jaxtrain.config import ConfigError, RunConfig, load_config, replace, validate
from jaxtrain.inspect import inspect
from jaxtrain.mesh.layout import flatten_paths

ROOT = Path(__file__).resolve().parents[1]
TINY = validate({"model": {"n_kv_heads": 2}, "rules": {"preset": ["fsdp", "tensor"]}, "mesh": {"tensor": 4}})
BIG = ["mesh.tensor=8", "mesh.pipe=4", "rules.preset=[tensor, zero1]", "precision.compute=bfloat16"]


def printed(shown, width=200):
    console = Console(width=width, file=io.StringIO())
    shown.print(console)
    return console.file.getvalue()


@pytest.mark.parametrize("overrides", [[], ["rules.preset=[ddp]", "rules.embed=[tensor, data]"]])
def test_shards_are_those_that_jax_makes(overrides):
    """Here with real (simulated) devices: every shard's bounds equal NamedSharding's."""
    one = inspect(replace(TINY, *overrides))
    mesh = one.topology.mesh()
    for path, spec in flatten_paths(one.layout.weights).items():
        shape = flatten_paths(one.params)[path].shape
        indices = NamedSharding(mesh, spec).devices_indices_map(shape)
        wanted = {
            device.id: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
            for device, index in indices.items()
        }
        assert one.shards(path) == wanted


def test_rows_explain_every_dimension():
    rows = {row["path"]: row for row in inspect(TINY).to_json()["parameters"]}
    up = rows["layers/mlp/up/weight"]
    assert up["names"] == ["layers", "embed", "mlp"] and up["shape"] == [4, 256, 768]
    assert up["weights_spec"] == [[], ["data"], ["tensor"]]
    assert up["local_shape"] == [4, 128, 192] and up["bytes"] == 4 * 128 * 192 * 4
    assert [dim["origin"] for dim in up["dimensions"]] == ["base", "preset fsdp", "preset tensor"]
    key = rows["layers/attention/key/weight"]["dimensions"][2]
    assert key["axes"] == [] and key["note"] == "replicated: 2 kv heads on tensor of size 4"


def test_losers_are_named():
    rows = inspect(replace(TINY, "rules.mlp=null")).parameters
    mlp = next(row for row in rows if row["path"] == "layers/mlp/up/weight")["dimensions"][2]
    assert mlp["origin"] == "rules.mlp" and mlp["losers"] == [{"origin": "preset tensor", "axes": ["tensor"]}]


def test_8b_on_64_described_h100():
    """Llama 3 8B: 8,030,261,248 parameters; TP 8, ZeRO-1 over 8 replicas, bf16 with float32 masters."""
    one = inspect(
        load_config("models/llama3_8b", ["mesh.tensor=8", *BIG[2:]]),
        cluster="h100_8x8",
    )
    shown = one.to_json()
    assert json.loads(json.dumps(shown)) == shown
    assert shown["mesh"]["sizes"] == {"data": 8, "pipe": 1, "tensor": 8, "seq": 1, "expert": 1}
    assert shown["crossings"] == {"data": 8, "pipe": 1, "tensor": 1, "seq": 1, "expert": 1}
    assert [node["data"] for node in shown["mesh"]["nodes"]] == [[i] for i in range(8)]
    totals = shown["totals"]
    # tensor shards all but the norms in 8; data shards master parameters and both moments once more.
    norms = (2 * 32 + 1) * 4096
    local = (8_030_261_248 - norms) // 8 + norms
    stored = 8_030_261_248 - norms
    assert totals["parameters"] == 8_030_261_248
    assert totals["weights"] == 2 * local and totals["gradients"] == totals["accumulator"] == 4 * local
    assert totals["masters"] == 4 * (stored // 64 + norms // 8)
    assert totals["optimizer"] == 8 * (stored // 64 + norms // 8) + 4
    assert totals["total"] == sum(totals[part] for part in ("weights", "masters", "gradients", "optimizer"))


def test_totals_are_the_bytes_that_jax_stores():
    config = replace(TINY, "rules.preset=[tensor, zero1]", "precision.compute=bfloat16")
    one = inspect(config)
    mesh = one.topology.mesh()
    for part, itemsize in (("weights", 2), ("masters", 4), ("gradients", 4)):
        specs = flatten_paths(one.layout.parts[part])
        shapes = {path: param.shape for path, param in flatten_paths(one.params).items()}
        shards = [math.prod(NamedSharding(mesh, specs[path]).shard_shape(shape)) for path, shape in shapes.items()]
        assert one.totals[part] == itemsize * sum(shards)


@pytest.mark.parametrize("axis", ["pipe", "seq", "expert"])
def test_every_axis_is_described(axis):
    one = inspect(
        load_config("models/llama3_8b", [f"mesh.{axis}=4", "mesh.tensor=2", "train.global_batch=64"]),
        cluster="h100_8x8",
    )
    assert one.topology.sizes[axis] == 4 and one.topology.sizes["data"] == 8
    text = printed(one)
    assert f"{axis} 4" in text and "64" in text
    assert one.layout.batch_axes == (("data", "expert") if axis == "expert" else ("data",))
    layers = next(row for row in one.parameters if row["path"] == "layers/mlp/up/weight")["weights_spec"][0]
    assert layers == (["pipe"] if axis == "pipe" else [])


def test_print_shows_the_answers():
    text = printed(inspect(load_config("models/llama3_8b", BIG), cluster="h100_8x8"))
    for words in ("h100_8x8: mesh data 2 x pipe 4 x tensor 8", "tensor by preset tensor", "8,030,261,248 parameters",
                  "stays inside", "crosses", "gradients reduced over data once", "optimizer state"):  # fmt: skip
        assert words in text
    assert "pipe (size 1) by base" in printed(inspect(TINY))
    assert "note: layers/attention/key/weight: replicated: 2 kv heads on tensor" in printed(inspect(TINY))
    many = inspect(load_config("models/llama3_8b", ["train.global_batch=1024"]), devices=1024, cluster="h100_8x8")
    assert "112 more nodes" in printed(many) and len(many.to_json()["mesh"]["nodes"]) == 128


def test_diff_shows_what_one_tweak_changes():
    before = inspect(TINY, devices=16)
    difference = before.diff("rules.mlp=null")
    assert difference.settings == [("rules.mlp", "unset", None)]
    changed = [row["path"] for row in difference.parameters]
    assert changed == [f"layers/mlp/{name}/weight" for name in ("down", "gate", "up")]
    row = difference.parameters[2]
    assert row["before"]["weights_spec"] == [[], ["data"], ["tensor"]]
    assert row["after"]["weights_spec"] == [[], ["data"], []]
    assert row["after"]["bytes"] == 4 * row["before"]["bytes"]
    shown = difference.to_json()
    assert json.loads(json.dumps(shown))["settings"] == [["rules.mlp", "unset", None]]
    assert shown["totals"][1]["weights"] > shown["totals"][0]["weights"]
    assert "null by rules.mlp, over preset tensor (tensor)" in printed(difference)
    assert "no parameter's layout changes" in printed(before.diff("train.seed=1"))
    other = before.diff(inspect(replace(TINY, "mesh.tensor=2"), devices=16))
    assert "mesh.tensor: 4 -> 2" in printed(other)
    grown = printed(inspect(TINY, devices=8).diff(inspect(TINY, devices=16)))
    assert "393.22 kB" in grown and "196.61 kB" in grown


def test_diff_shows_optimizer_state_too():
    difference = inspect(replace(TINY, "rules.preset=[tensor]"), devices=8).diff("rules.optimizer=data")
    assert {row["path"] for row in difference.parameters} >= {"embed/tokens", "norm/scale"}
    assert all(row["before"]["weights_spec"] == row["after"]["weights_spec"] for row in difference.parameters)
    totals = difference.to_json()["totals"]
    assert totals[1]["optimizer"] == 4 + (totals[0]["optimizer"] - 4) // 2
    assert "optimizer" in printed(difference)


def test_diff_keeps_the_imagined_machine():
    one = inspect(load_config("models/llama3_8b", ["train.global_batch=144"]), cluster="gb300_nvl72", devices=144)
    after = one.diff("mesh.tensor=8").after
    assert after.topology.devices.size == 144 and after.config.cluster.name == "gb300_nvl72"
    assert after.topology.crossings() == {"data": 2, "pipe": 1, "tensor": 1, "seq": 1, "expert": 1}


def test_what_training_refuses_inspect_refuses():
    with pytest.raises(ConfigError, match="spans"):
        inspect(RunConfig.model_validate({"mesh": {"tensor": 16}}), cluster="h100_8x8")
    with pytest.raises(ConfigError, match="mesh data 3"):
        inspect(replace(TINY, "mesh.data=3"), devices=8)
    with pytest.raises(ConfigError, match=r"cluster 'h100_8x9' is unknown \(did you mean h100_8x8\?\)"):
        inspect(TINY, cluster="h100_8x9")
    with pytest.raises(ConfigError, match=r"train.global_batch 60 is not train.microbatch 1 x 64 replicas"):
        inspect(load_config("llama3_8b", ["train.global_batch=60"]))
    with pytest.raises(ConfigError, match="devices is 0"):
        inspect(TINY, devices=0)
    with pytest.raises(ConfigError, match=r"no parameter 'layers/mlp/up' \(did you mean layers/mlp/up/weight"):
        inspect(TINY).plot_parameter("layers/mlp/up")


def test_assumed_nodes_are_noted():
    assert "nodes of 8 devices are assumed" in inspect(replace(TINY, "train.global_batch=64"), devices=64).notes[0]
    assert not any("assumed" in note for note in inspect(TINY).notes)
    described = inspect(replace(TINY, "cluster.nodes=2", "cluster.devices_per_node=4"))
    assert described.topology.devices.size == 8 and len(described.nodes) == 2


def test_plots_colour_devices_by_shard():
    one = inspect(replace(TINY, "rules.preset=[tensor]"), devices=16)
    cells = one.plot_parameter("layers/mlp/up/weight").axes[0].patches
    assert len(cells) == 16 and len({cell.get_facecolor() for cell in cells}) == 4
    assert len({cell.get_facecolor() for cell in one.plot_mesh().axes[0].patches}) == 4
    figure = one.plot_before_after("layers/mlp/up/weight", "rules.mlp=null")
    assert [len({cell.get_facecolor() for cell in axes.patches}) for axes in figure.axes] == [4, 1]
    figure.canvas.print_figure(Path("/dev/null"), format="png")
    many = inspect(load_config("models/llama3_8b", ["rules.preset=[fsdp]", "train.global_batch=64"]), devices=64)
    assert len({cell.get_facecolor() for cell in many.plot_parameter("norm/scale").axes[0].patches}) == 64


def test_inspect_finds_configurations_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        inspect(load_config("models/llama3_8b", ["train.global_batch=64"]), cluster="a100_8x8").topology.devices.size
        == 64
    )
    (tmp_path / "mine.yaml").write_text("cluster: {name: mine, nodes: 2, devices_per_node: 2}\n")
    assert inspect(TINY.model_copy(update={"mesh": load_config("tiny").mesh}), cluster="mine.yaml").notes == ()


def test_the_notebook_runs():
    notebook = nbformat.read(ROOT / "tools/notebooks/inspect_sharding.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit the notebook without outputs"
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT / "tools/notebooks")}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert not any(output.output_type == "error" for output in outputs)


def test_inspect_needs_no_array():
    before = len(jax.live_arrays())
    inspect(load_config("models/llama3_405b", ["mesh.tensor=8", "rules.preset=[fsdp, tensor]"]), cluster="h100_8x8")
    assert len(jax.live_arrays()) == before
    assert np.isfinite(before)
