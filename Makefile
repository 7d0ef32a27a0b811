# make study     install into .venv, measure what is out of date, print the results
# make measure   the same with every cell of the study measured anew on this machine
# make compare   A=hw/one B=hw/other: what two git revisions measured, machine by machine
# make test      linters, type checks and tests
# make coverage  lines and branches of specdec that the tests reach
# make mutants   small faults put into specdec: does a test notice each? A quarter of an hour; see notes/mutants.md
# make deps      after adding or removing an import: rewrite the lists of modules in dvc.yaml
# make clean     remove .venv and caches; results and downloaded weights stay
PYTHON ?= python3
BIN := .venv/bin

.PHONY: study measure compare test coverage mutants deps clean

study: .venv/runtime
	$(BIN)/python pipeline/run_study.py

measure: .venv/runtime
	$(BIN)/python pipeline/run_study.py --measure

compare: .venv/runtime
	$(BIN)/python pipeline/compare.py $(if $(and $(A),$(B)),"$(A)" "$(B)",$(error which revisions? make compare A=hw/one B=hw/other))

test: .venv/development
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -q -n logical --dist loadfile

coverage: .venv/development
	$(BIN)/python -m pytest -q -n logical --dist loadfile --cov specdec --cov-branch --ignore tests/test_pipeline.py

mutants: .venv/mutants
	$(BIN)/python tests/mutants.py

deps: .venv/runtime
	$(BIN)/python tests/sync_deps.py

clean:
	rm -rf .venv .mutants .mypy_cache .pytest_cache .ruff_cache .hypothesis dvc_plots *.egg-info
	find specdec pipeline tests -name __pycache__ -prune -exec rm -rf {} +

# These files only mark that the environment is as new as the lists it was made from.
.venv/runtime: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("error: Python 3.11 or newer is needed: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -r requirements.txt
	$(BIN)/python -m pip install -q --no-deps -e .
	@touch $@

.venv/development: .venv/runtime requirements-dev.txt
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	@touch $@

.venv/mutants: .venv/development requirements-mutants.txt
	$(BIN)/python -m pip install -q -r requirements-mutants.txt
	@touch $@
