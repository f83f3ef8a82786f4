# make help          lists the targets
# PYTHON=…           interpreter for the environment (default: the first suitable one found)
# PIP_FLAGS=…        extra arguments of pip, e.g. an --index-url with CPU-only builds of torch
# TEST_FLAGS=…       arguments of pytest
# RUN_FLAGS=…        arguments of `python -m hpcattn run`, e.g. "--only 00,01"
# LAB_FLAGS=…        arguments of JupyterLab, e.g. "--no-browser" (root, as in a container, gets --allow-root)
SHELL      := bash
VENV       := .venv
PY         := $(VENV)/bin/python
INSTALLED  := $(VENV)/.installed
EXTRAS     := notebooks,dev
PYTHON     ?=
PIP_FLAGS  ?=
TEST_FLAGS ?= -n logical --maxprocesses 4
RUN_FLAGS  ?=
LAB_FLAGS  ?= $(if $(filter 0,$(shell id -u)),--allow-root)
SUITE      ?= decode

.DEFAULT_GOAL := help
.PHONY: help run test lab bench figures env clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 12

run: env ## execute every notebook, render it and regenerate the figures under build/
	@$(PY) -m hpcattn run $(RUN_FLAGS)

test: env ## lint, check the format and run the tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest $(TEST_FLAGS)

lab: env ## open the notebooks in JupyterLab
	$(PY) -m jupyterlab --ServerApp.root_dir=notebooks $(LAB_FLAGS)

bench: env ## measure one suite: make bench SUITE=decode
	$(PY) -m hpcattn bench --suite $(SUITE)

figures: env ## draw the figures from the recorded data
	$(PY) -m hpcattn figures

env: $(INSTALLED) ## make .venv and install the package, if pyproject.toml changed

clean: ## remove build/ and .venv
	rm -rf build $(VENV)

# A usable interpreter is 3.11 or newer and can make environments; name what is missing otherwise.
define FIND_PYTHON
for python in $${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
  recent=$$python
  "$$python" -c 'import ensurepip, venv' 2>/dev/null && echo "$$python" && exit
done
if [ "$$recent" ]; then
  echo "$$recent cannot make environments: install its venv module (Debian, Ubuntu: apt install python3-venv)"
else
  echo "no Python 3.11 or newer in $${PYTHON:-PATH}: install one, or name it with make PYTHON=…"
fi >&2
exit 1
endef
export FIND_PYTHON PYTHON

$(INSTALLED): pyproject.toml
	@$(PY) -c 'import pip' 2>/dev/null || { python=$$(bash -c "$$FIND_PYTHON") \
	  && echo "making $(VENV) with $$("$$python" -V)" && "$$python" -m venv --clear $(VENV); }
	@echo "installing hpcattn[$(EXTRAS)] into $(VENV) (downloads 3 GB, 0.6 GB with a CPU-only torch)"
	@$(PY) -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -e '.[$(EXTRAS)]'
	@touch $@
