"""Rooms import only from floors below (docs/architecture.md): imports for type checking alone are exempt."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "jaxtrain"
PAGE = PACKAGE.parent / "docs" / "architecture.md"


def floors() -> dict[str, int]:
    """Room -> floor, as the table of the architecture page has them; `train/` is on two floors, by module."""
    table = re.findall(r"^\| (\d+) \| (.+?) \|", PAGE.read_text(encoding="utf-8"), flags=re.M)
    found = {}
    for floor, rooms in table:
        for room in re.findall(r"`([\w/]+?)(?:\.py|/)?`", rooms):
            found[room] = int(floor)
    return found


def room_of(module: str, known: dict[str, int]) -> str | None:
    parts = module.split(".")[1:]
    names = ["/".join(parts[:2]), *parts[:1]]
    return next((name for name in names if name in known), None)


def imports(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("jaxtrain."):
            yield node.module


def faults_of(module: str, path: Path, known: dict[str, int]) -> Iterator[str]:
    room = room_of(module, known)
    if room is None:
        yield f"{module} is in no room of {PAGE.name}"
        return
    for other in imports(path):
        target = room_of(other, known)
        if target is None:
            yield f"{module} imports {other}, which is in no room of {PAGE.name}"
            continue
        together = target.partition("/")[0] == room.partition("/")[0] and known[target] == known[room]
        if not (target == room or together or known[target] < known[room]):
            yield f"{module} (floor {known[room]}) imports {other} (floor {known[target]})"


def test_modules_import_from_floors_below() -> None:
    known, faults = floors(), []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        if module not in ("jaxtrain", "jaxtrain.__main__"):
            faults += faults_of(module, path, known)
    assert len(known) > 15 and not faults, "\n".join(faults)


def test_an_upward_import_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "rope.py").write_text("from jaxtrain.train.loop import train\n")
    assert list(faults_of("jaxtrain.ops.rope", tmp_path / "rope.py", floors())) == [
        "jaxtrain.ops.rope (floor 3) imports jaxtrain.train.loop (floor 10)"
    ]
