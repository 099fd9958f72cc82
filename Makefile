# Every target makes its own virtual environment; nothing outside this directory changes.
PYTHON ?= python3
PYTEST = python -m pytest -n 2 $(PYTEST_ARGS)

.PHONY: help quickstart test faults compat lint docs checks bench clean

help:
	@echo "make quickstart   pretrain a small model on real text, save it, load it back and generate (about 5 minutes)"
	@echo "make test         run the test suite"
	@echo "make faults       kill, cut, fill and lock, many times over (FAULTS_ROUNDS=20; the suite does it once)"
	@echo "make compat       run the tests marked compat against the oldest supported transformers"
	@echo "make lint         ruff and mypy"
	@echo "make docs         build the documentation in site/, strictly and offline"
	@echo "make checks       lint, docs, test and compat"
	@echo "make bench        measure speed and memory side by side with transformers' models (about 10 minutes)"

quickstart: .venv/quickstart
	.venv/bin/python -m training.pretrain configuration/recipes/quickstart.yaml

test: .venv/test
	OMP_NUM_THREADS=1 .venv/bin/$(PYTEST)

faults: .venv/test
	OMP_NUM_THREADS=1 FAULTS_ROUNDS=$${FAULTS_ROUNDS:-20} .venv/bin/$(PYTEST) tests/faults

compat: .venv-oldest/test
	OMP_NUM_THREADS=1 .venv-oldest/bin/$(PYTEST) -m compat

lint: .venv/test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --quiet

checks: lint docs test compat

bench: .venv/bench
	.venv/bin/python -m benchmarks.attention
	.venv/bin/python -m benchmarks.decode --lengths 128 2048 4096 --budget 1
	.venv/bin/python -m benchmarks.prefill
	.venv/bin/python -m benchmarks.training --num_hidden_layers 2
	.venv/bin/python -m benchmarks.compiled

.venv/quickstart: setup.cfg constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[training]'
	touch $@

.venv/bench: setup.cfg constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

.venv/docs: setup.cfg constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[training,docs]'
	touch $@

.venv/test: setup.cfg constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[training,docs,test]'
	touch $@

.venv-oldest/test: setup.cfg constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[training,test]'
	touch $@

clean:
	rm -rf .venv .venv-oldest build site *.egg-info
