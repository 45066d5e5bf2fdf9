"""The documentation: links, commands, configurations and code of its pages; the reference of settings is complete."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from messages import literals, messages
from settings_reference import settings, settings_markdown

from jaxtrain.cli import main, split_overrides
from jaxtrain.cli.main import VERBS
from jaxtrain.cli.parse import parse_verb
from jaxtrain.config import CONFIG_ROOT, RunConfig, load_config
from jaxtrain.config.aliases import KEYS
from jaxtrain.config.values import find_annotation

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def blocks(language: str, pages: list[Path] = PAGES) -> Iterator[Any]:
    for page in pages:
        for i, found in enumerate(FENCE.finditer(page.read_text(encoding="utf-8"))):
            if found[2] == language:
                yield pytest.param(found[3], id=f"{page.name}-{i}")


def commands() -> Iterator[Any]:
    for param in blocks("bash"):
        for line in param.values[0].replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            starts = [i for i, word in enumerate(words) if word == "jaxtrain"]
            if starts:
                end = words.index(">") if ">" in words else None
                yield pytest.param(words[starts[0] + 1 : end], id=line.strip()[:80])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_files_exist(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    made = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
    for target in targets:
        path = target.partition("#")[0]
        if path and "://" not in target:
            found = ROOT / made[path] if page.parent.name == "docs" and path in made else page.parent / path
            assert found.exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_are_configurations(text, tmp_path):
    tree = yaml.safe_load(text)
    bases = tree.get("base", [])
    tree["base"] = [str(CONFIG_ROOT / base) for base in ([bases] if isinstance(bases, str) else bases)]
    (tmp_path / "block.yaml").write_text(yaml.safe_dump(tree))
    load_config(tmp_path / "block.yaml")
    assert not old_names(tree)


def old_names(tree: Any, prefix: str = "") -> list[str]:
    """Settings under a name that is accepted for old files only."""
    if isinstance(tree, list):
        return [name for item in tree for name in old_names(item, prefix)]
    if not isinstance(tree, dict):
        return []
    found = [f"{prefix}{key}" for key in tree if f"{prefix}{key}" in KEYS]
    return found + [name for key, value in tree.items() for name in old_names(value, f"{prefix}{key}.")]


@pytest.mark.parametrize("words", commands())
def test_commands_parse(words):
    rest, overrides = split_overrides(words)
    for override in overrides:
        key = override.partition("=")[0]
        assert find_annotation(RunConfig, key) is not None and key not in KEYS, override
    verb, *arguments = rest
    if verb == "--version":
        assert main(["--version"]) == 0
    elif arguments != ["--help"]:
        parsed = parse_verb(verb, VERBS[verb], arguments)
        config = str(getattr(parsed, "config", None) or "")
        if any((CONFIG_ROOT / name).is_file() for name in (f"{config}.yaml", Path(config).name)):
            load_config(config, overrides)


@pytest.mark.parametrize("text", blocks("python"))
def test_python_blocks_compile(text):
    compile(text, "<docs>", "exec")


def test_the_reference_has_every_setting():
    schema = RunConfig.model_json_schema()

    def leaves(node: dict[str, Any], prefix: str) -> Iterator[str]:
        for key, value in node["properties"].items():
            name = f"{prefix}{key}"
            for target in [value, *value.get("allOf", []), *value.get("anyOf", []), value.get("items", {})]:
                if "$ref" in target:
                    break
            else:
                yield name
                continue
            section = schema["$defs"][target["$ref"].rpartition("/")[2]]
            if "items" in value:
                yield name
            yield from leaves(section, f"{name}[]." if "items" in value else f"{name}.")

    expected = list(leaves(schema, ""))
    assert [setting.name for setting in settings()] == expected
    page = settings_markdown()
    assert page.count("\n| `") - page.partition("## Old names")[2].count("\n| `") == len(expected)
    assert all(setting.text for setting in settings() if setting.name != "xla[].")


def test_quoted_errors_exist_in_the_code():
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").partition("## Every message")[0]
    quoted = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    known = [re.sub(r"\{\}", "...", text) for text in [*(one.text for one in messages()), *literals()]]
    for beginning in quoted:
        parts = [part.strip() for part in beginning.split("...") if part.strip()]
        assert any(in_order(parts, text) for text in known), beginning
    assert len(messages()) > 150


def in_order(parts: list[str], text: str) -> bool:
    """Whether `parts` occur in `text`, one after another."""
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config as load_site

    config = load_site(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= 20
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'(?:src|<link[^>]+href)="(?:https?:)?//[^"]+"', text), page.name
        assert "<!-- generated" not in text


@pytest.mark.prove
def test_the_library_page_runs(tmp_path, monkeypatch):
    from jaxtrain import api

    registered = {
        api.SOURCES: "counting", api.METRICS: "label_mean", api.OPTIMIZERS: "momentum",
        api.LEARNING_RATES: "square_root", api.ACTIVATIONS: "silu", api.NORMS: "scale_only",
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    try:
        for param in blocks("python", [ROOT / "docs" / "library.md"]):
            exec(compile(param.values[0], "docs/library.md", "exec"), scope)
    finally:
        for registry, name in registered.items():
            registry.unregister(name)
    assert scope["summary"]["steps"] == 4
    rows = (tmp_path / "runs" / "counting" / "metrics.jsonl").read_text().splitlines()
    assert "label_mean" in rows[0] and "embedding_norm" in rows[1]
