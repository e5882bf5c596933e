# make train: everything from nothing. Any Python 3.11 to 3.13 will do: make train PYTHON=python3.12
# make train ARGS="model.n_layer=8 steps=2000": any override
# make soak TRIALS=300: kills runs 300 times, and injects the other faults in proportion
# make notebooks: executes notebooks/*.py into the .ipynb beside them
# make bench PEER=FOLDER: beside the authors' code, of which FOLDER is the folder `pytorch`

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
CHECKED := --jaxtyping-packages=txl,beartype.beartype
ARGS ?=
TRIALS ?= 100
PEER ?=

.PHONY: train test test-slow soak lint bench notebooks
.DEFAULT_GOAL := train

train: $(VENV)/.installed
	$(BIN)/python train.py $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(CHECKED) --numprocesses=auto --maxprocesses=4 $(ARGS)

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow --numprocesses=auto --maxprocesses=2 $(ARGS)

soak: $(VENV)/.installed
	$(BIN)/python tests/soak.py $(TRIALS)

bench: $(VENV)/.installed
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.speed $(if $(PEER),--peer $(PEER)) $(ARGS)

notebooks: $(VENV)/.installed
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m notebooks.execute $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/.installed: requirements.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 found; name one: make train PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	touch $@
