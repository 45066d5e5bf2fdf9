"""A run on chats: its sample and `generate --chat` use the template, end where the model does, say what they hide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxtrain.cli import main

TEMPLATE = "{user: ['<|user|>', '<|turn|>'], assistant: ['<|bot|>', '<|turn|>']}"
CHATS = {"sky": "blue", "sun": "gold", "sea": "deep"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|user|>", "<|bot|>", "<|turn|>")
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    chats = ([{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in CHATS.items())
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "run.yaml").write_text(
        "model: {vocab_size: 264, d_model: 64, n_layers: 1, n_heads: 2, d_ff: 128, max_seq_len: 32}\n"
        f"data: {{sources: [{{jsonl: {folder}/chat.jsonl, messages_field: messages, template: {TEMPLATE}}}],"
        f" tokenizer: {{path: {folder}/tokenizer.json}}, held_out: 0, seq_len: 32, cache: {folder}/cache}}\n"
        "train: {steps: 60, global_batch: 8, sample_prompt: sky, sample_temperature: 0}\n"
        "optimizer: {learning_rate: 1.0e-2, weight_decay: 0, warmup: 5}\n"
        "eval: {every: null}\ncheckpoint: {every: 1000}\nobserve: {tensorboard: false, progress: false}\n"
    )
    assert main(["train", str(folder / "run.yaml"), "--run", str(folder / "run")]) == 0
    return folder / "run"


def test_the_answer_ends_where_the_model_ends_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads((run / "summary.json").read_text())["sample"] == "sky\nblue"
    for question, answer in CHATS.items():
        assert main(["generate", str(run), "--prompt", question, "--chat", "--temperature", "0", "--tokens", "20"]) == 0
        printed = capsys.readouterr()
        assert printed.out == f"{answer}\n" and "ended by the model after 4 tokens, at '<|turn|>'" in printed.err
    # Names of special tokens are text unless they are asked for; without a chat the end of a document ends it.
    plain = ["generate", str(run), "--temperature", "0", "--tokens", "20", "--prompt", "<|user|>sun<|turn|><|bot|>"]
    assert main([*plain, "--special"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "sungold\n" and "at '<|endoftext|>'" in printed.err
    assert "special tokens left out of the text: <|turn|>" in printed.err
    assert main(plain) == 0
    assert capsys.readouterr().out.startswith("<|user|>sun<|turn|><|bot|>")
