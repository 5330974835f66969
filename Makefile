# make demo | test | docs | test-all | check | format | bench | test-lab | test-slow | test-timm | test-serve | test-browser | test-ray | test-oldest | test-integrations | dist | test-release | clean
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test docs test-all check format bench test-lab test-slow test-timm test-serve test-browser test-ray \
	test-oldest test-integrations dist test-release clean

demo: .venv/ready
	$(BIN)/memoro demo

test: .venv/ready
	@echo "left out: the tests of the laboratory (make test-lab), in a browser (make test-browser), with timm (make test-timm) and others (make test-all)"
	$(BIN)/python -m pytest

# The site: build/site/index.html. Building and reading it need no network, once .venv-docs is there.
docs: .venv/ready .venv-docs/ready
	rm -rf build/reference
	PYTHONPATH=scripts $(BIN)/python -m website build/reference
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

# Each of these has an environment or downloads of its own, or takes long.
test-all: test test-lab test-slow test-timm test-serve test-browser test-ray test-oldest test-integrations test-release

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow tests tests/lab tests/scripts

# What is for studying the method: memoro lab, and the scripts behind results/.
test-lab: .venv/ready
	$(BIN)/python -m pytest tests/lab tests/scripts

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/ready
	$(BIN)/memoro lab bench engine

# timm needs torchvision, which needs its own build of torch: a separate environment of several gigabytes.
test-timm: .venv-timm/ready
	.venv-timm/bin/python -m pytest tests_timm

# The pages and the site in a real browser. Screenshots are left in tests_browser/screenshots.
test-browser: .venv/ready docs
	@command -v chromium >/dev/null || { echo "chromium is not on the PATH. Install it with: sudo apt-get install chromium"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -r tests_browser/requirements.txt
	npm install --prefix tests_browser --no-package-lock --silent
	$(BIN)/python -m pytest -n 0 tests_browser

# Bulk prediction on a Ray cluster of this machine.
test-ray: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest -n 0 tests_ray

# Other people's clients against `memoro serve`, which runs in .venv: they know it by its address only.
test-serve: .venv/ready .venv-serve/ready
	.venv-serve/bin/python -m pytest tests_serve

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.venv-timm/ready: pyproject.toml tests_timm/requirements.txt
	$(PYTHON) -m venv .venv-timm
	.venv-timm/bin/pip install --quiet --disable-pip-version-check -r tests_timm/requirements.txt
	.venv-timm/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

.venv-oldest/ready: pyproject.toml scripts/oldest.py
	$(PYTHON) -m venv .venv-oldest
	$(PYTHON) scripts/oldest.py > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt -e '.[dev]'
	touch $@

.venv-release/ready:
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet --disable-pip-version-check build twine pytest pytest-xdist
	touch $@

.venv-integrations/ready: pyproject.toml tests_integrations/requirements.txt
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/pip install --quiet --disable-pip-version-check -r tests_integrations/requirements.txt
	.venv-integrations/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

.venv-docs/ready: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

.venv-serve/ready: tests_serve/requirements.txt
	$(PYTHON) -m venv .venv-serve
	.venv-serve/bin/pip install --quiet --disable-pip-version-check -r tests_serve/requirements.txt
	touch $@

# The oldest versions that pyproject.toml allows.
test-oldest: .venv-oldest/ready
	.venv-oldest/bin/python -m pytest

# Wheel and sdist in dist/; then both in clean environments, the core and each extra (several gigabytes).
dist: .venv-release/ready
	rm -rf dist
	.venv-release/bin/python -m build
	.venv-release/bin/twine check --strict dist/*

test-release: dist
	.venv-release/bin/python -m pytest tests_release

# Other people's libraries with memoro, each as the guide shows it (docs/integrations.md).
test-integrations: .venv-integrations/ready
	.venv-integrations/bin/python -m pytest tests_integrations

clean:
	rm -rf .venv .venv-timm .venv-serve .venv-docs .venv-oldest .venv-release .venv-integrations build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
