"""The card: metadata that the Hub takes, only what was measured, nothing invented, and no path of this machine."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
import zoo
from conftest import Compress
from huggingface_hub import ModelCard, ModelCardData
from hypothesis import given, settings
from hypothesis import strategies as st
from records_cards import TASK, TEXT, measured, saved, with_source
from transformers import GPT2Config, GPT2LMHeadModel
from zoo import save_tiny, tiny_tokenizer

import compressor
from compressor.models import source as origins
from compressor.models.source import Source, source_of
from compressor.report import card as cards
from compressor.report.card_metadata import list_problems, list_scores, slug
from compressor.report.record import Record, read_record
from compressor.runtime.card_rules import carry_over, read_front_matter
from compressor.runtime.figures import signed
from compressor.runtime.names import BUILT_IN_MODELS

NASTY = [
    *("`*_|<b>", "a\nb: c\n---\n# title", "\x1b[31m\x00\x9b", "\u202eevil", "no", "'\"{}: &x *y !!python/object"),
    *("é日本 🐙", "$$x$$", "](http:x)", "a" * 5000, " ", "../../etc", "-", "---"),
]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=20) | st.sampled_from(["mit", "other", "en", "a/b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)
KEYS = ("license", "language", "datasets", "tags", "base_model", "base_model_relation", "eval_results", "model_name")
CARRIED = st.sampled_from(["license", "license_name", "license_link", "language", "datasets"])


def metadata(text: str) -> dict[str, Any]:
    """As the Hub's own client reads it."""
    assert list_problems(text) == []
    data: dict[str, Any] = ModelCard(text).data.to_dict()  # type: ignore[no-untyped-call]
    return data


def test_it_says_what_was_measured(compressed: Path) -> None:
    record = read_record(compressed)
    assert isinstance(record, Record)
    text = (compressed / "README.md").read_text(encoding="utf-8")
    found, sizes = record.perplexity, record.parameters
    nearness = record.fidelity
    assert found is not None
    assert nearness is not None
    data = metadata(text)
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert {"base_model", "base_model_relation", "license", "datasets", "language"}.isdisjoint(data)  # nobody said
    assert "gpt2" in data["tags"]
    results = ModelCard(text).data.eval_results  # type: ignore[attr-defined]
    assert {r.metric_type: r.metric_value for r in results} == {
        "perplexity": found.compressed,
        "source_perplexity": found.baseline,
        "perplexity_rise": found.delta,
        "perplexity_rise_upper": found.delta_upper,
        "kl_divergence": nearness.kl,
        "top1_agreement": nearness.top1_agreement,
    }
    assert {(r.task_type, r.dataset_name, r.verified) for r in results} == {("text-generation", "corpus.txt", None)}
    assert results == list_scores(record), "what is written is what is read"
    assert str(Path(record.source.model).parent) not in text, "a card is made to be published"
    assert f"| perplexity | {found.baseline:.3f} | {found.compressed:.3f} | {signed(found.delta)} |" in text
    assert f"| parameters | {sizes.before:,} | {sizes.after:,} |" in text
    assert f"is {signed(found.delta_upper)}, inside." in text
    assert f" {nearness}.\n" in text
    assert "| KL from the source, nats per token |" in text
    assert len(re.findall(r"(?m)^\| \d+ \|", text)) == 3


def test_the_picture_lies_beside_it(compressed: Path) -> None:
    text = (compressed / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(pictures) == 1
    assert (compressed / pictures[0]).read_bytes().startswith(b"\x89PNG")
    assert "![" not in cards.card(measured())


def test_its_examples_run(compressed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two that need nothing more than this process; the third names a command."""
    text = (compressed / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text.replace('"DIRECTORY"', repr(str(compressed))), re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        names: dict[str, Any] = {}
        exec(example, names)
        assert isinstance(names["model"], GPT2LMHeadModel)
    assert capsys.readouterr().out.startswith("It was")
    assert "compress export DIR --to hf-dense" in text


def test_the_way_out_depends_on_the_architecture() -> None:
    assert "--to gguf --out model.gguf" in cards.card(with_source(model_type="llama", exports=["gguf"]))


def test_where_it_stands_is_in_its_examples() -> None:
    text = cards.card(measured(), repo="me/small")
    assert text.count('from_pretrained("me/small"') == 3
    assert "DIRECTORY" not in text


@pytest.mark.parametrize(
    ("source", "base"),
    [
        ({"model": "owner/name", "revision": None}, "owner/name"),
        ({"model": "gpt2", "revision": "607a30d783dfa663caf39e06633721c8d4cfcd7e"}, "gpt2"),
        ({"model": "GPT2LMHeadModel", "revision": None}, None),  # a model that was made in memory
        ({"model": "demo", "revision": None}, None),
        ({"model": "demo-llama", "revision": None}, None),
        ({"model": "/home/somebody/name", "revision": None}, None),
        ({"model": "/home/somebody/name", "revision": None, "card": {"base_model": "owner/name"}}, "owner/name"),
        ({"model": "/home/somebody/name", "revision": None, "card": {"base_model": "/home/x"}}, None),
    ],
)
def test_a_base_model_is_on_the_hub(source: dict[str, Any], base: str | None) -> None:
    text = cards.card(with_source(**source))
    data = metadata(text)
    assert data.get("base_model") == base
    assert data.get("base_model_relation") == (base and "quantized")
    assert "somebody" not in text


def test_texts_and_tasks_stay_apart() -> None:
    """The client takes two data sets of one type and configuration for one; it must not come to that."""
    metrics = {"acc": {"source": 0.5, "compressed": 0.4}, "acc_norm": {"source": 0.5, "compressed": math.nan}}
    task = {**TASK, "metrics": metrics}
    several = measured(
        recipe={"text": ["wiki=wikitext2", "own=hub:me/set:part", "a.b=/home/somebody/x.txt", "c=/home/else/x.txt"]},
        texts=dict.fromkeys(["wiki", "own", "a.b", "c"], TEXT),
        tasks={"piqa": {**task, "data": "baber/piqa"}, "mine": {**task, "data": "/home/somebody/mine.jsonl"}},
    )
    text = cards.card(several)
    data = metadata(text)
    found = [result["dataset"] for result in data["model-index"][0]["results"]]
    assert [(d["type"], d.get("config"), d.get("split")) for d in found] == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
        ("me/set", "part", "test"),
        ("text", "x.txt", None),
        ("text", "x.txt-2", None),
        ("baber/piqa", "piqa", None),
        ("json", "mine", None),
    ]
    written = [m["type"] for m in data["model-index"][0]["results"][4]["metrics"]]
    assert written == ["accuracy", "accuracy_drop"], "what is no number is not written"
    assert "somebody" not in text
    assert "perplexity on a.b" in text


def test_without_measurements_it_is_valid(tmp_path: Path) -> None:
    compressor.save(zoo.compressed("gpt2"), tiny_tokenizer(), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    data = metadata(text)
    assert "model-index" not in data
    assert "Reproduce" not in text
    assert "![" not in text
    assert str(tmp_path) not in text


def test_a_record_without_measurements_promises_nothing() -> None:
    text = cards.card(saved())
    assert metadata(text)["tags"][-1] == "gpt2"
    assert list_scores(saved()) == []
    assert "| transformer.h.0.mlp | keeps 5 + rank 3 |" in text.replace("\\_", "_").replace("\\+", "+")
    assert "How much it lost is not known" in text


def test_a_model_from_memory_has_no_base(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    assert origins.describe_origin(source_of(model)) == {}


def source(model: str | Path, revision: str | None = None) -> Source:
    return Source(str(model), revision, "gpt2", "0" * 64, torch.float32)


CARD = """---
license: other
license_name: Open-Thing-2
license_link: LICENSE.md
language: [en, no, "not a language", 5]
datasets:
- owner/set
- ../etc
base_model: owner/first
model-index: [broken
---
"""


def test_what_a_local_card_says_is_carried_over(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD.replace("model-index: [broken\n", ""), encoding="utf-8")
    assert origins.describe_origin(source(tmp_path)) == {
        "base_model": "owner/first",
        "license": "other",
        "license_name": "open-thing-2",
        "language": ["en", "no"],
        "datasets": ["owner/set"],
    }, "a link to a file of that directory leads nowhere"


def test_a_broken_card_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD, encoding="utf-8")
    assert origins.describe_origin(source(tmp_path)) == {}
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    assert origins.describe_origin(source(tmp_path)) == {}
    (tmp_path / "README.md").unlink()
    assert origins.describe_origin(source(tmp_path)) == {}


@pytest.mark.parametrize(
    ("name", "base"), [("owner/name", "owner/name"), ("/home/x/y", None), ("./a/b", None), ("gpt2", None), (7, None)]
)
def test_what_a_config_was_saved_from(tmp_path: Path, name: Any, base: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": name}), encoding="utf-8")
    assert origins.describe_origin(source(tmp_path)).get("base_model") == base


def test_a_directory_of_that_name_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "README.md").write_text("---\nbase_model: owner/name\n---\n", encoding="utf-8")
    assert origins.describe_origin(source(tmp_path)) == {}


def test_a_repository_s_card_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the commit that was loaded; its base model is itself, and a link to its licence leads to it."""
    commit = "0123456789012345678901234567890123456789"
    snapshot = tmp_path / "models--owner--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").write_text(CARD.replace("model-index: [broken\n", ""), encoding="utf-8")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = origins.describe_origin(source("owner/name", commit))
    assert found["license_link"] == f"https://huggingface.co/owner/name/blob/{commit}/LICENSE.md"
    assert found["license"] == "other"
    assert "base_model" not in found
    assert origins.describe_origin(source("owner/other", commit)) == {}


@pytest.mark.parametrize("name", BUILT_IN_MODELS)
def test_the_licence_of_a_built_in_model(name: str) -> None:
    assert origins.describe_origin(source(name)) == {"license": "apache-2.0", "language": ["en"]}
    assert "Apache-2.0" in (BUILT_IN_MODELS[name] / "LICENSE.md").read_text(encoding="utf-8")


def test_the_record_keeps_it(compress: Compress, corpus: Path, options: list[str], tmp_path: Path) -> None:
    """From the source's card through the record into the card of what was made from it."""
    save_tiny("gpt2", tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("---\nlicense: mit\nbase_model: [a/b]\n---\n", encoding="utf-8")
    done = compress(tmp_path / "model", *options, "--max-dppl", "0.5%", "--generate", "0", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    record = read_record(tmp_path / "out")
    assert record.source.card == {"license": "mit", "base_model": "a/b"}
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    data = metadata(text)
    assert (data["license"], data["base_model"], data["base_model_relation"]) == ("mit", "a/b", "quantized")
    assert "The licence (mit) is the source's." in text
    assert text == cards.card(record, picture=True), "it can be made again from the record"


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ("", "no metadata"),
        ("---\nlicense: [mit\n---\n", "cannot be read"),
        ("---\n- mit\n---\n", "cannot be read"),
        ("---\nlicense: My Own\n---\n", "license"),
        ("---\nlicense: {a: b}\n---\n", "license"),
        ("---\nlicense: no\nlanguage: no\n---\n", "license"),
        ("---\nlicense: mit\nlicense: other\n---\n", "stands twice"),
        ("---\na: &a [b]\nc: [*a, *a]\n---\n", "alias"),
        ("---\nlanguage: English\n---\n", "language"),
        ("---\nbase_model: /home/x\n---\n", "base_model"),
        ("---\nbase_model_relation: copy\n---\n", "base_model_relation"),
        ("---\ntags: [1]\n---\n", "tags"),
        ("---\nmodel-index: [{name: x, results: [{task: {type: t}}]}]\n---\n", "cannot be read"),
        ("---\nmodel-index: nonsense\n---\n", "cannot be read"),
    ],
)
def test_what_the_hub_would_refuse(head: str, reason: str) -> None:
    problems = list_problems(head + "# title\n")
    assert len(problems) == 1
    assert reason in problems[0]


@pytest.mark.parametrize(("kind", "value"), [("has spaces", 1.0), ("sound", math.nan), ("sound", math.inf)])
def test_what_the_hub_would_refuse_of_the_results(kind: str, value: float) -> None:
    result = {"task": {"type": "t"}, "dataset": {"name": "n", "type": kind}, "metrics": [{"type": "m", "value": value}]}
    head = yaml.safe_dump({"model-index": [{"name": "x", "results": [result]}]})
    assert len(list_problems(f"---\n{head}---\n")) == 1


def check_nasty(name: str) -> None:
    """A stranger's word in every place that takes one."""
    task = {**TASK, "metric": name, "metrics": {name: {"source": 0.0, "compressed": 1.0}}, "data": name}
    card = dict.fromkeys(("license", "license_name", "language", "datasets", "base_model"), name)
    nasty = measured(
        source={
            "model": f"/home/me/{name}",
            "model_type": name,
            "revision": name,
            "weights_sha256": name,
            "card": card,
        },
        texts={name: TEXT, "other": TEXT},
        tasks={name: {**task, "higher_is_better": False, "max_drop": 2.0, "passed": True}},
        recipe={"text": [f"other={name}", f"/home/me/{name}"]},
        tool={"version": name},
    )
    text = cards.card(nasty)
    data = metadata(text)  # and no problems
    assert ModelCard(text).data.eval_results == list_scores(nasty)  # type: ignore[attr-defined]
    body = text.split("\n---\n", 1)[1]
    assert "home" not in text
    assert body.count("\n# ") == 1
    assert not re.search(r"(?<!\\)<[a-z]", text)
    assert not re.search(r"(?<!\\)\]\(http:x", text)
    assert not set(text) & {chr(c) for c in (*range(9), *range(11, 32), *range(127, 160), 0x202E)}
    assert len(text) < 60_000
    assert set(data) <= {
        *("base_model", "base_model_relation", "datasets", "language", "library_name", "license", "license_name"),
        *("pipeline_tag", "tags", "model-index"),
    }
    table = [line for line in body.splitlines() if line.startswith("| ")]
    bars = {len(re.findall(r"(?<!\\)\|", line)) for line in table}
    assert bars <= {7, 8}, "a name does not make a column"


@pytest.mark.parametrize("name", NASTY)
def test_nasty_names(name: str) -> None:
    check_nasty(name)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_any_name(name: str) -> None:
    check_nasty(name)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(CARRIED, ANYTHING))
def test_what_is_carried_over_is_sound(values: dict[str, Any]) -> None:
    kept = carry_over(values)
    assert carry_over(kept) == kept, "it is asked again of a record that somebody may have written in"
    assert list_problems(f"---\n{yaml.safe_dump({'tags': [], **kept})}---\n") == []


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*KEYS, "model-index"]) | st.text(max_size=5), ANYTHING))
def test_any_metadata_is_judged(values: dict[str, Any]) -> None:
    """Whatever stands in a card, there is an answer."""
    for problem in list_problems(f"---\n{yaml.safe_dump(values)}---\n"):
        assert isinstance(problem, str)


def test_front_matter_ends(tmp_path: Path) -> None:
    """An alias of aliases, a nesting without end, a file of many gigabytes: none of them is read through."""
    file = tmp_path / "README.md"
    for content in ("a: &a [x]\nb: [*a, *a]", "a: " + "[" * 5000, "x: " + "y" * 2**20):
        file.write_text(f"---\nlicense: mit\n{content}\n---\n", encoding="utf-8")
        assert read_front_matter(file) == {}


def test_slugs_are_names_of_data_sets() -> None:
    for name in NASTY:
        assert re.fullmatch(r"[\w.-]{1,80}", slug(name), re.ASCII)


def test_metadata_that_the_hub_would_not_take_does_not_cost_the_card() -> None:
    good = ModelCardData(library_name="transformers", license="mit")
    assert "license: mit" in cards.with_metadata("text", good)
    bad = ModelCardData(library_name="transformers", license="Do as you like!", tags=["a"])
    content = cards.with_metadata("text", bad)
    assert list_problems(content) == []
    assert "library_name: transformers" in content
    assert content.endswith("text")
