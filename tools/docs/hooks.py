"""Hooks of mkdocs: pages made from the code, pages of the repository's root, links that leave docs/.

A line `<!-- generated: NAME ARGUMENT -->` of a page is replaced by what GENERATORS[NAME] returns.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from messages import messages_markdown
from settings_reference import settings_markdown

# Page of the site -> file at the root of the repository.
ROOT_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
MARK = re.compile(r"^<!-- generated: (\w+) ?([\w-]*) -->$", re.MULTILINE)


def help_markdown(verb: str) -> str:
    """The help of a verb as it is printed at 80 columns."""
    from jaxtrain.cli import main

    os.environ["COLUMNS"] = "80"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([verb, "--help"])
    lines = [line.rstrip() for line in out.getvalue().strip().splitlines()]
    return "```text\n" + "\n".join(lines) + "\n```\n"


GENERATORS: dict[str, Callable[[str], str]] = {
    "settings": lambda _: settings_markdown(),
    "messages": lambda _: messages_markdown(),
    "help": help_markdown,
}


def expand(markdown: str) -> str:
    """A page with its generated parts in place, and links to files outside docs/ reduced to their text."""
    markdown = MARK.sub(lambda found: GENERATORS[found[1]](found[2]), markdown)
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def root_page(name: str) -> str:
    """A page of the root as a page of the site: links into docs/ become links beside it, others their text."""
    text = (ROOT / ROOT_PAGES[name]).read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    own = {file: page for page, file in ROOT_PAGES.items()}
    text = re.sub(r"\]\((CONTRIBUTING\.md|CHANGELOG\.md)", lambda found: f"]({own[found[1]]}", text)
    return re.sub(r"\[([^\]]+)\]\((?:README\.md|jaxtrain/|tools/|tests/|configs/)[^)]*\)", r"\1", text)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root."""
    from mkdocs.structure.files import File

    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=root_page(name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the generated parts."""
    return expand(markdown)
