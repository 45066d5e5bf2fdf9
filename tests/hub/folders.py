"""Hub folders for tests: the reference models, their tensors, and folders written from tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxtrain.hub.family import Family, model_of
from jaxtrain.hub.load import describe_folder
from jaxtrain.nn.model import Model, build

ROOT = Path(__file__).resolve().parents[1] / "data" / "reference"
DENSE = ["llama", "llama3_rope", "mistral", "qwen2", "qwen3", "gpt2"]
MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "gpt_oss_yarn"]


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, as the safetensors library reads it."""
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


def write_folder(folder: Path, config: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Write a folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes((config / "config.json").read_bytes())
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return folder


def opened(folder: Path, **changes: Any) -> tuple[Family, Model, int]:
    """Family, model (with settings changed) and hub vocabulary size of a folder."""
    family, hub, settings = describe_folder(folder)
    return family, build(model_of(settings | changes)), hub["vocab_size"]
