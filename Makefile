# make demo | test | test-all | check | format | bench | test-slow | test-timm | clean
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all check format bench test-slow test-timm clean

demo: .venv/ready
	$(BIN)/memoro demo

test: .venv/ready
	$(BIN)/python -m pytest

# The slow lanes, each with an environment or downloads of its own, are added here.
test-all: test test-slow test-timm

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/ready
	$(BIN)/memoro bench engine

# timm needs torchvision, which needs its own build of torch: a separate environment of several gigabytes.
test-timm: .venv-timm/ready
	.venv-timm/bin/python -m pytest tests_timm

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.venv-timm/ready: pyproject.toml tests_timm/requirements.txt
	$(PYTHON) -m venv .venv-timm
	.venv-timm/bin/pip install --quiet --disable-pip-version-check -r tests_timm/requirements.txt
	.venv-timm/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf .venv .venv-timm .mypy_cache .ruff_cache .pytest_cache .hypothesis
