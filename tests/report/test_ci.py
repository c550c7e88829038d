"""The files of a check for machines: names that would break out of XML or a Markdown table do not."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from records_cards import FIDELITY, measured

from compressor.report.ci import junit, summary
from compressor.report.fidelity import Fidelity

HOSTILE = "a<b>&\"'|`$(x)\x07\x1b\n]]>"
RECORD = measured(
    directory=f"/models/{HOSTILE}",
    source={"model": f"{HOSTILE}/model", "weights_sha256": ""},
    passed=False,
    warnings=[f"a warning | of {HOSTILE}"],
    timings={"total": 1.0},
    checks=[
        {"name": f"task {HOSTILE}\ud800", "passed": False, "limit": float("nan"), "detail": HOSTILE},
        {"name": f"perplexity {HOSTILE}", "passed": True, "measured": 1e9, "limit": -0.0, "detail": "|" * 3},
    ],
)


def test_hostile_names_are_still_xml() -> None:
    (suite,) = ElementTree.fromstring(junit(RECORD))
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("2", "1")
    first, second = suite.iter("testcase")
    assert first.attrib["name"] == "task a<b>&\"'|`$(x)\ufffd\ufffd\n]]>\ufffd"
    assert (first.find("failure") is None, second.find("failure") is None) == (False, True)
    (warning,) = suite.iter("system-err")
    assert str(warning.text).startswith("a warning | of a<b>")


def test_fidelity_is_told_with_and_without_a_limit() -> None:
    record = RECORD.with_parts(fidelity=Fidelity.model_validate(FIDELITY))
    assert "\nKL from the source 0.0123 nats per token (0.0110 … 0.0140); 94.1 % of the most likely" in summary(record)
    (suite,) = ElementTree.fromstring(junit(record))
    (told,) = suite.findall("system-out")
    assert str(told.text).startswith("KL from the source 0.0123 nats per token")


def test_pipes_in_the_summary_are_escaped() -> None:
    text = summary(RECORD)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert [len(row) for row in rows] == [5] * 4
    assert rows[2][1:4] == ["–", "nan", "**FAILED**"]
    assert rows[3][4] == r"\|\|\|"
    assert "<b>" not in text.replace(r"\<b\>", "")
