"""What the README and the pages of docs/ say is true: commands, options, paths, links, code, and what CI runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Compress, sentences
from zoo import compressed, tiny_model, tiny_tokenizer, write

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = (
    *("run", "profile", "plan", "apply", "heal", "check", "info", "compare", "export", "push", "cache", "sample"),
    "frontier",
)
NOT_RUN = re.compile(r"<!-- not run: (needs the Hub|an example of style) -->\s*$")
WHOLE = "compressor|tests|docs|recipes|benchmarks|\\.ci"


@dataclass(frozen=True)
class Code:
    """A fenced block: its language, its lines, and whether a comment above it says that it is not run."""

    language: str
    text: str
    line: int
    skipped: bool


def fences(page: Path) -> list[Code]:
    content = page.read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", content, re.DOTALL | re.MULTILINE):
        above = content[: match.start()]
        found.append(Code(match[1], match[2], above.count("\n") + 2, bool(NOT_RUN.search(above))))
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """What stands in backticks, outside fenced blocks; a span may run over the end of a line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of every `compress …` in fenced blocks and in backticks, without comments and explanations."""
    shell = [code.text.replace("\\\n", " ") for code in fences(page) if code.language in ("", "shell", "bash")]
    lines = [line for text in shell for line in text.splitlines()] + spans(page)
    for line in lines:
        told = re.match(r"(?:.* -m compressor|compress) (\S.*)$", line.strip())
        if told:
            words = re.split(r"\s+#|(?<=\S) {2,}", told[1])[0]
            yield [word for word in shlex.split(words) if word not in ("[MODEL", "…]", "…")]


@pytest.fixture(scope="module")
def helps(compress: Compress) -> dict[str, str]:
    return {name: compress(name, "--help").out for name in COMMANDS}


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_line_parses(page: Path, compress: Compress) -> None:
    for words in command_lines(page):
        if words[0] in ("COMMAND", "--help"):
            continue
        done = compress(*words, "--help")  # options are known, or the line is refused before the help is printed
        assert done.code == 0, (words, done.err)


def test_every_command_is_told_in_the_readme() -> None:
    told = {words[0] for words in command_lines(README)}
    assert set(COMMANDS) - {"run"} <= told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_option_exists(page: Path, helps: dict[str, str]) -> None:
    everything = "".join(helps.values())
    ours = [span for span in spans(page) if span.startswith("--")]
    for option in {word for span in ours for word in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span)}:
        assert re.search(rf"{option}\b", everything), option


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_path_exists(page: Path) -> None:
    shell = "\n".join(code.text for code in fences(page) if code.language in ("", "shell", "bash"))
    named = {span for span in spans(page) if re.fullmatch(rf"(?:{WHOLE})/[\w./-]*|[\w-]+\.(?:yml|toml|txt)", span)}
    named |= set(re.findall(r"(?<![\w./-])(?:tests|recipes|benchmarks)/[\w./-]*\w", shell))
    for path in named - {"corpus.txt"}:  # the reader's own
        assert (ROOT / path).exists(), path


def test_the_map_of_the_readme_names_every_room() -> None:
    named = re.findall(r"^compressor/(\w+)/ ", README.read_text(encoding="utf-8"), re.MULTILINE)
    rooms = {path.name for path in (ROOT / "compressor").iterdir() if (path / "__init__.py").is_file()}
    assert set(named) == rooms
    assert len(named) == len(rooms)


def test_the_tree_of_the_architecture_page_is_the_package() -> None:
    tree = next(
        code.text for code in fences(ROOT / "docs" / "architecture.md") if code.text.startswith("compressor/\n")
    )
    named, room = set(), ""
    for indent, name in re.findall(r"^( {2,4})([\w./]+)", tree, re.MULTILINE):
        room = name if len(indent) == 2 else room
        named.add(name if len(indent) == 2 else room + name)
    package = ROOT / "compressor"
    modules = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name[0] != "_"}
    assert sorted({name for name in named if name.endswith(".py")} ^ modules) == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    kept = [re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in kept}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        place, _, anchor = target.partition("#")
        assert "://" not in target, target  # no page needs the network
        other = page.parent / place if place else page
        assert other.is_file(), target
        assert not anchor or anchor in anchors(other), target


def test_the_site_is_built_without_a_broken_link_and_requests_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//", html), page.name


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the pages assume that the reader has: a model, a text, a compressed model."""
    monkeypatch.chdir(tmp_path)
    model = tiny_model("llama", max_position_embeddings=256, num_hidden_layers=2)
    model.save_pretrained("my-model")
    tiny_tokenizer().save_pretrained("my-model")
    Path("corpus.txt").write_text(sentences(6000), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_python_block_runs(page: Path, desk: Path) -> None:
    """The blocks of a page run one after another, as a reader would run them, on a tiny model."""
    blocks = [code for code in fences(page) if code.language == "python"]
    if any("my-model-lin" in code.text for code in blocks):
        write(compressed("llama"), Path("my-model-lin"))
    names: dict[str, object] = {}
    for code in blocks:
        program = compile("\n" * (code.line - 1) + code.text, str(page), "exec")
        if not code.skipped:
            exec(program, names)


def test_only_blocks_that_say_so_are_not_run() -> None:
    skipped = {f"{page.stem}:{code.text.splitlines()[0]}" for page in PAGES for code in fences(page) if code.skipped}
    assert {name.split(":")[0] for name in skipped} <= {"python-api", "CONTRIBUTING"}
    comments = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if "<!--" in line]
    assert all(NOT_RUN.match(line) for line in comments)
    assert len(comments) == len([code for page in PAGES for code in fences(page) if code.skipped])


def test_every_block_has_a_language_that_is_tested() -> None:
    """`text` is what a terminal showed, mistakes among it: nothing in it is a command to be tried."""
    assert {code.language for page in PAGES for code in fences(page)} <= {"", "shell", "bash", "python", "yaml", "text"}


def test_no_page_names_this_machine() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "mkdocs.yml"]:
        assert not re.search(r"(?<![\w.~])/(?:work|tmp|home|root|Users)/", page.read_text(encoding="utf-8")), page.name


def test_ci_runs_what_the_readme_tells_a_user() -> None:
    commands = re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert commands == ["make browser", "make test"]
    assert all(command in README.read_text(encoding="utf-8") for command in commands)


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        blocks = [line for code in fences(page) for line in code.text.splitlines()]
        named = [match[1] for line in [*spans(page), *blocks] if (match := re.match(r"make ([a-z]+)", line))]
        assert set(named) <= targets, page.name
