"""The gate's verdict for machines that read it: a JUnit file, and the summary page of a GitHub job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from compressor.report.card import escape
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress

NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Mapping[str, Any]) -> str:
    """One test case per check; warnings stand in the suite's output."""
    checks = report["checks"]
    failed = [check for check in checks if not check["passed"]]
    seconds = f"{report['timings']['total']:.3f}"
    totals = {"tests": str(len(checks)), "failures": str(len(failed)), "errors": "0", "time": seconds}
    root = ElementTree.Element("testsuites", {"name": "compress check", **totals})
    suite = ElementTree.SubElement(root, "testsuite", {"name": xml(report["directory"]), "skipped": "0", **totals})
    for check in checks:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": "compress.check", "name": xml(check["name"]), "time": "0"}
        )
        said = f"{figure(check['measured'])} (limit {figure(check['limit'])}): {check['detail']}"
        if check["passed"]:
            ElementTree.SubElement(case, "system-out").text = xml(said)
        else:
            ElementTree.SubElement(case, "failure", {"message": xml(said), "type": "budget"}).text = xml(said)
    if report["warnings"]:
        ElementTree.SubElement(suite, "system-err").text = xml("\n".join(report["warnings"]))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def summary(report: Mapping[str, Any]) -> str:
    """A Markdown table of the checks, as GitHub shows it on the page of a job."""
    word = "passed" if report["passed"] else "FAILED"
    lines = [
        f"## compress check: {word}",
        "",
        f"{escape(report['directory'])} against {escape(report['source']['model'])}",
    ]
    lines += ["", "| check | measured | limit | | |", "|---|---:|---:|---|---|"]
    for check in report["checks"]:
        verdict = "passed" if check["passed"] else "**FAILED**"
        figures = f"{figure(check['measured'])} | {figure(check['limit'])}"
        lines.append(f"| {escape(check['name'])} | {figures} | {verdict} | {escape(check['detail'])} |")
    lines += ["", *(f"- warning: {escape(warning)}" for warning in report["warnings"])]
    return "\n".join(lines).rstrip() + "\n"


def append_summary(file: str, report: Mapping[str, Any], progress: Progress) -> None:
    """A summary that cannot be written does not change the verdict."""
    try:
        with open(file, "a", encoding="utf-8") as out:
            out.write(summary(report) + "\n")
    except OSError as error:
        progress.say(f"warning: the step summary {file} cannot be written: {error.strerror}")


def refuse_unwritable(option: str, file: Path | None) -> None:
    """Say before the work that a file cannot be written."""
    if file is None:
        return
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise InputError(f"{option} {file} cannot be written; name a file in an existing directory")


def figure(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4f}" if abs(value) < 10 else f"{value:.3f}"


def xml(text: str) -> str:
    """Without the characters that no XML file may hold."""
    return NOT_XML.sub("\ufffd", str(text))
