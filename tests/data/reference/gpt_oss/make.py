"""Writes the files beside it: a small random gpt-oss of transformers, its forward pass, loss, gradient and training.

Run with PyTorch 2.13 and transformers 5.24 on a CPU, which the tests themselves do not need: python make.py
Rotary positions are plain. Weights are large enough for the clipping of the nonlinearity to act. Decay is on matrices
(the biases of experts, which have two dimensions here, are none), clipping is by clip / norm.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import GptOssConfig, GptOssForCausalLM

HERE = Path(__file__).resolve().parent
VOCAB, ROWS, LENGTH, STEPS, MICROBATCHES = 192, 8, 48, 12, 4
TRAIN = {
    "lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0, "microbatches": MICROBATCHES,
    "steps": STEPS, "weight_decay_on": "matrices",
}  # fmt: skip


def batch(rng):
    inputs = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    labels = inputs.copy()
    for row in range(ROWS):
        labels[row, : rng.integers(0, LENGTH // 2)] = -100
    return inputs, labels


def loss_of(model, inputs, labels):
    """Sum of the loss over the scored tokens of the whole batch divided by their number, in microbatches of rows."""
    scored = int((labels[:, 1:] != -100).sum())
    total = 0.0
    for ids, wanted in zip(np.split(inputs, MICROBATCHES), np.split(labels, MICROBATCHES), strict=True):
        logits = model(torch.tensor(ids, dtype=torch.long)).logits
        wanted = torch.tensor(wanted[:, 1:], dtype=torch.long)
        part = cross_entropy(logits[:, :-1].reshape(-1, VOCAB), wanted.reshape(-1), reduction="sum") / scored
        part.backward()
        total += part.item()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters())).item()
    return total, norm


def main():
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=256, rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        attn_implementation="eager", experts_implementation="eager", use_cache=False,
    )  # fmt: skip
    model = GptOssForCausalLM(config).float().train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.4 if "gate_up" in name else 1.0 if "sinks" in name else 0.1)
            if "norm" in name:
                p.add_(1.0)
    tensors = {name: p.detach().clone().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, HERE / "model.safetensors")
    config.save_pretrained(HERE)

    rng = np.random.default_rng(0)
    inputs, labels = batch(rng)
    with torch.no_grad():
        logits = model(torch.tensor(inputs, dtype=torch.long)).logits.numpy()
    loss, norm = loss_of(model, inputs, labels)
    model.zero_grad()

    matrices = [p for name, p in model.named_parameters() if p.ndim >= 2 and "bias" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "bias" in name]
    groups = [{"params": matrices, "weight_decay": TRAIN["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=TRAIN["lr"], betas=tuple(TRAIN["betas"]), eps=TRAIN["eps"])
    batches = [batch(rng) for _ in range(STEPS)]
    losses, norms = [], []
    for ids, wanted in batches:
        optimizer.zero_grad()
        value, size = loss_of(model, ids, wanted)
        for p in model.parameters():
            p.grad.mul_(min(1.0, TRAIN["clip"] / size))
        optimizer.step()
        losses.append(value)
        norms.append(size)
    np.savez_compressed(
        HERE / "reference.npz", input_ids=inputs, labels=labels, logits=logits.astype(np.float32),
        train_inputs=np.stack([ids for ids, _ in batches]), train_labels=np.stack([w for _, w in batches]),
        train_loss=np.array(losses), train_grad_norm=np.array(norms),
    )  # fmt: skip
    numbers = {
        "family": "gpt_oss", "loss": loss, "grad_norm": norm,
        "parameters": sum(p.numel() for p in model.parameters()), "train": TRAIN,
        "label_shift": "logits[:, :-1] against labels[:, 1:]; -100 is not scored",
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    (HERE / "reference.json").write_text(json.dumps(numbers, indent=1))
    print(numbers, losses, norms, {name: tuple(t.shape) for name, t in tensors.items()})


if __name__ == "__main__":
    main()
