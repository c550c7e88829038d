# Two commands for a fresh machine with python3 and make: `make demo` and `make test`. Both reuse .venv afterwards.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test browser docs clean

demo: .venv/installed
	$(BIN)/compress demo --max-dppl 1.0 --out ./demo-lin --overwrite

test: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# The tests of report.html need a Chromium or Chrome on the PATH; without one they are skipped. On Debian, as root:
browser:
	command -v chromium || command -v google-chrome || { apt-get update -qq && apt-get install -qq -y chromium; }

# The site of docs/ in site/; a broken link fails.
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) -e .
	touch $@

.venv/installed-test: .venv/installed
	$(INSTALL) -e '.[test]'
	touch $@

.venv/installed-docs: .venv/installed
	$(INSTALL) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv demo-lin site
