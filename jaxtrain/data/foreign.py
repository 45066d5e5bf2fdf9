"""Files of other tools: recognised by their first bytes or their name, with the command that converts them."""

from __future__ import annotations

import re
import shlex
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

from jaxtrain.data.compression import FRAME_HEAD, ZSTD_WINDOW, codec_of, uncompressed, zstd_window
from jaxtrain.data.files import File
from jaxtrain.data.records import json_path

HEAD = 1024
# Enough to see how a file of JSON begins.
JSON_HEAD = 65536
BOM = b"\xef\xbb\xbf"
TABLE_NAME = re.compile(r"\.(csv|tsv)(\.gz|\.zst)?$", re.IGNORECASE)
TAR_NAME = re.compile(r"\.(tar|tgz|tar\.gz|tar\.zst)$", re.IGNORECASE)
TFRECORD_NAME = re.compile(r"\.tfrecords?(-\d+-of-\d+)?(\.gz)?$", re.IGNORECASE)
RECORDS_INSIDE = re.compile(rb'\{\s*"([^"\\]+)"\s*:\s*\[\s*\{')
INDEX_MAGICS = (b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00")
TO_JSONL = (
    "import csv,json,sys; sys.stdin.reconfigure(encoding='utf-8-sig', newline=''); "
    "csv.field_size_limit(2**31-1); [print(json.dumps(row)) for row in csv.DictReader(sys.stdin{delimiter})]"
)
TO_ARRAYRECORD = (
    "import struct,sys; from array_record.python.array_record_module import ArrayRecordWriter as W; "
    "f=sys.stdin.buffer; w=W(sys.argv[1], 'group_size:1'); "
    "[(w.write(f.read(struct.unpack('<Q', h[:8])[0])), f.read(4)) for h in iter(lambda: f.read(12), b'')]; w.close()"
)
TO_FLAT = "import sys,numpy; numpy.load(sys.argv[1], mmap_mode='r').tofile(sys.argv[2])"


@dataclass(frozen=True)
class Foreign:
    """What a file is instead of its source's kind, and what to do with it."""

    what: str
    fix: str
    is_text: bool = False
    """It can be read as text, which is not what is meant."""


def foreign_file(file: File, kind: str) -> Foreign | None:
    """What a file is if it is none of its source's kind; None where nothing is recognised."""
    with file.open() as stream:
        head = stream.read(HEAD)
    found = foreign_head(file, head, kind)
    return found or (foreign_json(file, head) if kind == "jsonl" else None)


def foreign_head(file: File, head: bytes, kind: str) -> Foreign | None:
    """The same by the file's name and first bytes (HEAD of them, or all)."""
    path = shlex.quote(_path(file))
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return Foreign("a pointer of Git LFS, not the file itself", "fetch it (git lfs pull)", True)
    if TABLE_NAME.search(file.name):
        return _table(file)
    if TAR_NAME.search(file.name) or head[257:262] == b"ustar":
        unpack = f"unpack it (mkdir unpacked; tar -xf {path} -C unpacked)"
        fix = f"{unpack} and name that folder, with include: ['*.txt'] for text"
        return Foreign("a tar archive, such as WebDataset's", fix)
    if TFRECORD_NAME.search(file.name) or is_tfrecord(head):
        return _tfrecord(file)
    if any(map(head.startswith, INDEX_MAGICS)):
        return Foreign("the index of a token file", "name the .bin beside it, under tokens")
    for magic, other, what in ((b"PAR1", "parquet", "a Parquet file"), (b"ARROW1", "hf", "an Arrow file")):
        if head.startswith(magic) and kind != other:
            return Foreign(what, f"name it under {other} in data.sources")
    if head.startswith(b"\x93NUMPY"):
        fix = f"strip its header (python -c {shlex.quote(TO_FLAT)} {path} {_stem(file, '.npy')}.bin)"
        return Foreign("a file of numpy.save", f"{fix}, name the result under tokens and set dtype of the source")
    return _compressed(file, head, kind)


def foreign_json(file: File, head: bytes) -> Foreign | None:
    """What a file of JSON is that is not one object a line, or that cannot be decompressed."""
    path = shlex.quote(_path(file))
    if zstd_window(head[:FRAME_HEAD]) > ZSTD_WINDOW:
        return Foreign(f"compressed with a zstd window of {zstd_window(head):,} bytes", recompress(file))
    try:
        with file.open() as raw:
            stream, codec = uncompressed(raw)
            text = stream.read(JSON_HEAD)
    except OSError:
        return None  # its reader names it, with the line
    if codec and (found := foreign_head(file, text[:HEAD], "jsonl")):
        return found
    text = text.removeprefix(BOM).lstrip()
    first, end, _ = text.partition(b"\n")
    unpack = {"gzip": f"gzip -dc {path} | ", "zstd": f"zstd -dc {path} | "}.get(codec or "", "")
    given = "" if codec else f" {path}"
    if text.startswith(b"["):
        return Foreign("a JSON array, not one object a line", f"convert it ({unpack}jq -c '.[]'{given} > new.jsonl)")
    if not text.startswith(b"{") or not end or first.rstrip()[-1:] not in (b"{", b"[", b",", b":"):
        return None
    inside = RECORDS_INSIDE.match(text)
    items = shlex.quote(json_path(inside[1].decode(errors="replace"))) if inside else ""
    more = f", or {unpack}jq -c {items}{given} for the records inside" if inside else ""
    return Foreign("a JSON object over several lines", f"convert it ({unpack}jq -c .{given} > new.jsonl{more})")


def is_blank(file: File) -> bool:
    """Whether a short file of lines holds only blank ones; a long one is not read for this."""
    try:
        with file.open() as raw:
            text = uncompressed(raw)[0].read(JSON_HEAD)
    except OSError:
        return False  # its reader names it
    return len(text) < JSON_HEAD and not text.removeprefix(BOM).strip()


def recompress(file: File) -> str:
    """The command that gives a zstd file a window that every reader accepts."""
    return f"compress it again (zstd -dc --long=31 {shlex.quote(_path(file))} | zstd -o new.jsonl.zst)"


def is_tfrecord(head: bytes) -> bool:
    """Whether a TFRecord begins so: a length (u64) with its masked CRC32-C, which text or tokens do not meet."""
    if len(head) < 12:
        return False
    crc = 0xFFFFFFFF
    for byte in head[:8]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return bool(masked == struct.unpack("<I", head[8:12])[0])


def _table(file: File) -> Foreign:
    tabs = ".tsv" in file.name.lower()
    program = TO_JSONL.format(delimiter=r", delimiter='\t'" if tabs else "")
    # A shell's double quotes leave these characters alone.
    fix = (
        f'convert it ({_cat(file)}python -c "{program}"{_from(file)} > {_stem(file, ".csv", ".tsv")}.jsonl) and name '
        "that under jsonl, name it .txt to read it as it is"
    )
    return Foreign(f"a table ({'TSV' if tabs else 'CSV'})", fix, True)


def _tfrecord(file: File) -> Foreign:
    out = f"{_stem(file, '.tfrecord', '.tfrecords')}.array_record"
    fix = f'convert it ({_cat(file)}python -c "{TO_ARRAYRECORD}" {out}{_from(file)}) and name that under arrayrecord'
    return Foreign("a TFRecord file", fix)


def _compressed(file: File, head: bytes, kind: str) -> Foreign | None:
    path, suffixes = shlex.quote(_path(file)), (".gz", ".zst", ".bz2", ".xz", ".zip")
    known: tuple[tuple[bytes, str, str], ...] = (
        (b"BZh", "bzip2", "bzip2 -dc"),
        (b"\xfd7zXZ\x00", "xz", "xz -dc"),
        (b"PK\x03\x04", "zip", "unzip -p"),
    )
    found = next(((what, command) for magic, what, command in known if head.startswith(magic)), None)
    if found is None and kind != "jsonl" and (codec := codec_of(head)):
        found = (codec, {"gzip": "gzip -dc", "zstd": "zstd -dc --long=31"}[codec])
    if found is None:
        return None
    stem = _stem(file, *suffixes)
    out = stem if file.name.endswith(suffixes) else f"{stem}.plain"
    return Foreign(f"{found[0]} data", f"decompress it ({found[1]} {path} > {out})")


def _path(file: File) -> str:
    return PurePosixPath(file.url).name if file.remote else file.url


def _stem(file: File, *suffixes: str) -> str:
    """The file's own name without these endings, quoted for a shell."""
    name = PurePosixPath(_path(file)).name
    for suffix in (".gz", ".zst", *suffixes):
        name = name.removesuffix(suffix)
    return shlex.quote(name)


def _cat(file: File) -> str:
    commands: dict[str, Callable[[str], str]] = {
        ".gz": lambda path: f"gzip -dc {path} | ",
        ".zst": lambda path: f"zstd -dc {path} | ",
    }
    command = commands.get(PurePosixPath(file.name).suffix)
    return command(shlex.quote(_path(file))) if command else ""


def _from(file: File) -> str:
    return "" if _cat(file) else f" < {shlex.quote(_path(file))}"
