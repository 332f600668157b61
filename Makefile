# Everything a newcomer needs: make demo, make test. Both make their own virtual environment first.
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo

.PHONY: help demo test slow lint docs notebooks results bench wheel compat gpu fuzz clean

# The first target is what `make` alone does.
help:
	@echo "make demo       five neural ODEs on 8x8 digits, with a picture; two minutes"
	@echo "make test       lint, types, pages and the fast tests"
	@echo "make slow       the slow tests"
	@echo "make lint       style and types"
	@echo "make docs       the site, in docs/_build/html"
	@echo "make notebooks  the site, with all notebooks run again"
	@echo "make results    the experiments of the results pages; lists their CPU hours and asks first"
	@echo "make bench      all benchmarks, beside other packages"
	@echo "make wheel      builds the wheel and tests it by itself"
	@echo "make compat     the oldest and the newest releases of Python and torch"
	@echo "make gpu        the tests and a benchmark that need CUDA"
	@echo "make fuzz       random calls of all public entry points"
	@echo "make clean      removes what was built"

demo: .venv/.complete
	@$(BIN)/python -m tasks.image_classification --preset demo --model all --out $(DEMO)
	@$(BIN)/python -m tasks.results show $(DEMO) --columns test_accuracy,nfe_forward,seconds --out $(DEMO)/demo.png

# A worker for each core. Tests by themselves: .venv/bin/python -m pytest tests/test_nfe.py
test: lint
	$(BIN)/sphinx-build -W -q -b html -D nb_execution_mode=off docs docs/_build/pages
	$(BIN)/python -m pytest -n auto --dist worksteal

slow: .venv/.complete
	$(BIN)/python -m pytest -m slow -n auto --dist worksteal

# Style; types of the project; types of the README's code and of a script, as a strict user's type checkers see it.
lint: .venv/.complete
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@mkdir -p docs/_build
	awk '/^```python$$/ {print "def part" ++n "() -> None:"; on = 1; next} /^```$$/ {on = 0} on {print "    " $$0}' README.md > docs/_build/readme.py
	$(BIN)/mypy --strict --follow-imports=silent tests/user_script.py docs/_build/readme.py
	$(BIN)/pyright --pythonpath $(BIN)/python tests/user_script.py docs/_build/readme.py
	$(BIN)/python -m tests.code_lines

docs: .venv/.complete
	$(BIN)/sphinx-build -W -q -b html docs docs/_build/html

# Runs all notebooks. `make test` runs none; `make docs` runs those whose code has changed, but does not see changes of hbnode.
notebooks: .venv/.complete
	rm -rf docs/_build/jupyter_cache
	$(BIN)/sphinx-build -E -W -q -b html docs docs/_build/html

# Lists the pages of Results, asks, and runs the commands that are not done. It resumes. YES=1 does not ask.
results: .venv/.complete
	$(BIN)/python -m tasks.results run $(if $(YES),--yes)

# The rivals are installed only for this.
bench: .venv/.complete
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.core
	$(BIN)/python -m benchmarks.solvers
	$(BIN)/python -m benchmarks.strong_damping
	$(BIN)/python -m benchmarks.gradients
	$(BIN)/python -m benchmarks.dense
	$(BIN)/python -m benchmarks.events
	$(BIN)/python -m benchmarks.ode_rnn
	$(BIN)/python -m benchmarks.irregular
	$(BIN)/python -m benchmarks.recurrent
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.hessian_free
	$(BIN)/python -m benchmarks.sde
	$(BIN)/python -m benchmarks.oscillators

# The wheel made of the source distribution, in an environment that holds it and its core dependencies only.
wheel: .venv/.complete
	rm -rf dist .venv-wheel
	$(BIN)/python -m build --quiet
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	.venv-wheel/bin/python -m pip check
	.venv-wheel/bin/python -I tests/installed.py

# The oldest and the newest releases that pyproject.toml allows, on tests that need no extra. Pythons are found on the PATH.
compat:
	$(PYTHON) tests/compat.py

# Needs CUDA: the tests marked gpu, and one table of seconds on the CPU and on the GPU.
gpu: .venv/.complete
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m benchmarks.gpu

# Random calls of all public entry points. FUZZ_MINUTES=60 make fuzz
fuzz: .venv/.complete
	$(BIN)/python -m tests.test_fuzz

clean:
	rm -rf docs/_build docs/_results runs/demo dist .venv-wheel .venv-compat

# constraints.txt pins what the tests are run with.
.venv/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("make needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
