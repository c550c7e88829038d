"""What the README names exists."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import Compress

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_module_stands_in_the_tree_and_no_other() -> None:
    tree = re.search(r"## The tree\n\n```\n(.*?)```", README, re.DOTALL)
    assert tree
    named = set(re.findall(r"(\w+\.py)\b", tree[1])) - {"train_demo.py"}
    package = {file.name for file in (ROOT / "compressor").glob("*.py")}
    assert named == package - {"__init__.py", "__main__.py", "progress.py", "registration.py", "errors.py"}


def test_every_command_and_option_exists(compress: Compress) -> None:
    known = {"profile", "plan", "apply", "check", "info", "export", "push"}
    commands = set(re.findall(rf"^compress ({'|'.join(known)})", README, re.MULTILINE))
    assert commands == known
    helps = "".join(compress(command, "--help").out for command in ("run", *sorted(commands)))
    for option in set(re.findall(r"`(?:compress [^`]*)?(--[a-z-]+)", README)):
        assert option in helps, option


def test_every_path_exists() -> None:
    for path in set(re.findall(r"`((?:compressor|recipes|benchmarks|tests)/[\w./-]*)`", README)):
        assert (ROOT / path).exists(), path


def test_ci_runs_what_the_readme_tells_a_user() -> None:
    commands = re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert commands == ["make browser", "make test"]
    assert all(command in README for command in commands)
