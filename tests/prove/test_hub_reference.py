"""verify --reference: models of transformers give PyTorch's numbers under every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import DENSE, MIXTURES, ROOT, tensors_in, write_folder

from jaxtrain.cli import main
from jaxtrain.config import ConfigError
from jaxtrain.prove.reference import ReferenceResult, batch_of, check_reference

LAYOUTS = {
    "one device": [],
    "seq=2": ["mesh.seq=2"],
    "tensor=2 x data=2, fsdp": ["mesh.data=2", "mesh.tensor=2", "rules.preset=[fsdp,tensor_sequence]"],
    "data=4, zero2": ["mesh.data=4", "rules.preset=[zero2]"],
    "pipe=2": ["mesh.pipe=2"],
    "pipe=2 x tensor=2, zero bubble": [
        "mesh.pipe=2", "mesh.tensor=2", "rules.preset=[zero1,tensor_sequence]", "pipeline.schedule=zero_bubble",
    ],
}  # fmt: skip
# The quick tests cover every family and every kind of layout, `make prove` every pair.
QUICK = [
    ("llama", "tensor=2 x data=2, fsdp"), ("llama3_rope", "one device"), ("mistral", "one device"),
    ("qwen2", "data=4, zero2"), ("qwen3", "seq=2"), ("gpt2", "data=4, zero2"),
    ("llama3_rope", "pipe=2"),
]  # fmt: skip
EXPERTS = {
    "one device": [],
    "expert=2 x tensor=2 x data=2": ["mesh.data=2", "mesh.tensor=2", "mesh.expert=2", "rules.preset=[tensor_sequence]"],
    "expert=4, fsdp": ["mesh.data=2", "mesh.expert=4", "rules.preset=[fsdp]", "train.microbatch=1"],
    "seq=2 x expert=2": ["mesh.data=2", "mesh.seq=2", "mesh.expert=2"],
    "pipe=2": ["mesh.pipe=2"],
    "pipe=2 x expert=2, zero bubble": ["mesh.pipe=2", "mesh.expert=2", "pipeline.schedule=zero_bubble"],
}
QUICK_EXPERTS = [
    ("mixtral", "expert=4, fsdp"), ("deepseek_v3", "expert=2 x tensor=2 x data=2"),
    ("mixtral", "pipe=2"),
]  # fmt: skip
REST_EXPERTS = [(family, layout) for family in MIXTURES for layout in EXPERTS if (family, layout) not in QUICK_EXPERTS]
REST = [(family, layout) for family in DENSE for layout in LAYOUTS if (family, layout) not in QUICK]


@pytest.mark.parametrize(
    ("family", "layout"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.prove) for case in REST)]
)
def test_equals_pytorch(family: str, layout: str) -> None:
    result = check_reference(ROOT / family, LAYOUTS[layout])
    assert result.passed, result.to_json()
    names = ["parameters", "logits", "loss", "gradient norm", "losses of steps", "gradient norms of steps"]
    assert [row.name for row in result.rows] == names
    tolerances = {row.name: row.tolerance for row in result.rows}
    # From the README of the reference models.
    assert (tolerances["logits"], tolerances["loss"], tolerances["gradient norm"]) == (5e-6, 2e-6, 5e-6)
    assert tolerances["losses of steps"] == 1e-5


@pytest.mark.parametrize(
    ("family", "layout"), [*QUICK_EXPERTS, *(pytest.param(*case, marks=pytest.mark.prove) for case in REST_EXPERTS)]
)
def test_mixtures_equal_pytorch(family: str, layout: str) -> None:
    result = check_reference(ROOT / family, EXPERTS[layout])
    assert result.passed, result.to_json()


def check_changed(folder: Path, family: str, **changes: Any) -> ReferenceResult:
    """Check a copy of a reference folder with tensors, JSON files or arrays changed."""
    shutil.copytree(ROOT / family, folder)
    for name, change in changes.items():
        if name == "tensors":
            write_folder(folder, folder, change(tensors_in(ROOT / family)))
        elif name == "arrays":
            np.savez(folder / "reference.npz", **change(dict(np.load(ROOT / family / "reference.npz"))))
        else:
            path = folder / f"{name}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return check_reference(folder)


def failing(result: ReferenceResult) -> set[str]:
    assert not result.passed
    return {row.name for row in result.rows if not row.passed}


def test_exchanged_weights_fail(tmp_path: Path) -> None:
    """Gate and up have the same shape, so that only the numbers differ."""

    def exchange(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
        return tensors | {gate: tensors[up], up: tensors[gate]}

    assert {"logits", "loss", "losses of steps"} <= failing(check_changed(tmp_path / "a", "llama", tensors=exchange))


def test_another_optimizer_fails(tmp_path: Path) -> None:
    train = json.loads((ROOT / "llama" / "reference.json").read_text())["train"]
    # Weight decay changes the training curve only.
    result = check_changed(tmp_path / "a", "llama", reference={"train": train | {"weight_decay": 0.0}})
    assert failing(result) == {"losses of steps", "gradient norms of steps"}


def test_one_altered_number_fails_and_is_located(tmp_path: Path) -> None:
    def alter(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays["logits"][5, 7, 11] += 1e-3
        arrays["train_loss"][4] *= 1 + 2e-5
        return arrays

    result = check_changed(tmp_path / "a", "llama", arrays=alter)
    assert failing(result) == {"logits", "losses of steps"}
    locations = {row.name: row.where for row in result.rows}
    assert locations["logits"] == "sequence 5, position 7, entry 11"
    assert locations["losses of steps"] == "step 5 of 12"


def test_the_exit_status_is_the_verdict(tmp_path: Path, capsys: Any) -> None:
    assert main(["verify", "--reference", str(ROOT / "llama"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    shutil.copytree(ROOT / "llama", tmp_path / "a")
    numbers = json.loads((ROOT / "llama" / "reference.json").read_text())
    (tmp_path / "a" / "reference.json").write_text(json.dumps(numbers | {"loss": 5.5, "parameters": 1}))
    assert main(["verify", "--reference", str(tmp_path / "a")]) == 1
    captured = capsys.readouterr()
    assert "NO" in captured.out
    assert "jaxtrain: loss: relative error" in captured.err and "jaxtrain: parameters: relative error" in captured.err


def test_not_a_number_fails(tmp_path: Path) -> None:
    def alter(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays["train_loss"][4] = np.nan
        return arrays

    assert failing(check_changed(tmp_path / "a", "llama", arrays=alter)) == {"losses of steps"}


def test_labels_are_shifted_to_the_next_token() -> None:
    """The label of t + 1 is at t, -100 is not scored, and the last position has no target."""
    batch = batch_of(np.array([[7, 8, 9, 10]], np.int32), np.array([[-100, 8, -100, 10]], np.int32))
    assert batch["labels"].tolist() == [[8, -1, 10, -1]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3]] and batch["segments"].tolist() == [[1, 1, 1, 1]]


def test_a_folder_without_reference_numbers_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "llama", tmp_path / "a")
    (tmp_path / "a" / "reference.npz").unlink()
    with pytest.raises(ConfigError, match=r"reference\.npz is not a readable npz file"):
        check_reference(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"mesh"):
        check_reference(ROOT / "llama", ["mesh.data=64"])
