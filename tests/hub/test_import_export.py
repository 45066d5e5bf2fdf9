"""import-hf and export-hf: the imported run trains, evaluates and generates; the exported folder has its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from folders import ROOT, tensors_in
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.cli import main, split_overrides
from jaxtrain.config import ConfigError
from jaxtrain.hub.runs import import_run
from jaxtrain.train.reading import open_run, run_config

WORDS = [f"word{i}" for i in range(150)]


def make_tokenizer(path: Path, words: int = 150) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {word: 3 + i for i, word in enumerate(WORDS[:words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for i in range(30):
        (folder / f"{i}.txt").write_text(" ".join(rng.choice(WORDS, 60)))
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "llama"
    shutil.copytree(ROOT / "llama", folder)
    make_tokenizer(folder / "tokenizer.json")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.6}')
    return folder


def overrides(text: Path, cache: Path) -> list[str]:
    source = json.dumps([{"text": str(text), "include": ["*.txt"]}])
    return [
        "--data.sources", source, "--data.seq_len", "32", "--data.held_out=0.2", f"--data.cache={cache}",
        "--train.global_batch", "8", "--train.steps", "2", "--train.sample_prompt=", "--eval.every", "null",
        "--observe.tensorboard=false", "--observe.progress=false", "--optimizer.learning_rate", "1e-3",
        "--mesh.data=2", "--mesh.tensor=4", "--rules.preset=[fsdp,tensor]", "--rules.allow=['indivisible:*']",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def imported(hub: Path, text: Path, tmp_path_factory: Any) -> Path:
    """A run of the folder with a padded vocabulary, at step 0."""
    run = tmp_path_factory.mktemp("runs") / "imported"
    rest = overrides(text, run.parent / "cache")
    assert main(["import-hf", str(hub), str(run), "--json", "--model.vocab_size", "256", *rest]) == 0
    return run


def test_exporting_an_import_gives_the_same_bits(imported: Path, hub: Path, tmp_path: Path) -> None:
    assert main(["export-hf", str(imported), str(tmp_path / "out")]) == 0
    got, want = tensors_in(tmp_path / "out"), tensors_in(hub)
    assert got.keys() == want.keys()
    assert all(got[name].tobytes() == want[name].tobytes() for name in want)
    assert run_config(imported).model.unpadded_vocab_size == 192
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (hub, tmp_path / "out"))
    for key in ("model_type", "architectures", "vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "dtype"):
        assert after[key] == before[key], key
    for name in ("tokenizer.json", "generation_config.json"):
        before, after = (json.loads((folder / name).read_text()) for folder in (hub, tmp_path / "out"))
        # Training opened documents with <s>; now the tokenizer does.
        opening = after.pop("post_processor", None)
        assert after == {key: value for key, value in before.items() if key != "post_processor"}
        assert name != "tokenizer.json" or opening["single"][0] == {"SpecialToken": {"id": "<s>", "type_id": 0}}
    tokens = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (tokens["bos_token"], tokens["eos_token"]) == ("<s>", "</s>")


def test_training_starts_from_the_weights_with_a_new_optimizer_state(
    imported: Path, hub: Path, tmp_path: Path, capsys: Any
) -> None:
    run = shutil.copytree(imported, tmp_path / "run")
    opened = open_run(run)
    assert opened.step == 0
    rows = tensors_in(hub)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(opened.params["embed"]["tokens"])[:192], rows)
    state = CheckpointOrder(opened.setup).state_from_params(opened.params)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(state["opt"]) if leaf.ndim)
    capsys.readouterr()
    assert main(["eval", str(run), "--json"]) == 0
    at_import = json.loads(capsys.readouterr().out)
    assert at_import["step"] == 0
    assert main(["generate", str(run), "--prompt", "word1 word2", "--tokens", "5"]) == 0
    assert "word1 word2" in capsys.readouterr().out
    assert main(["train", str(run / "config.yaml"), "--run", str(run), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["updates"], summary["resumed_from"]) == (2, 0)
    assert main(["export-hf", str(run), str(tmp_path / "out"), "--dtype", "bfloat16", "--max-shard-gb", "1e-4"]) == 0
    trained = tensors_in(tmp_path / "out")
    assert trained.keys() == tensors_in(hub).keys()
    assert trained["model.embed_tokens.weight"].shape == (192, 64)
    change = np.abs(trained["model.norm.weight"].astype(np.float32) - tensors_in(hub)["model.norm.weight"])
    assert 0 < change.max() < 0.02
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


def test_a_new_run_is_exported_by_the_first_family_that_can_express_it(text: Path, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "run.yaml").write_text(
        "model: {vocab_size: 160, d_model: 32, n_layers: 2, n_heads: 4, d_ff: 48, max_seq_len: 64, norm: layernorm,"
        " activation: relu2, positions: learned, qkv_bias: true, out_bias: true, mlp_bias: true, tied_head: true}\n"
        f"data: {{tokenizer: {{path: {tmp_path / 'tokenizer.json'}}}}}\n"
    )
    rest = overrides(text, tmp_path / "cache")
    run, out = str(tmp_path / "run"), tmp_path / "out"
    assert main(["train", str(tmp_path / "run.yaml"), "--run", run, "--json", *rest]) == 0
    assert main(["export-hf", run, str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["activation_function"], config["vocab_size"]) == ("gpt2", "relu2", 160)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    # Import the folder again into a run with a padded vocabulary.
    again = tmp_path / "again"
    assert main(["import-hf", str(out), str(again), "--model.vocab_size=192", *rest]) == 0
    first, second = open_run(Path(run)), open_run(again)
    np.testing.assert_array_equal(
        np.asarray(first.params["layers"]["attention"]["key"]["weight"]),
        np.asarray(second.params["layers"]["attention"]["key"]["weight"]),
    )


BESIDE = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
# File, content and message: files that are read, and files that are only copied for later.
SPOILED = [
    *((name, content, f"{name} is not readable JSON") for name in BESIDE for content in ("", '{"eos_token": "</')),
    *((name, '["eos_token"]', f"{name} holds a JSON list, not an object") for name in (*BESIDE, "config.json")),
    ("config.json", "", "config.json is not readable JSON"),
    ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id is '2', not a token id"),
    ("generation_config.json", '{"eos_token_id": [2, true]}', "eos_token_id is [2, True], not a token id"),
    ("config.json", 400, "config.json: eos_token_id is 400, which is no id of the tokenizer"),
    ("tokenizer_config.json", '{"eos_token": 2}', "tokenizer_config.json: eos_token is 2, not a token's text"),
    ("tokenizer_config.json", Path("gone"), "tokenizer_config.json is a link to a file that does not exist"),
    ("tokenizer.json", Path("gone"), "tokenizer.json is empty or not readable"),
    ("tokenizer.model", "", "tokenizer.model is empty or not readable"),
    ("chat_template.jinja", "\n", "chat_template.jinja is empty or not readable"),
]  # fmt: skip


def write_spoiled(path: Path, content: Any) -> None:
    """Text, a link to nothing, or config.json with another end."""
    if isinstance(content, int):
        content = json.dumps(json.loads(path.read_text()) | {"eos_token_id": content})
    path.unlink(missing_ok=True)
    path.write_text(content) if isinstance(content, str) else path.symlink_to(content)


@pytest.mark.parametrize(
    ("spoil", "needle"),
    [
        (lambda hub: (hub / "tokenizer.json").unlink(), "neither tokenizer.json nor tokenizer.model"),
        (lambda hub: make_big_tokenizer(hub / "tokenizer.json"), "has token ids up to 202, beyond"),
        (lambda hub: (hub / "model.safetensors").unlink(), "has neither model.safetensors"),
        (lambda hub: (hub / "config.json").write_text("{"), "config.json is not readable JSON"),
        (lambda hub: (hub / "config.json").unlink(), "config.json is not readable JSON"),
        (lambda hub: (hub / "model.safetensors").write_bytes(b""), "is not a readable safetensors file"),
        (lambda hub: (hub / "tokenizer.json").write_bytes(b""), "tokenizer.json"),
        (lambda hub: (hub / "tokenizer.json").write_text((hub / "tokenizer.json").read_text()[:90]), "tokenizer.json"),
        (lambda hub: shutil.copyfile(hub / "config.json", hub / "tokenizer.json"), "tokenizer.json"),
        (lambda hub: shutil.copyfile(ROOT / "gpt2/model.safetensors", hub / "model.safetensors"), "do not match llama"),
        (lambda hub: (hub / "config.json").write_text('{"model_type": "mamba"}'), "'mamba' has no table"),
        *((lambda hub, row=row: write_spoiled(hub / row[0], row[1]), row[2]) for row in SPOILED),
    ],
)
def test_a_failed_import_leaves_no_run(
    spoil: Any, needle: str, hub: Path, text: Path, tmp_path: Path, capsys: Any
) -> None:
    folder = shutil.copytree(hub, tmp_path / "hub")
    spoil(folder)
    run = tmp_path / "run"
    rest = overrides(text, tmp_path / "cache")
    assert main(["import-hf", str(folder), str(run), "--model.vocab_size=256", *rest]) == 2
    assert needle in capsys.readouterr().err
    assert not run.exists()


def make_big_tokenizer(path: Path) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": 3 + i for i in range(200)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).save(str(path))


def test_existing_directories_are_not_changed(imported: Path, hub: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["import-hf", str(hub), str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["export-hf", str(imported), str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_export_names_the_family_that_cannot_express_the_model(imported: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["export-hf", str(imported), str(tmp_path / "out"), "--family", "gpt2"]) == 2
    assert "the hub's gpt2 cannot express this model" in capsys.readouterr().err
    assert main(["export-hf", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "is not a run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_settings_that_do_not_match_the_weights_are_named(hub: Path, text: Path, tmp_path: Path) -> None:
    _, changed = split_overrides([*overrides(text, tmp_path / "cache"), "--model.d_ff=96"])
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj\.weight has shape \[128, 64\], parameter layers/mlp/gate"):
        import_run(hub, tmp_path / "run", None, changed)
