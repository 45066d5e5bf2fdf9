"""environment.json's facts, with and without git."""

import json
import subprocess

import jax

from jaxtrain.observe.environment import environment, git_state


def test_facts_are_plain_and_true():
    facts = json.loads(json.dumps(environment(["jaxtrain", "train"])))
    assert facts["packages"]["jax"] == jax.__version__
    assert facts["devices"] == {jax.devices()[0].device_kind: jax.device_count()}
    assert facts["processes"] == 1 and facts["command"] == ["jaxtrain", "train"]


def git(folder, *words):
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(folder), *words],
        check=True, capture_output=True,
    )  # fmt: skip


def test_the_commit_of_the_checkout_that_tracks_the_source(tmp_path, monkeypatch):
    source, stranger = tmp_path / "source.py", tmp_path / "stranger.py"
    source.write_text("1\n")
    assert git_state(source) is None, "no repository"
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "source.py")
    git(tmp_path, "commit", "-q", "-m", "one")
    state = git_state(source)
    assert len(state["commit"]) == 40 and state["dirty"] is False
    source.write_text("2\n")
    assert git_state(source) == state | {"dirty": True}
    stranger.write_text("3\n")
    assert git_state(stranger) is None, "a package installed inside another repository"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(source) is None, "no git"
