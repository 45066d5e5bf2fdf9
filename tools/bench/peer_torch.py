"""Comparison for train_step.py: the same Llama model, batch and optimizer in PyTorch + transformers.

Run it with a Python that has torch and transformers (neither is a dependency of the project):
`python tools/bench/peer_torch.py configs/bench/small.yaml`. Full gradient checkpointing, float32, AdamW.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM


def main(path: str) -> dict[str, object]:
    """Run the steps and return the numbers."""
    started = time.perf_counter()
    with open(path, encoding="utf-8") as file:
        tree = yaml.safe_load(file)
    m = tree["model"]
    sequences, length = tree["train"]["global_batch"], tree["data"]["seq_len"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=m["vocab_size"], hidden_size=m["d_model"], intermediate_size=m["d_ff"],
            num_hidden_layers=m["n_layers"], num_attention_heads=m["n_heads"], num_key_value_heads=m["n_kv_heads"],
            head_dim=m["head_dim"], max_position_embeddings=length, tie_word_embeddings=False, use_cache=False,
        )
    )  # fmt: skip
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = torch.randint(0, m["vocab_size"], (sequences, length))
    seconds = []
    for number in range(26):
        begin = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - begin)
        if number == 0:
            first = time.perf_counter() - started
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_s": round(sequences * length / statistics.median(seconds[6:]), 1),
        "first_step_s": round(first, 2),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
