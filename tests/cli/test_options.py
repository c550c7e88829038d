"""The options that are made from the recipe's fields: complete, explained, and quick to make."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import typer.main

from compressor.cli.app import app
from compressor.cli.options import COMMANDS, GROUPS, spread_budgets
from compressor.pipelines.recipe import Recipe


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_every_field_of_the_recipe_is_an_option_of_some_command() -> None:
    offered = {parameter.name for name in COMMANDS for parameter in commands()[name].params}
    assert set(Recipe.model_fields) <= offered


@pytest.mark.parametrize("command", sorted(commands()))
def test_every_option_has_a_help_text(command: str) -> None:
    for parameter in commands()[command].params:
        assert (parameter.help or "").strip(), parameter.name


def test_the_help_names_the_default_of_the_recipe() -> None:
    parameters = {parameter.name: parameter for parameter in commands()["run"].params}
    for name, field in Recipe.model_fields.items():
        assert parameters[name].default is None, name  # not given: the recipe file decides, then the field's default
        if field.default not in (None, False):
            assert parameters[name].help.endswith(f"  [{field.default}]")


@pytest.mark.parametrize(("command", "where"), [("check", "as recorded"), ("apply", "as in PLAN")])
def test_the_help_of_what_goes_by_a_record_names_no_default_of_the_recipe(command: str, where: str) -> None:
    own = {"out", "overwrite", "device", "batch_size", "low_memory", "model"}
    for parameter in commands()[command].params:
        if parameter.name in set(Recipe.model_fields) - own:
            assert parameter.help.endswith(f"  [{where}]"), parameter.name
            assert parameter.help.count("  [") == 1, parameter.name


def test_a_switch_that_may_be_left_open_can_be_turned_off() -> None:
    parameters = {parameter.name: parameter for parameter in commands()["run"].params}
    assert (parameters["swap"].opts, parameters["swap"].secondary_opts) == (["--swap"], ["--no-swap"])
    assert (parameters["low_memory"].opts, parameters["low_memory"].secondary_opts) == (["--low-memory"], [])


def test_several_budgets_after_one_option() -> None:
    assert spread_budgets(["plan", "m", "--max-dppl", "0.5", "1", "2%", "--json"]) == [
        *("plan", "m", "--max-dppl", "0.5", "--max-dppl", "1", "--max-dppl", "2%", "--json")
    ]
    assert spread_budgets(["m", "--max-dppl", "1.0", "--out", "3"]) == ["m", "--max-dppl", "1.0", "--out", "3"]
    assert spread_budgets(["--max-dppl", "1.0", "./m"]) == ["--max-dppl", "1.0", "./m"]
    assert spread_budgets(["plan", "m", "--remove", "2%", "5%", "--max-dppl", "1", "2", "--json"]) == [
        *("plan", "m", "--remove", "2%", "--remove", "5%", "--max-dppl", "1", "--max-dppl", "2", "--json")
    ]
    assert spread_budgets(["--remove", "1000", "m", "5"]) == ["--remove", "1000", "m", "5"]


@pytest.mark.parametrize("command", ["", *sorted(COMMANDS)])
def test_help_imports_no_torch(command: str) -> None:
    code = (
        "import sys, compressor.cli\n"
        f"sys.argv = ['compress', *{[command] if command else []!r}, '--help']\n"
        "try: compressor.cli.main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = ('torch', 'transformers', 'datasets', 'numpy', 'scipy', 'huggingface_hub')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_bad_value_is_refused_before_torch_is_imported(command: str) -> None:
    code = (
        "import sys, compressor.cli\n"
        f"sys.argv = ['compress', {command!r}, 'demo', '--max-dppl', '1', '--out', 'out', '--kinds', 'cubic']\n"
        "try: compressor.cli.main()\n"
        "except SystemExit as end: assert end.code == 2, end.code\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].startswith("error: options: --kinds cubic is not known"), done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def run_in_process(*words: str) -> tuple[int, str, list[str]]:
    """The exit code, the last line on stderr, and which heavy packages were imported."""
    code = (
        "import sys, compressor.cli\n"
        f"sys.argv = ['compress', *{list(words)!r}]\n"
        "try: compressor.cli.main()\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, *[name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    code_and_heavy = done.stdout.splitlines()[-1].split()
    return int(code_and_heavy[0]), (done.stderr.splitlines() or [""])[-1], code_and_heavy[1:]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("demo", "--max-dppl is missing"),
        ("demo --max-dppl 1", "--out is missing"),
        ("demo --max-dppl 1 --out out --dtype int8", "--dtype int8 is not known"),
        ("demo --max-dppl 1 --out TAKEN", "exists and is not empty"),
        ("demo --max-dppl 1 --out out --text nowhere.txt", "text file nowhere.txt does not exist"),
        ("demo --max-dppl 1 --out out --min-saving 100", "--min-saving must be at least 0 and below 100 %"),
        ("demo --max-dppl 1 --heal 1k --low-memory --out out", "--heal trains weights in memory"),
        ("profile", "no model"),
        ("plan demo", "--max-dppl is missing"),
        ("apply demo nowhere.json --out out", "plan nowhere.json does not exist"),
        ("heal TAKEN --heal 1k --out out", "has no compression.json"),
        ("check TAKEN", "has no compression.json"),
        ("info TAKEN", "has no compression.json"),
        ("export TAKEN --to stone --out out", "--to stone is not known"),
        ("profil demo", "did you mean compress profile?"),
    ],
)
def test_what_needs_no_torch_is_refused_without_it(tmp_path: Any, words: str, says: str) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    code, line, heavy = run_in_process(*words.replace("TAKEN", str(tmp_path)).split())
    assert says in line
    assert (code, heavy) == (2, [])


def help_of(*words: str, columns: int = 80) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "compressor", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": str(columns)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_of_the_job_begins_with_the_options_that_matter() -> None:
    text = help_of("demo", "-h")
    assert text.startswith("Usage: compress MODEL --max-dppl N --out DIR [OPTIONS]")
    first = text.partition("\nOptions:\n")[2].partition("\n\n")[0]
    assert re.findall(r"(?m)^  (?:-\w, )?(--[\w-]+)", first) == [
        "--max-dppl",
        "--out",
        "--text",
        "--remove",
        "--dry-run",
    ]
    assert first.count("required]") == 2
    headings = re.findall(r"(?m)^([A-Z].*):$", text)
    assert headings[:3] == ["Arguments", "Options", "How good it must be"]
    assert not re.search(r"<\w+>|INTEGER|FLOAT|PATH", text)
    assert help_of("run", "--help") == text


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_help_is_as_wide_as_the_terminal(columns: int) -> None:
    widths = [len(line) for line in help_of("check", "-h", columns=columns).splitlines()]
    assert columns - 25 < max(widths) <= columns


@pytest.mark.parametrize("command", sorted(commands()))
def test_short_help_is_not_cut(command: str) -> None:
    (line,) = [line for line in help_of("--help").splitlines() if line.startswith(f"  {command} ")]
    assert not line.endswith("...")


def test_every_option_stands_under_a_heading_or_first() -> None:
    known = {name for names in GROUPS.values() for name in names}
    assert known <= {name for names in COMMANDS.values() for name in names} | {"debug"}


def test_shell_completion_knows_commands_options_and_words() -> None:
    def complete(*words: str) -> str:
        env = {**os.environ, "_COMPRESS_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["compress", *words])}
        env["COMP_CWORD"] = str(len(words))
        code = "import sys; sys.argv = ['compress']\nfrom compressor.cli.app import main\nmain()"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env).stdout

    assert "profile" in complete("pro").split()
    assert "--max-dppl" in complete("plan", "--max-d").split()
    assert complete("run", "demo", "--dtype", "flo").split() == ["float32", "float16"]
