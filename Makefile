# Everything a newcomer needs: make demo, make test. Both make their own virtual environment first.
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo

.PHONY: demo test slow lint docs notebooks results bench clean

demo: .venv/.complete
	@$(BIN)/python -m tasks.image_classification --preset demo --model all --out $(DEMO)
	@$(BIN)/python -m tasks.plot $(DEMO) --out $(DEMO)/demo.png

# A worker for each core. Tests by themselves: .venv/bin/python -m pytest tests/test_nfe.py
test: lint docs
	$(BIN)/python -m pytest -n auto --dist worksteal

slow: .venv/.complete
	$(BIN)/python -m pytest -m slow

# Style; types of the project; types of the README's code, as a strict user's type checkers see it.
lint: .venv/.complete
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports=silent tests/user_script.py
	$(BIN)/pyright --pythonpath $(BIN)/python tests/user_script.py

docs: .venv/.complete
	$(BIN)/sphinx-build -W -q -b html docs docs/_build/html

# Runs all notebooks. `make docs` runs those whose code has changed, but does not see changes of hbnode.
notebooks: .venv/.complete
	rm -rf docs/_build/jupyter_cache
	$(BIN)/sphinx-build -E -W -q -b html docs docs/_build/html

# Runs what is missing of the experiments behind docs/results; days of one thread in all. It resumes.
results: .venv/.complete
	$(BIN)/python -m tasks.results run

# The rivals are installed only for this.
bench: .venv/.complete
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.core
	$(BIN)/python -m benchmarks.solvers
	$(BIN)/python -m benchmarks.strong_damping
	$(BIN)/python -m benchmarks.gradients
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.dense
	$(BIN)/python -m benchmarks.events
	$(BIN)/python -m benchmarks.images
	$(BIN)/python -m benchmarks.ode_rnn
	$(BIN)/python -m benchmarks.irregular
	$(BIN)/python -m benchmarks.recurrent
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.hessian_free
	$(BIN)/python -m benchmarks.sde
	$(BIN)/python -m benchmarks.oscillators

clean:
	rm -rf docs/_build docs/_results runs/demo

# constraints.txt pins what the tests are run with.
.venv/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("make needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
