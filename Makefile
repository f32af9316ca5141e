# make demo · make test · make bench · make ui     each installs what it needs into .venv first

PYTHON ?= python3
VENV   ?= .venv
ROOT   ?= runs
TEXT   ?= $(or $(APINCSE_SHARED),../shared)/data/corpus/paragraphs.txt.gz
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
TORCH  := $(shell sed -n 's/^torch==//p' constraints.txt)

.PHONY: install demo test lint bench ui clean

install: $(VENV)/.installed

# Torch comes first, since DeepSpeed's build imports it: a CPU build where there is no GPU, from pip if it knows one
# and else through uv, which picks the build that fits the machine. DeepSpeed compiles nothing at installation;
# DS_ACCELERATOR keeps its set-up from asking for a CUDA compiler.
$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"error: {sys.executable} is Python {v}; use 3.11 or newer: make PYTHON=python3.11")'
	@echo "installing into $(VENV); about 2 GB and a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	@if ! command -v nvidia-smi >/dev/null && $(PIP) install --quiet "torch==$(TORCH)+cpu" 2>/dev/null; then :; else \
		$(PIP) install --quiet uv && \
		$(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend=auto "torch==$(TORCH)"; fi
	$(PIP) install --quiet --constraint constraints.txt setuptools wheel packaging ninja
	DS_ACCELERATOR=cpu $(PIP) install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	$(PIP) install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: install
	$(BIN)/python pipeline/run.py --set root=$(ROOT)

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -m "not slow"

bench: install
	@if [ -f "$(TEXT)" ]; then $(BIN)/python benchmarks/corpus.py "$(TEXT)"; \
	else echo "no $(TEXT): set TEXT=file.txt.gz to measure the corpus stage's speed"; fi
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/corpus.py --memory

ui: install
	$(BIN)/mlflow ui --backend-store-uri sqlite:///$(abspath $(ROOT))/mlflow.db

clean:
	rm -rf $(VENV) build *.egg-info
