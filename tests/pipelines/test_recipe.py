"""Budgets and recipes: what is accepted, what wins, and that every mistake is told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from compressor.evaluate.budget import Budget, parse_task_drops
from compressor.models.branches import AttentionOf
from compressor.pipelines.recipe import Recipe, dump, resolve
from compressor.plan.choices import Choices
from compressor.runtime.errors import InputError

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("text", "amount", "percent"),
    [
        ("1.0", 1.0, False),
        (1, 1.0, False),
        (0.25, 0.25, False),
        ("  0.5\n", 0.5, False),
        ("1e-3", 1e-3, False),
        ("+2", 2.0, False),
        ("2%", 2.0, True),
        (" 2.5 % ", 2.5, True),
        ("150%", 150.0, True),
    ],
)
def test_budget_is_read(text: str | float, amount: float, percent: bool) -> None:
    assert Budget.parse(text, 0.9) == Budget(amount, percent, 0.9)


def test_budget_in_perplexity() -> None:
    assert Budget.parse("2%").allowed_rise(50) == pytest.approx(1.0)
    assert Budget.parse("0.7").allowed_rise(50) == 0.7


@pytest.mark.parametrize("text", ["1.0", "2%", "0.125", "1e-09", "12.5%"])
def test_budget_is_read_back_from_what_it_prints(text: str) -> None:
    budget = Budget.parse(text)
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize("text", ["1.23456789", "123456.789", "0.12345678%"])
def test_budget_prints_all_its_digits(text: str) -> None:
    """The record keeps what was asked; a gate that reads it back must hold the same promise."""
    assert Budget.parse(str(Budget.parse(text))) == Budget.parse(text)


@pytest.mark.parametrize("text", ["", "%", "one", "1.0.0", "2%%", "1 %%", "0x10", "1,5", True, None])
def test_budget_is_not_a_number(text: Any) -> None:
    with pytest.raises(InputError, match="--max-dppl must be a number or a percentage"):
        Budget.parse(text)


@pytest.mark.parametrize("text", ["0", "-1", "-0.0", "nan", "inf", "-inf", "1e999", "-2%", "nan%", float("nan")])
def test_budget_is_out_of_range(text: Any) -> None:
    with pytest.raises(InputError, match="--max-dppl must be positive and finite"):
        Budget.parse(text)


@pytest.mark.parametrize("confidence", [1.0, -0.1, 2.0, float("nan")])
def test_confidence_is_out_of_range(confidence: float) -> None:
    with pytest.raises(InputError, match="--confidence must be at least 0 and below 1"):
        Budget.parse("1", confidence)


def test_point_estimate_is_a_confidence() -> None:
    assert Budget.parse("1", 0).confidence == 0


@pytest.mark.parametrize(("given", "kept"), [("10%", "10%"), (10_000, 10_000), ("1000000", 1_000_000), ("1e6", 10**6)])
def test_a_size_is_read_back_from_the_recipe(given: str | int, kept: str | int, tmp_path: Path) -> None:
    recipe = resolve(None, {"remove": given})
    assert recipe.settings()["remove"] == kept
    again = resolve(write(tmp_path, dump(recipe, "header")), {})
    assert again.removal() == recipe.removal() is not None
    assert again.max_dppl is None
    again.require_budget()


def test_several_sizes_or_several_budgets_but_not_both(tmp_path: Path) -> None:
    sizes = resolve(write(tmp_path, "remove: [2%, 5%, 10_000]\nmax_dppl: 1.0\n"), {})
    assert [each.remove for each in sizes.searches()] == [["2%"], ["5%"], ["10000"]]
    assert {str(each.max_dppl) for each in sizes.searches()} == {"['1.0']"}
    with pytest.raises(InputError, match="--remove is given twice"):
        sizes.removal()
    with pytest.raises(InputError, match="both have several values"):
        resolve(None, {"remove": ["2%", "5%"], "max_dppl": ["1", "2"]}).searches()
    assert resolve(None, {"remove": "2%"}).searches() == [resolve(None, {"remove": "2%"})]


def test_a_recipe_that_asks_for_nothing() -> None:
    with pytest.raises(InputError, match=r"--max-dppl is missing: .*or how much must go, such as --remove 10%"):
        Recipe().require_budget()


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "model: gpt2\nseed: 3\nbatch_size: 2\noverwrite: true\nmax-dppl: 2%\n")
    recipe = resolve(file, {"seed": 4, "batch_size": None, "overwrite": None, "out": "there"})
    assert (recipe.model, recipe.out) == ("gpt2", "there")
    assert recipe.seed == 4  # the option
    assert recipe.batch_size == 2  # the file: None is an option that was not given
    assert recipe.overwrite is True
    assert recipe.max_dppl == ["2%"]  # as the option is spelled
    assert recipe.calib_tokens == Recipe().calib_tokens  # the default
    assert resolve(file, {"seed": 0}).seed == 0  # zero is a value


def test_empty_recipe_is_the_defaults(tmp_path: Path) -> None:
    assert resolve(write(tmp_path, "# nothing\n"), {}) == resolve(None, {}) == Recipe()


def test_one_text_or_several(tmp_path: Path) -> None:
    assert resolve(write(tmp_path, "text: a.txt\n"), {}).text == ["a.txt"]
    assert resolve(write(tmp_path, "text: [a.txt, b.txt]\n"), {}).text == ["a.txt", "b.txt"]
    named = resolve(write(tmp_path, "text: {wiki: a.txt, code: [b.txt, c.txt]}\n"), {})
    assert named.text == ["wiki=a.txt", "code=b.txt", "code=c.txt"]


def test_one_budget_or_several(tmp_path: Path) -> None:
    file = write(tmp_path, "max_dppl: {wiki: 1.0, code: 5%}\nmax_task_drop: [0.01, piqa=0.02]\ntasks: piqa, boolq\n")
    recipe = resolve(file, {})
    budgets = recipe.budgets(["code", "wiki"])
    assert (str(budgets["wiki"]), str(budgets["code"])) == ("1", "5%")
    assert recipe.tasks == ["piqa", "boolq"]
    assert recipe.max_task_drop == ["0.01", "piqa=0.02"]
    again = write(tmp_path, dump(recipe, "header"))
    assert resolve(again, {}) == recipe
    with pytest.raises(InputError, match=r"no text 'code' \(known: wiki\)"):
        recipe.budgets(["wiki"])
    with pytest.raises(InputError, match=r"text 'prose' has no budget; add --max-dppl prose=1.0"):
        recipe.budgets(["wiki", "code", "prose"])
    with pytest.raises(InputError, match="given twice for text wiki"):
        resolve(None, {"max_dppl": ["wiki=1", "wiki=2"]}).budgets(["wiki"])


def test_choices_are_words_numbers_or_lists_of_them(tmp_path: Path) -> None:
    file = write(tmp_path, "kinds: linear, lowrank\nblocks: [0, 2-3]\nskip: 3\nrank_by: r2\n")
    recipe = resolve(file, {})
    assert (recipe.kinds, recipe.blocks, recipe.skip) == (["linear", "lowrank"], ["0", "2-3"], ["3"])
    choices = recipe.choices(7)
    assert (choices.kinds, choices.blocks, choices.rank_by) == ({"linear", "lowrank"}, {0, 2}, "r2")
    assert resolve(write(tmp_path, dump(recipe, "header")), {}) == recipe
    assert resolve(file, {"blocks": ["5,6"]}).choices(7).blocks == {5, 6}
    assert Recipe().choices(7) == Choices(branches=("ffn",))
    assert Recipe(branches=["all"]).choices(7) == Choices()
    named = Recipe(blocks=["1", "2.attention"]).choices(7)
    assert (named.branches, named.blocks) == (("ffn", "attention"), {1, AttentionOf(2)})


def test_a_plain_budget_is_that_of_all_texts_without_their_own() -> None:
    recipe = resolve(None, {"max_dppl": ["1", "code=3"]})
    assert {name: b.amount for name, b in recipe.budgets(["wiki", "code"]).items()} == {"wiki": 1, "code": 3}


def test_the_drop_of_a_task_its_group_or_all() -> None:
    asked = {"blimp_a": ["blimp"], "blimp_b": ["blimp"], "piqa": ["piqa:acc_norm", "piqa"], "boolq": []}
    found = parse_task_drops(["0.5", "blimp=0.1", "blimp_b=0.2", "piqa=3%"], asked)
    assert found == {"blimp_a": 0.1, "blimp_b": 0.2, "piqa": 0.03, "boolq": 0.5}
    assert parse_task_drops([], asked) == dict.fromkeys(asked)
    with pytest.raises(InputError, match="no task 'piqb'"):
        parse_task_drops(["piqb=0.1"], asked)


def test_recipe_does_not_change() -> None:
    with pytest.raises(ValidationError):
        Recipe().seed = 1  # type: ignore[misc]


def test_dumped_recipe_resolves_to_itself(tmp_path: Path) -> None:
    recipe = resolve(
        None,
        {
            "model": "./naïve: model",
            "max_dppl": "1.5%",
            "text": ["a b.txt", "wikitext2", "#odd"],
            "seq_len": 64,
            "calib_tokens": 5000,
            "confidence": 0.0,
            "seed": 7,
            "dtype": "bfloat16",
            "revision": "v1",
        },
    )
    assert resolve(write(tmp_path, dump(recipe, "two\nlines")), {}) == recipe


def test_dump_leaves_out_where_and_on_what_machine() -> None:
    recipe = resolve(None, {"out": "there", "overwrite": True, "device": "cpu", "batch_size": 3, "max_dppl": 1.0})
    text = dump(recipe, "first\nsecond")
    assert text.startswith("# first\n# second\nmax_dppl: 1.0\n")
    for key in ("out", "overwrite", "device", "batch_size"):
        assert f"\n{key}:" not in text


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "colour: blue\nsize: 3\nseq_len: 1\nbatch_size: '8'\nconfidence: 1\nmax_dppl: much\ntrust_remote_code: true\n",
    )
    with pytest.raises(InputError) as error:
        resolve(file, {})
    message = str(error.value)
    assert message.startswith(f"recipe {file}: ")
    for part in (
        "unknown key 'colour'",
        "unknown key 'size'",
        "seq_len: ",
        "got 1",
        "batch_size: ",
        "got '8'",
        "confidence: ",
        "--max-dppl must be a number or a percentage, got 'much'",
        "pass --trust-remote-code",
    ):
        assert part in message


@pytest.mark.parametrize(
    "values",
    [
        {"seed": True},
        {"seed": 1.0},
        {"seed": 2**63},
        {"seq_len": "32"},
        {"calib_tokens": 1.5},
        {"overwrite": 1},
        {"overwrite": "yes"},
        {"model": 3},
        {"text": [1]},
        {"text": {"a": 1}},
        {"max_dppl": {"a": True}},
        {"tasks": [1]},
        {"task_limit": 0},
        {"task_limit": "8"},
        {"max_task_drop": -0.1},
        {"max_task_drop": {"piqa": 2}},
        {"generate": -1},
        {"confidence": "high"},
        {"confidence": float("nan")},
        {"max_dppl": True},
        {"text": []},
        {"kinds": []},
        {"kinds": {"linear": 1}},
        {"blocks": 0.5},
        {"skip": [True]},
        {"rank_by": "luck"},
    ],
    ids=str,
)
def test_wrong_type(values: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        resolve(None, values)
    (key,) = values
    assert key.replace("_", "") in str(error.value).replace("_", "").replace("-", "")


def test_recipes_that_ship() -> None:
    files = sorted(RECIPES.glob("*.yaml"))
    assert {file.stem for file in files} >= {"gpt2", "gpt2-paper", "pythia-160m", "llama-160m", "smollm2-135m", "demo"}
    for file in files:
        recipe = resolve(file, {})
        assert recipe.budgets(["text"])["text"].amount > 0, file.name
        assert recipe.text, file.name
        assert recipe.seq_len, file.name
        how = next(line for line in file.read_text(encoding="utf-8").splitlines() if f"recipes/{file.name}" in line)
        assert recipe.model or how.split("compress ")[1].startswith("./"), "it must say how the model is named"


def test_the_recipe_of_the_paper_asks_for_one_linear_map() -> None:
    recipe = resolve(RECIPES / "gpt2-paper.yaml", {})
    choices = recipe.choices(12)
    assert (choices.kinds, choices.blocks) == ({"linear"}, {0})
    usual = resolve(RECIPES / "gpt2.yaml", {})
    for key in ("model", "text", "seq_len", "calib_tokens", "select_tokens", "verify_tokens"):
        assert getattr(recipe, key) == getattr(usual, key)
    assert recipe.budgets(["text"])["text"].amount > 0.77


def test_a_mistake_is_told_where_it_was_made(tmp_path: Path) -> None:
    file = write(tmp_path, "seed: -1\ntask_limit: 5\n")
    with pytest.raises(InputError) as error:
        resolve(file, {"task_limit": 0})
    assert str(error.value).startswith("options: task_limit: ")
    assert f"; recipe {file}: seed: " in str(error.value)
