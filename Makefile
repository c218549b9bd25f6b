# SPDX-License-Identifier: Apache-2.0
# Every target makes its own environment first; a second call finds it ready.
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-full lint format bench clean

demo: $(VENV)/.ready
	$(BIN)/geojax demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 -m "not full" --durations 10

test-full: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --durations 0

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	sh scripts/typecheck $(VENV)

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/codec.py
	$(BIN)/geojax bench geomesh

$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup
	@PYTHON="$(PYTHON)" sh scripts/setup $(VENV)

clean:
	rm -rf $(VENV) build *.egg-info
