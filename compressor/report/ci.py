"""The verdict of a check as files for machines: a JUnit file, and the summary page of a GitHub job."""

from __future__ import annotations

import os
import re
from pathlib import Path
from xml.etree import ElementTree

from compressor.report.card import escape
from compressor.report.formats import MISSING, cache_words
from compressor.report.record import Record
from compressor.runtime.errors import InputError
from compressor.runtime.figures import signed
from compressor.runtime.progress import Progress

NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(record: Record) -> str:
    """One test case per check; warnings stand in the suite's output."""
    failed = [check for check in record.checks if not check.passed]
    seconds = f"{record.timings['total']:.3f}"
    totals = {"tests": str(len(record.checks)), "failures": str(len(failed)), "errors": "0", "time": seconds}
    root = ElementTree.Element("testsuites", {"name": "compress check", **totals})
    name = remove_controls(str(record.directory))
    suite = ElementTree.SubElement(root, "testsuite", {"name": name, "skipped": "0", **totals})
    for check in record.checks:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": "compress.check", "name": remove_controls(check.name), "time": "0"}
        )
        message = remove_controls(f"{figure(check.measured)} (limit {figure(check.limit)}): {check.detail}")
        if check.passed:
            ElementTree.SubElement(case, "system-out").text = message
        else:
            ElementTree.SubElement(case, "failure", {"message": message, "type": "budget"}).text = message
    if about := about_lines(record):
        ElementTree.SubElement(suite, "system-out").text = "\n".join(about)
    if record.warnings:
        ElementTree.SubElement(suite, "system-err").text = remove_controls("\n".join(record.warnings))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def summary(record: Record) -> str:
    """A Markdown table of the checks, as GitHub shows it on the page of a job."""
    lines = [
        f"## compress check: {'passed' if record.passed else 'FAILED'}",
        "",
        f"{escape(record.directory)} against {escape(record.source.model)}",
    ]
    lines += ["", "| check | measured | limit | | |", "|---|---:|---:|---|---|"]
    for check in record.checks:
        verdict = "passed" if check.passed else "**FAILED**"
        figures = f"{figure(check.measured)} | {figure(check.limit)}"
        lines.append(f"| {escape(check.name)} | {figures} | {verdict} | {escape(check.detail)} |")
    for line in about_lines(record):
        lines += ["", f"{line}."]
    lines += ["", *(f"- warning: {escape(warning)}" for warning in record.warnings)]
    return "\n".join(lines).rstrip() + "\n"


def about_lines(record: Record) -> list[str]:
    """What is said beside the checks: the nearness to the source, and the key-value cache where it is smaller."""
    return [*([str(record.fidelity)] if record.fidelity else []), *filter(None, [cache_words(record.kv_cache)])]


def append_summary(file: str, record: Record, progress: Progress) -> None:
    """A summary that cannot be written does not change the verdict."""
    try:
        with open(file, "a", encoding="utf-8") as out:
            out.write(summary(record) + "\n")
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
    return MISSING if value is None else signed(value, ".4f") if abs(value) < 10 else f"{value:.3f}"


def remove_controls(text: str) -> str:
    """The text with a replacement character for every character that XML does not allow."""
    return NOT_XML.sub("\ufffd", text)
