"""Import and export of weights: bit-exact, by slices, under any sharding; mismatches are errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import DENSE, MIXTURES, ROOT, opened, tensors_in, write_folder
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import AXES, ConfigError, RulesConfig
from jaxtrain.hub.folder import Folder
from jaxtrain.hub.load import load
from jaxtrain.hub.save import new_folder, save
from jaxtrain.mesh.layout import build_layout
from jaxtrain.mesh.rules import resolve_rules
from jaxtrain.nn.model import Model, build

BIG = 10**12


def shardings_of(model: Model, **rules: Any) -> Any:
    """Shardings over data 2 x tensor 4 by the presets; experts are not sharded."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 1, 4, 1, 1), AXES)
    sizes = dict(zip(AXES, (2, 1, 4, 1, 1), strict=True))
    layout = build_layout(model.params, resolve_rules(RulesConfig(replicated_limit=10**9, **rules)), sizes, False)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), layout.weights)


def unsharded(model: Model) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1, 1), AXES)
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), model.params)


def assert_same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape, name
        assert got[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_round_trip_is_bit_exact(name: str, tmp_path: Path) -> None:
    family, model, vocabulary = opened(ROOT / name)
    params = load(ROOT / name, family, model, vocabulary, unsharded(model))
    counts = save(tmp_path, family, model, params, vocabulary, "float32", BIG)
    want = tensors_in(ROOT / name)
    assert_same_bits(tensors_in(tmp_path), want)
    assert counts == {"tensors": len(want), "files": 1, "bytes": sum(array.nbytes for array in want.values())}


def test_round_trip_with_multi_token_prediction(tmp_path: Path) -> None:
    tensors = tensors_in(ROOT / "deepseek_v3")
    rng = np.random.default_rng(0)
    last = {
        name.replace("layers.2.", "layers.3."): rng.normal(size=array.shape).astype(np.float32)
        for name, array in tensors.items()
        if "layers.2." in name
    }
    for name, shape in (("enorm", (64,)), ("hnorm", (64,)), ("eh_proj", (64, 128)), ("shared_head.norm", (64,))):
        last[f"model.layers.3.{name}.weight"] = rng.normal(size=shape).astype(np.float32)
    last["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    last["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"]
    folder = write_folder(tmp_path / "in", ROOT / "deepseek_v3", tensors | last)
    # Multi-token prediction is used only if the folder has its weights; transformers does not write them.
    family, model, vocabulary = opened(folder)
    assert model.config.mtp == 1 and opened(ROOT / "deepseek_v3")[1].config.mtp == 0
    params = load(folder, family, model, vocabulary, unsharded(model))
    np.testing.assert_array_equal(
        params["mtp"]["project"]["weight"][0], last["model.layers.3.eh_proj.weight"].T
    )  # fmt: skip
    (tmp_path / "out").mkdir()
    save(tmp_path / "out", family, model, params, vocabulary, "float32", BIG)
    assert_same_bits(tensors_in(tmp_path / "out"), tensors | last)
    last["model.layers.3.embed_tokens.weight"] = tensors["lm_head.weight"]
    write_folder(folder, ROOT / "deepseek_v3", tensors | last)
    with pytest.raises(ConfigError, match=r"layers\.3\.embed_tokens\.weight must equal model\.embed_tokens\.weight"):
        load(folder, family, model, vocabulary, unsharded(model))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("preset", [["fsdp", "tensor"], ["tensor"]])
def test_each_shard_is_read_once(name: str, preset: list[str], monkeypatch: Any, tmp_path: Path) -> None:
    family, model, vocabulary = opened(ROOT / name)
    tensors = tensors_in(ROOT / name)
    shardings = shardings_of(model, preset=preset, allow=["indivisible:*"])
    reads: list[tuple[str, int]] = []
    original = Folder.read

    def counted(self: Folder, tensor: str, slices: tuple[slice, ...]) -> np.ndarray:
        block = original(self, tensor, slices)
        reads.append((tensor, block.size))
        return block

    monkeypatch.setattr(Folder, "read", counted)
    params = load(ROOT / name, family, model, vocabulary, shardings)
    total = sum(array.size for array in tensors.values())
    # Replicas are not read again, and no read is larger than the largest shard of a tensor.
    assert sum(size for _, size in reads) == total
    largest = max(
        int(np.prod(sharding.shard_shape(param.shape))) // (param.shape[0] if param.names[0] == "layers" else 1)
        for param, sharding in zip(jax.tree.leaves(model.params), jax.tree.leaves(shardings), strict=True)
    )
    assert max(size for _, size in reads) <= largest < max(array.size for array in tensors.values())
    monkeypatch.undo()
    for got, want in zip(
        jax.tree.leaves(params),
        jax.tree.leaves(load(ROOT / name, family, model, vocabulary, unsharded(model))),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    save(tmp_path, family, model, params, vocabulary, "float32", BIG)
    assert_same_bits(tensors_in(tmp_path), tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_exported_tensors_have_the_dtype(dtype: Any, tmp_path: Path) -> None:
    family, model, vocabulary = opened(ROOT / "llama")
    params = load(ROOT / "llama", family, model, vocabulary, unsharded(model))
    save(tmp_path, family, model, params, vocabulary, dtype, BIG)
    got, want = tensors_in(tmp_path), tensors_in(ROOT / "llama")
    with Folder(tmp_path, family.base) as folder:
        assert set(folder.dtypes.values()) == {{"bfloat16": "BF16", "float16": "F16"}[dtype]}
    for name, array in want.items():
        # JAX rounds to nearest independently of NumPy's cast.
        np.testing.assert_array_equal(got[name].astype(np.float32), jnp.asarray(array).astype(dtype).astype(np.float32))
    # 16-bit weights round-trip unchanged.
    write_folder(tmp_path / "in", ROOT / "llama", got)
    (tmp_path / "again").mkdir()
    again = load(tmp_path / "in", family, model, vocabulary, unsharded(model))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(again)} == {"float32"}
    save(tmp_path / "again", family, model, again, vocabulary, dtype, BIG)
    assert_same_bits(tensors_in(tmp_path / "again"), got)


def test_values_that_overflow_float16_are_an_error(tmp_path: Path) -> None:
    family, model, vocabulary = opened(ROOT / "llama")
    params = load(ROOT / "llama", family, model, vocabulary, unsharded(model))
    params["norm"]["scale"] = params["norm"]["scale"].at[3].set(70_000.0)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has values up to 70000, which overflow float16"):
        save(tmp_path, family, model, params, vocabulary, "float16", BIG)


def test_sharded_files_and_their_index(tmp_path: Path) -> None:
    family, model, vocabulary = opened(ROOT / "llama")
    params = load(ROOT / "llama", family, model, vocabulary, unsharded(model))
    counts = save(tmp_path, family, model, params, vocabulary, "float32", 100_000)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) == counts["files"] > 3
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    want = tensors_in(ROOT / "llama")
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in want.values())
    assert index["weight_map"].keys() == want.keys()
    for file in files:
        assert file.stat().st_size < 100_000 + 4096
    assert_same_bits(tensors_in(tmp_path), want)
    (tmp_path / "config.json").write_bytes((ROOT / "llama" / "config.json").read_bytes())
    again = load(tmp_path, family, model, vocabulary, unsharded(model))
    np.testing.assert_array_equal(again["head"]["weight"], params["head"]["weight"])
    files[0].unlink()
    with pytest.raises(ConfigError, match=f"names {files[0].name}, which are missing"):
        Folder(tmp_path, family.base)


@pytest.mark.parametrize("name", ["llama", "llama3_rope"])
@pytest.mark.parametrize("rows", [193, 200, 256])
def test_padded_rows_are_zero_and_not_exported(name: str, rows: int, tmp_path: Path) -> None:
    family, unpadded, vocabulary = opened(ROOT / name)
    model = build(unpadded.config.model_copy(update={"vocab_size": rows}))
    sharded = shardings_of(model, preset=["tensor"], allow=["indivisible:*"])
    params = load(ROOT / name, family, model, vocabulary, sharded)
    assert params["embed"]["tokens"].shape == (rows, 64)
    assert not np.asarray(params["embed"]["tokens"])[vocabulary:].any()
    # Training may change the padded rows.
    params["embed"]["tokens"] = params["embed"]["tokens"].at[vocabulary:].set(jnp.nan)
    if "head" in params:
        params["head"]["weight"] = params["head"]["weight"].at[:, vocabulary:].set(jnp.nan)
    params = jax.device_put(params, sharded)
    save(tmp_path, family, model, params, vocabulary, "float32", BIG)
    assert_same_bits(tensors_in(tmp_path), tensors_in(ROOT / name))


def test_a_smaller_vocabulary_is_an_error() -> None:
    family, unpadded, vocabulary = opened(ROOT / "llama")
    model = build(unpadded.config.model_copy(update={"vocab_size": 191}))
    with pytest.raises(ConfigError, match=r"model\.vocab_size 191 is less than the 192 rows"):
        load(ROOT / "llama", family, model, vocabulary, unsharded(model))


def test_a_tied_head_may_be_stored_if_it_is_a_copy(tmp_path: Path) -> None:
    tensors = tensors_in(ROOT / "llama3_rope")
    folder = write_folder(
        tmp_path, ROOT / "llama3_rope", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    )
    family, model, vocabulary = opened(folder)
    params = load(folder, family, model, vocabulary, unsharded(model))
    assert "head" not in params
    other = tensors["model.embed_tokens.weight"].copy()
    other[191, 63] += 1e-6
    write_folder(folder, ROOT / "llama3_rope", tensors | {"lm_head.weight": other})
    with pytest.raises(ConfigError, match=r"lm_head\.weight must equal model\.embed_tokens\.weight"):
        load(folder, family, model, vocabulary, unsharded(model))


def test_files_without_the_prefix_and_with_buffers(tmp_path: Path) -> None:
    """Published GPT-2 has no prefix, and stores causal masks."""
    tensors = {name.removeprefix("transformer."): array for name, array in tensors_in(ROOT / "gpt2").items()}
    tensors |= {f"h.{i}.attn.bias": np.tril(np.ones((1, 1, 8, 8), np.float32)) for i in range(3)}
    folder = write_folder(tmp_path, ROOT / "gpt2", tensors)
    family, model, vocabulary = opened(folder)
    got = load(folder, family, model, vocabulary, unsharded(model))
    want = load(ROOT / "gpt2", family, model, vocabulary, unsharded(model))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_damaged_and_quantized_files_are_named(tmp_path: Path) -> None:
    tensors = tensors_in(ROOT / "llama")
    folder = write_folder(tmp_path, ROOT / "llama", tensors)
    family, model, vocabulary = opened(folder)
    quantized = tensors | {"model.norm.weight": np.ones(64, np.int8)}
    write_folder(folder, ROOT / "llama", quantized)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight holds I8"):
        load(folder, family, model, vocabulary, unsharded(model))
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable safetensors file"):
        load(folder, family, model, vocabulary, unsharded(model))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load(folder, family, model, vocabulary, unsharded(model))


def test_a_folder_is_complete_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def write(fail: bool) -> None:
        with new_folder(target) as temporary:
            (temporary / "a").write_text("a")
            assert not target.exists()
            if fail:
                raise ConfigError("stop")

    with pytest.raises(ConfigError, match="stop"):
        write(fail=True)
    assert list(tmp_path.iterdir()) == []
    write(fail=False)
    assert [path.name for path in target.iterdir()] == ["a"] and list(tmp_path.iterdir()) == [target]
    with pytest.raises(ConfigError, match="exists already"):
        write(fail=False)


def test_two_sets_of_weights_are_never_guessed_at(tmp_path: Path, capsys: Any) -> None:
    tensors = tensors_in(ROOT / "llama")
    folder = write_folder(tmp_path, ROOT / "llama", tensors)
    family = opened(folder)[0]
    (folder / "pytorch_model.bin").write_bytes(b"old")
    shutil.copyfile(folder / "model.safetensors", folder / "consolidated.safetensors")
    with Folder(folder, family.base) as opened_folder:
        assert opened_folder.shapes.keys() == tensors.keys()
    said = capsys.readouterr().err
    assert "reads model.safetensors, not consolidated.safetensors, pytorch_model.bin" in said

    shard, index = folder / "model-00001-of-00001.safetensors", folder / "model.safetensors.index.json"
    shutil.copyfile(folder / "model.safetensors", shard)
    with pytest.raises(ConfigError, match=r"two sets of weights: model\.safetensors and model-00001-of-00001"):
        Folder(folder, family.base)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard.name)}))
    with pytest.raises(ConfigError, match=r"two sets of weights: model\.safetensors\.index\.json .*model\.safe"):
        Folder(folder, family.base)
    (folder / "model.safetensors").unlink()
    Folder(folder, family.base).__exit__(None, None, None)
    shutil.copyfile(shard, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ConfigError, match=r"two sets of weights: .*model-00001-of-00002"):
        Folder(folder, family.base)
    index.write_text(json.dumps({"weight_map": {"a": shard.name, "b": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ConfigError, match=r"is in model-00001-of-00002\.safetensors and in another file"):
        Folder(folder, family.base)


@pytest.mark.parametrize(
    ("index", "needle"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "names no file"),
        ({"weight_map": {"a": "../a.safetensors"}}, "is not a file of this folder"),
        ({"weight_map": {"a": "model-1.safetensors"}}, "names model-1.safetensors, which are missing"),
        ({"weight_map": {"a": "model-0.safetensors"}}, "names a, which no file holds"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_named(index: Any, needle: str, tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "llama" / "model.safetensors", tmp_path / "model-0.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=needle):
        Folder(tmp_path, "model.")


def test_truncated_files_and_scales_are_named(tmp_path: Path) -> None:
    tensors = tensors_in(ROOT / "llama")
    folder = write_folder(tmp_path, ROOT / "llama", tensors)
    whole = (folder / "model.safetensors").read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable safetensors file"):
            Folder(folder, "model.")
    scale = {"model.layers.0.mlp.up_proj.weight_scale_inv": np.ones((1, 1), np.float32)}
    write_folder(folder, ROOT / "llama", tensors | scale)
    with pytest.raises(ConfigError, match=r"weight_scale_inv scales quantized weights"):
        Folder(folder, "model.")
