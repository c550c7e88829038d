"""lm-eval's own command line, as docs/tasks.md gives it, runs from any directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from localtasks import DOCUMENT, write_task

DOCS = Path(__file__).parents[2] / "docs" / "tasks.md"
# Without the minute in which it reads its own 14,000 tasks (`include_defaults`).
LM_EVAL = (
    "import runpy, lm_eval.tasks\n"
    "lm_eval.tasks.TaskManager.__init__.__defaults__ = (None, None, False, None)\n"
    "runpy.run_module('lm_eval', run_name='__main__')\n"
)


def test_the_command_of_the_docs_runs_elsewhere(compressed: Path, tmp_path: Path) -> None:
    (line,) = re.findall(r"^.*\blm_eval --model .*$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    write_task(tmp_path / "tasks", "mine", [DOCUMENT] * 4)
    program = tmp_path / "lm_eval.py.txt"
    program.write_text(LM_EVAL, encoding="utf-8")
    for word, value in {"DIR": compressed, "TASKS": tmp_path / "tasks", "NAME": "mine"}.items():
        line = re.sub(rf"\b{word}\b", str(value), line)
    script = f'lm_eval() {{ {sys.executable} -c "$(cat {program})" run --device cpu "$@"; }}; {line}'
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", script], env=env, cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^\|mine +\|.*\|acc ", done.stdout, re.MULTILINE), done.stdout
