"""Measure the data pipeline alone: `data.py [--seconds 1] [--gb 2]`; prints one JSON object.

packers      fill rate at 4,096 on log-normal document lengths of mean 669, and tokens/s of a core
sources      tokens/s of a core of every kind of source with every packer, tokenisation cached, and its seconds
start_up     seconds to the first batch of a 1 GB token file, first and second start; and to restore 64 shards
memory       resident memory while one epoch of a token file of `--gb` GB is read

A core is CPU time of this process, all threads counted. Documents are drawn at random; text is random words.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jaxtrain.config import RunConfig, validate
from jaxtrain.data import Stream, open_stream, prepare
from jaxtrain.data.packing import PACKERS

LENGTH, SEQUENCES, MEAN, VOCAB, EOS = 4096, 64, 669, 4096, 1
WORDS = 2000


def main(argv: list[str]) -> dict[str, Any]:
    """Run every measurement and return the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU seconds of each measurement")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS), help="what to measure")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the token file of the memory measurement")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench-data-") as name:
        folder = Path(name)
        tokenizer = write_tokenizer(folder)
        return {part: PARTS[part](folder, tokenizer, arguments) for part in arguments.only}


def packers(folder: Path, tokenizer: Path, seconds: float) -> dict[str, Any]:
    """Fill over one epoch of 40 M tokens, and speed."""
    write_tokens(folder / "packers.bin", 40_000_000)
    return {
        packing: {
            "fill": round(one_epoch(config_of(folder, tokenizer, packing, tokens=folder / "packers.bin")), 4),
            **speed(config_of(folder, tokenizer, packing, tokens=folder / "packers.bin"), seconds),
        }
        for packing in PACKERS
    }


def sources(folder: Path, tokenizer: Path, seconds: float) -> dict[str, Any]:
    """Speed of each kind of source with each packer."""
    found: dict[str, Any] = {}
    for kind, write in WRITERS.items():
        path = write(folder)
        key, more = ("tokens", {}) if kind.startswith("tokens") else (kind, {"field": "text"})
        more = {} if kind == "text" else more
        begin = time.perf_counter()
        configs = {packing: config_of(folder, tokenizer, packing, **{key: path}, **more) for packing in PACKERS}
        prepare(configs["first_fit"])
        found[kind] = {"first_prepare_s": round(time.perf_counter() - begin, 2)}
        found[kind] |= {packing: speed(config, seconds) for packing, config in configs.items()}
    return found


def start_up(folder: Path, tokenizer: Path) -> dict[str, float]:
    """Seconds to the first batch of a 1 GB token file with index and of a flat one, first and second start."""
    times: dict[str, float] = {}
    for kind, name in (("indexed", "start.bin"), ("flat", "flat_start.bin")):
        write_tokens(folder / name, 500_000_000, index=kind == "indexed")
        config = config_of(folder, tokenizer, "first_fit", tokens=folder / name)
        for start in ("first", "second"):
            begin = time.perf_counter()
            with streaming(config) as stream:
                next(stream)
            times[f"{kind}_{start}_s"] = round(time.perf_counter() - begin, 2)
        with streaming(config) as stream:
            for _ in range(5):
                next(stream)
            state, begin = stream.get_state(), time.perf_counter()
            stream.set_state(state)
            next(stream)
            times[f"{kind}_resume_s"] = round(time.perf_counter() - begin, 2)
        (folder / name).unlink()
    return times


def memory(folder: Path, tokenizer: Path, gb: float) -> dict[str, Any]:
    """Resident MB of a fresh process, anonymous and of mapped files, at tenths of an epoch."""
    tokens = int(gb * 1e9 / 2)
    write_tokens(folder / "memory.bin", tokens)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(watch_memory, folder, tokenizer, tokens).result()


def watch_memory(folder: Path, tokenizer: Path, tokens: int) -> dict[str, Any]:
    """Read one epoch and measure this process' memory."""
    seen: list[dict[str, int]] = []
    with streaming(config_of(folder, tokenizer, "first_fit", tokens=folder / "memory.bin")) as stream:
        steps = tokens // (LENGTH * SEQUENCES)
        for step in range(steps):
            if step % (steps // 10) == 1:
                seen.append(resident())
            next(stream)
        seen.append(resident())
    return {
        "gb_read": round(steps * LENGTH * SEQUENCES * 2 / 1e9, 2),
        "resident_mb": [each["RssAnon"] + each["RssFile"] for each in seen],
        "anonymous_mb": [each["RssAnon"] for each in seen],
    }


def resident() -> dict[str, int]:
    """MB of this process by kind (Linux)."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Rss"))
    return {words[0].rstrip(":"): int(words[1]) // 1024 for words in lines}


def one_epoch(config: RunConfig) -> float:
    """Fill rate of one pass."""
    with streaming(config) as stream:
        batches = [
            np.mean(next(stream)["segments"] > 0)
            for _ in range(int(stream.pieces.targets.sum()) // (LENGTH * SEQUENCES))
        ]
        return float(np.mean(batches))


def speed(config: RunConfig, seconds: float) -> dict[str, float]:
    """Millions of tokens per CPU second of a core, without padding."""
    with streaming(config) as stream:
        next(stream)
        tokens, begin = 0, time.process_time()
        while time.process_time() - begin < seconds:
            tokens += int(np.count_nonzero(next(stream)["segments"]))
        return {"mtok_per_s_core": round(tokens / (time.process_time() - begin) / 1e6, 2)}


@contextlib.contextmanager
def streaming(config: RunConfig) -> Iterator[Stream]:
    """A stream without prefetching."""
    with contextlib.closing(open_stream(prepare(config).train, config, prefetch=0)) as stream:
        yield stream


def config_of(folder: Path, tokenizer: Path, packing: str, **source: Any) -> RunConfig:
    """A run that reads one source at seq_len 4,096."""
    return validate({
        "model": {"vocab_size": VOCAB},
        "data": {
            "sources": [{key: str(value) for key, value in source.items()}], "tokenizer": {"path": str(tokenizer)},
            "seq_len": LENGTH, "packing": packing, "cache": str(folder / "cache"), "held_out": 0.0,
        },
        "train": {"global_batch": SEQUENCES},
        "observe": {"progress": False},
    })  # fmt: skip


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of whole words; a word is one token, a document has its words and two more."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|bos|>": 0, "<|eos|>": EOS, **{f"w{i}": i + 2 for i in range(VOCAB - 2)}}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def lengths_of(tokens: int, seed: int = 0) -> np.ndarray:
    """Log-normal document lengths of mean 669 that sum to about `tokens`."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(MEAN) - 0.5, 1.0, max(tokens // MEAN, 1)), 3, None).astype(np.int64)


def write_tokens(path: Path, tokens: int, index: bool = True) -> Path:
    """A token file of random ids, each document closed; with Megatron's index or flat."""
    from jaxtrain.data.tokenfiles import write_index

    rng, lengths = np.random.default_rng(0), lengths_of(tokens)
    with path.open("wb") as file:
        for part in np.array_split(lengths, max(1, len(lengths) // 20_000)):
            ids = rng.integers(2, VOCAB, int(part.sum()), np.uint16)
            ids[np.cumsum(part) - 1] = EOS
            ids.tofile(file)
    if index:
        write_index(path.with_suffix(".idx"), "uint16", lengths)
    return path


def texts(tokens: int = 8_000_000) -> list[str]:
    """Documents of random words."""
    rng = np.random.default_rng(0)
    words = np.array([f"w{i}" for i in range(WORDS)])
    return [" ".join(words[rng.integers(0, WORDS, length)]) for length in lengths_of(tokens)]


def write_text(folder: Path) -> Path:
    """A folder of text files."""
    (folder / "text").mkdir()
    for number, text in enumerate(texts()):
        (folder / "text" / f"{number}.txt").write_text(text)
    return folder / "text"


def write_jsonl(folder: Path) -> Path:
    """One file of JSON lines."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return path


def write_parquet(folder: Path) -> Path:
    """One Parquet file."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts()}), folder / "texts.parquet", row_group_size=1000)
    return folder / "texts.parquet"


def write_arrayrecord(folder: Path) -> Path:
    """One ArrayRecord file of JSON."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "texts.array_record"), "group_size:1")
    for text in texts():
        writer.write(json.dumps({"text": text}).encode())
    writer.close()
    return folder / "texts.array_record"


def write_hf(folder: Path) -> Path:
    """A folder as the datasets library saves it: an Arrow stream and its state."""
    import pyarrow

    root = folder / "hf"
    root.mkdir()
    table = pyarrow.table({"text": texts()})
    with pyarrow.ipc.new_stream(str(root / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (root / "dataset_info.json").write_text("{}")
    return root


WRITERS: dict[str, Callable[[Path], Path]] = {
    "text": write_text,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "arrayrecord": write_arrayrecord,
    "hf": write_hf,
    "tokens": lambda folder: write_tokens(folder / "indexed.bin", 40_000_000),
    "tokens flat": lambda folder: write_tokens(folder / "flat.bin", 40_000_000, index=False),
}


PARTS: dict[str, Callable[[Path, Path, argparse.Namespace], Any]] = {
    "packers": lambda folder, tokenizer, arguments: packers(folder, tokenizer, arguments.seconds),
    "sources": lambda folder, tokenizer, arguments: sources(folder, tokenizer, arguments.seconds),
    "start_up": lambda folder, tokenizer, arguments: start_up(folder, tokenizer),
    "memory": lambda folder, tokenizer, arguments: memory(folder, tokenizer, arguments.gb),
}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
