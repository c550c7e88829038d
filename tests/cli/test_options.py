"""The options that are made from the recipe's fields: complete, explained, and quick to make."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer.main

from compressor.cli.app import app
from compressor.cli.options import COMMANDS, spread_budgets
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
