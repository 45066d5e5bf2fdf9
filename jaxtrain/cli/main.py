"""The verbs by name, and the one wrapper around them: help, errors, exit status."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from collections.abc import Sequence

import jaxtrain
from jaxtrain.cli.compile import Compile
from jaxtrain.cli.data import Data
from jaxtrain.cli.evaluate import Eval
from jaxtrain.cli.export_hf import ExportHf
from jaxtrain.cli.generate import Generate
from jaxtrain.cli.import_hf import ImportHf
from jaxtrain.cli.inspect import Inspect
from jaxtrain.cli.launch import Launch
from jaxtrain.cli.parse import make_parser, parse_verb, split_overrides
from jaxtrain.cli.report import Report
from jaxtrain.cli.tokenize import Tokenize
from jaxtrain.cli.train import Train
from jaxtrain.cli.verb import Verb, run_verb
from jaxtrain.cli.verify import Verify
from jaxtrain.config import CONFIG_ROOT, ConfigError, RunError, nearest
from jaxtrain.launch.process import enough_threads

VERBS: dict[str, type[Verb]] = {
    "train": Train,
    "launch": Launch,
    "eval": Eval,
    "generate": Generate,
    "report": Report,
    "inspect": Inspect,
    "compile": Compile,
    "data": Data,
    "tokenize": Tokenize,
    "import-hf": ImportHf,
    "export-hf": ExportHf,
    "verify": Verify,
}
HELP = ("-h", "--help")
OVERRIDES = """\
overrides:
  Every setting can be set on the command line, by its dotted name:
    --optimizer.learning_rate 3e-4     or --optimizer.learning_rate=3e-4
    --rules.preset '[fsdp, tensor]'    lists and mappings are written as YAML
    --optimizer.clip_norm null         null unsets a setting that may be unset
  A text setting takes the text as it is written, spaces and quotes included.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status.

    A ConfigError or RunError becomes one message on stderr and its status (2 for a setting), an interrupt 130.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Orbax logs tracebacks of damaged files before our one message.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    if (simulated := os.environ.get("JAX_NUM_CPU_DEVICES", "1")).isdecimal():
        enough_threads(int(simulated))
    try:
        return _main(words)
    except (ConfigError, RunError) as error:
        print(f"jaxtrain: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt as error:
        # A run's own handlers say what is saved, and raise with a status.
        print(f"jaxtrain: {str(error) or 'interrupted'}", file=sys.stderr)
        return getattr(error, "status", 130)


def help_of(name: str) -> str:
    """Help of a verb: its options, overrides, shipped configurations, an example."""
    verb = VERBS[name]
    takes_config = "config" in verb.__pydantic_fields__
    parts = [OVERRIDES, shipped_configs() if takes_config else "", f"example:\n  {verb.example}"]
    return make_parser(name, verb, "\n".join(part for part in parts if part)).format_help()


def shipped_configs() -> str:
    """The names of the shipped configurations, wrapped at 80 columns."""
    names = sorted(path.stem for path in CONFIG_ROOT.glob("*.yaml"))
    text = textwrap.fill(", ".join(names), 78, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return f"shipped configurations:\n{text}\n"


def _main(words: list[str]) -> int:
    rest, overrides = split_overrides(words)
    name = rest[0] if rest else ""
    if name in HELP:
        print(_help())
        return 0
    if name == "--version":
        print(f"jaxtrain {jaxtrain.__version__}")
        return 0
    if name not in VERBS:
        problem = f"{name!r} is not a verb{nearest(name, VERBS)}" if name else "no verb"
        raise ConfigError(f"{problem}; verbs: {', '.join(VERBS)} (jaxtrain --help describes them)")
    if any(word in HELP for word in rest[1:]):
        print(help_of(name))
        return 0
    return run_verb(parse_verb(name, VERBS[name], rest[1:]), overrides)


def _help() -> str:
    lines = ["usage: jaxtrain VERB [arguments] [--section.setting VALUE ...]", "", "verbs:"]
    for name, verb in VERBS.items():
        first = (verb.__doc__ or "").partition(".")[0] + "."
        indent = " " * 13
        lines += textwrap.wrap(f"  {name:<11}{first}", 80, subsequent_indent=indent, break_on_hyphens=False)
    lines += ["", "jaxtrain VERB --help shows the options of a verb; jaxtrain --version the version.", ""]
    return "\n".join([*lines, OVERRIDES, shipped_configs(), "example:\n  " + Train.example])
