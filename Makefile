# SPDX-License-Identifier: Apache-2.0
# Every target makes its own environment first; a second call finds it ready.
VENV := .venv
BIN := $(VENV)/bin

MORE := .venv-more

.PHONY: demo test test-runs test-full test-aot test-lm-eval lint format bench clean

demo: $(VENV)/.ready
	$(BIN)/geojax demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not full and not runs" --durations 10

# Whole runs: every command in README, examples, a wheel, a model's recipe, runs that are stopped.
test-runs: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "runs and not full" --durations 0

test-full: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations 0

# Programs compiled for GPUs that are not here: with lm-eval half a gigabyte more to download.
test-aot: $(MORE)/.ready
	$(MORE)/bin/python -m pytest -m "aot and not full" --durations 5

# lm-eval's client of completions against a server.
test-lm-eval: $(MORE)/.ready
	$(MORE)/bin/python -m pytest tests/serve/test_serve_lm_eval.py

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	sh scripts/typecheck $(VENV)

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/program.py
	$(BIN)/python benchmarks/reshard.py
	$(BIN)/geojax bench geomesh

$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup
	@PYTHON="$(PYTHON)" sh scripts/setup $(VENV) test,lint

$(MORE)/.ready: pyproject.toml constraints.txt scripts/setup
	@PYTHON="$(PYTHON)" sh scripts/setup $(MORE) test,aot,lm-eval

clean:
	rm -rf $(VENV) $(MORE) build *.egg-info
