# Two commands matter: `make demo` and `make test`. Both set up .venv by themselves.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint clean

demo: .venv/ready
	$(BIN)/slipstream generate "What is the capital of France, and what is it known for?" --max-tokens 96
	# What drafting gains here: lookup in the text, then lookup and a head that comes with slipstream.
	$(BIN)/slipstream bench --methods suffix,combined --limit 3 --max-tokens 96 --rounds 1 \
	  --speculative-config '{"head": "mtp", "controller": "fixed", "num_speculative_tokens": 6}'

test: .venv/ready lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto
	# What installations without native kernels run.
	OMP_NUM_THREADS=1 SLIPSTREAM_KERNELS=torch $(BIN)/pytest -n auto -m "not weights" \
	  tests/unit/models tests/unit/kernels tests/e2e/test_engine_equals_reference.py

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

.venv/ready: pyproject.toml
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'Python 3.11 or newer is needed'"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
