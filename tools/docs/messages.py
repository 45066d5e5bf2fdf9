"""The error messages of the source, with {} for what is filled in, read from its syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "jaxtrain"


@dataclass(frozen=True)
class Message:
    """A message for the user: where it is raised, and its text with {} for what is filled in."""

    room: str
    file: str
    text: str


def messages(package: Path = PACKAGE) -> list[Message]:
    """Messages of every `raise ConfigError(...)`, and of every `raise ValueError(...)` of config/ (validators)."""
    found = []
    for path in sorted(package.rglob("*.py")):
        file = str(path.relative_to(package))
        kinds = {"ConfigError", "ValueError"} if file.startswith("config/") else {"ConfigError"}
        for text in _raised(ast.parse(path.read_text(encoding="utf-8")), kinds):
            found.append(Message(file.partition("/")[0].removesuffix(".py"), file, text))
    return found


def literals(package: Path = PACKAGE) -> list[str]:
    """Every text of the source, f-strings with {} for what is filled in: for messages that are built in parts."""
    return [
        _text(node)
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr | ast.Constant)
    ]


def messages_markdown() -> str:
    """One list per room, in the order of the source."""
    rooms: dict[str, list[str]] = {}
    for message in messages():
        rooms.setdefault(message.room, []).append(message.text)
    parts = []
    for room, texts in rooms.items():
        lines = [f"- `{text.replace('`', chr(39))}`" for text in dict.fromkeys(texts)]
        parts.append(f"### {room}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _raised(tree: ast.AST, kinds: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
            if isinstance(call.func, ast.Name) and call.func.id in kinds and call.args:
                text = _text(call.args[0])
                if text.replace("{}", "").strip(" :;,.\n"):
                    yield text


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return " ".join(node.value.split()) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        return " ".join("".join(map(str, parts)).split())
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "{}"
