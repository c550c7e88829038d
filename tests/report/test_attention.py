"""Attention where people look: tables, lines, page, card, files for CI and charts; and the key-value cache."""

from __future__ import annotations

import html
import io
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from pydantic import ValidationError
from report.records import assessment, attending, attending_profile
from rich.console import Console
from rich.table import Table

from compressor.report import summary, tables
from compressor.report.card import card
from compressor.report.charts import charts_of
from compressor.report.ci import junit
from compressor.report.ci import summary as job_summary
from compressor.report.formats import list_branches, name_replacement
from compressor.report.page import page
from compressor.report.record import Record, SavedRecord
from compressor.report.record_parts import Replacement, SavedBlock
from compressor.report.speed_parts import KVCache

CACHE = "key-value cache 23,040 → 15,360 bytes per token (−33.3 %, float16)"


def printed(table: Table) -> list[str]:
    console = Console(file=io.StringIO(), width=400)
    console.print(table.fitted(200))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("replacement", "words"),
    [
        ({"kind": "pruned", "rank": 0, "heads": 2, "units": 3, "query_heads_per_unit": 1}, "keeps 2 of 3 heads"),
        (
            {"kind": "hybrid", "rank": 48, "heads": 2, "units": 3, "query_heads_per_unit": 3},
            "keeps 2 of 3 KV heads + rank 48",
        ),
        ({"kind": "linear", "heads": 0, "units": 3}, "linear map"),
        ({"kind": "lowrank", "rank": 24, "heads": 0, "units": 3}, "rank 24"),
        ({"kind": "bias", "rank": 0, "heads": 0, "units": 3}, "constant"),
        ({"kind": "keep", "units": 3}, "·"),
        ({"kind": "pruned", "rank": 0, "heads": 2}, "keeps 2 heads"),
        ({"kind": "pruned", "rank": 0, "heads": 1}, "keeps 1 head"),
        ({"kind": "pruned", "rank": 0, "heads": 1, "units": 1, "query_heads_per_unit": 4}, "keeps 1 of 1 KV head"),
        ({"kind": "pruned", "rank": 0, "neurons": 1440, "units": 1536}, "keeps 1,440 of 1,536"),
        ({"kind": "pruned", "rank": 0, "neurons": 1440}, "keeps 1,440 neurons"),
        ({"kind": "pruned", "rank": 0, "neurons": 1}, "keeps 1 neuron"),
        ({"kind": "hybrid", "rank": 12, "neurons": 192, "units": 768}, "keeps 192 + rank 12"),
        ({"kind": "hybrid", "rank": None, "neurons": 192, "units": 768}, "keeps 192 + linear map"),
    ],
)
def test_a_replacement_says_what_is_kept(replacement: dict[str, Any], words: str) -> None:
    assert name_replacement(Replacement(**replacement)) == words


def test_branches_in_words() -> None:
    assert list_branches([3], []) == "block 3"
    assert list_branches([3, 7, 8], [4]) == "blocks 3, 7, 8 and attention 4"
    assert list_branches([], [4, 5, 6]) == "attention 4–6"


def test_the_table_has_every_ffn_and_the_replaced_attention_in_order_of_depth() -> None:
    record = attending(7)
    names = [re.split(r"\s{2,}", line.strip())[0] for line in printed(tables.block_table(record))[1:]]
    assert names == ["0", "1", "2 attention", "2", "3", "4 attention", "4", "5", "6 attention", "6"]
    assert tables.attention_lines(record) == [
        "attention: 2 safe, 3 costly, 2 unsafe (0, 1); 3 of 7 replaced (1 hybrid, 1 linear, 1 pruned)"
    ]
    assert tables.attention_lines(assessment(7)) == []


@pytest.mark.parametrize("lines", [tables.detail_lines, tables.info_lines])
def test_a_smaller_cache_is_told_and_an_unchanged_one_is_not(lines: Any) -> None:
    assert CACHE in lines(attending(7))
    same = KVCache(bytes_per_token_before=23040, bytes_per_token_after=23040, dtype="float16")
    for record in (assessment(7), assessment(7).with_parts(kv_cache=same)):
        assert not any("cache" in line for line in lines(record))
    assert "unchanged" in page(assessment(7).with_parts(kv_cache=same))
    assert "key-value cache" not in card(assessment(7).with_parts(kv_cache=same))


def test_a_check_says_what_is_replaced() -> None:
    linear = Replacement(kind="linear", rank=None, neurons=0)
    some = Replacement(kind="pruned", rank=0, heads=2, kept_heads=[0, 2], units=3, query_heads_per_unit=1)
    replaced = [SavedBlock(path=f"model.layers.{k}.mlp", replacement=linear) for k in (0, 1)]
    attention = [SavedBlock(path="model.layers.1.self_attn", replacement=some)]
    record = assessment(7).with_parts(blocks=[], replaced=replaced, replaced_attention=attention)
    assert "replaced: 2 FFNs (2 linear) and the attention of 1 layer (1 pruned)" in tables.check_lines(record)
    shown = page(record)
    assert "model.layers.1.self_attn" in shown
    assert "keeps 2 of 3 heads" in shown


def test_a_model_without_measurements_lists_its_attention() -> None:
    some = Replacement(kind="pruned", rank=0, heads=2, kept_heads=[0, 2], units=3, query_heads_per_unit=1)
    values = assessment(7).model_dump(include={"schema_version", "tool", "environment", "source"})
    record = SavedRecord(
        **values,
        parameters={"after": 10},
        blocks=[],
        attention=[SavedBlock(path="model.layers.1.self_attn", replacement=some)],
        kv_cache=KVCache(bytes_per_token_after=15360, dtype="float16"),
    )
    lines = tables.info_lines(record)
    assert "model.layers.1.self_attn: keeps 2 of 3 heads" in lines
    assert "key-value cache 15,360 bytes per token (float16)" in lines
    assert "| model.layers.1.self\\_attn | keeps 2 of 3 heads |" in card(record)
    assert "some of its attention is replaced" in card(record)


def test_a_profile_counts_attention_apart() -> None:
    record = attending_profile(5)
    *_, verdicts, attention, untouched = summary.answer(record)
    assert verdicts == "Safe: 1, 3. Costly: 0, 4."
    assert attention == "Attention: 1 safe (2), 2 costly (3, 4), 2 unsafe (0, 1)."
    assert untouched == "Not to be touched: 2; attention 0, 1."
    assert "(blocks 1, 3 and attention 4)" in summary.answer(record)[0]
    assert any(line.startswith("attention: R²_lin from") for line in summary.finding_lines(record))
    ffn, of_attention = (printed(table) for table in summary.profile_tables(record))
    assert (len(ffn), of_attention[0].strip(), len(of_attention)) == (6, "attention", 7)


def test_the_page_and_the_card_have_attention_and_the_cache() -> None:
    record = attending(7)
    shown = html.unescape(page(record))
    sentence = "The key-value cache takes 33.3 % less: 23,040 → 15,360 bytes per token (float16)."
    for words in ("2 attention", "keeps 2 of 3 KV heads + rank 24", "Attention that stayed as it was", sentence):
        assert words in shown
    text = card(record)
    assert sentence in text
    assert "| key-value cache, bytes per token | 23,040 | 15,360 | −33.3 % |" in text
    assert "| 6 attention | 0.259 | 0.299 | costly | linear map | 147,456 → 36,864 |" in text
    assert "some of its feed-forward blocks and some of its attention are replaced" in text
    assert "attention" not in card(assessment(7))


def test_ci_files_have_the_cache() -> None:
    record = attending(7, directory="here")
    assert f"{CACHE}." in job_summary(record)
    (suite,) = ElementTree.fromstring(junit(record))
    assert str(suite.findall("system-out")[-1].text).endswith(CACHE)


def data_of(spec: Any) -> list[list[dict[str, Any]]]:
    """The rows of every panel or layer of a chart that has rows of its own."""
    found = []
    if isinstance(spec, dict):
        if "values" in spec.get("data", {}):
            found.append(spec["data"]["values"])
        elif "name" in spec.get("data", {}):
            found.append([])
        for value in spec.values():
            found += data_of(value)
    elif isinstance(spec, list):
        for value in spec:
            found += data_of(value)
    return found


def rows_of(record: Record, name: str) -> list[dict[str, Any]]:
    (chart,) = (chart for chart in charts_of(record) if chart.name == name)
    named = chart.spec.get("datasets", {}).values()
    return [row for rows in (*data_of(chart.spec), *named) for row in rows]


@pytest.mark.parametrize("name", ["blocks", "depth", "swap", "ladder", "corpora"])
def test_charts_over_depth_have_both_branches(name: str) -> None:
    found = rows_of(attending_profile(5), name)
    assert {row["branch"] for row in found} == {"FFN", "attention"}


@pytest.mark.parametrize(
    ("name", "kinds"), [("regimes", {"attention", "unsafe attention"}), ("agreement", {"attention"})]
)
def test_scatters_tell_attention_apart(name: str, kinds: set[str]) -> None:
    assert kinds <= {row["kind"] for row in rows_of(attending(7), name) if "kind" in row}


def test_the_dtype_of_a_cache_is_a_plain_word() -> None:
    with pytest.raises(ValidationError):
        KVCache(bytes_per_token_after=1, dtype="<b>")
