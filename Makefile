# Everything a checkout needs, from nothing but Python and make.
#
#   make demo      train and sample a small MoE language model    TEXT=file  STEPS=n
#   make test      the tests that need no GPU                     JOBS=n     ARGS="-k rope"
#   make test-gpu  every operation on a GPU                       JOBS=n     ARGS="-k rope"
#   make sanitize  core cases under compute-sanitizer             JOBS=n     LIMIT=seconds  COMPUTE_SANITIZER=path
#   make check     lint, format, types, and the repository's rules
#   make aot       compile the Triton kernels for GPUs that need not be here; registers, spills, shared memory; those in
#                  Gluon with the newest Triton too
#   make bench     time the operations on this machine            ARGS="..."
#   make docs      run every snippet and follow every link of the documentation
#
# PYTHON names the interpreter that makes the virtual environment; VENV where it goes.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install
# Interpreted on the CPU, which is set before Triton is imported: a run of its own.
INTERPRETED := $(wildcard tests/ops/*/test_triton.py tests/ops/*/test_tuned.py) \
  tests/ops/grouped_gemm/test_gradients_alone.py tests/ops/grouped_gemm/test_schedule.py \
  tests/unit/test_epilogues_device.py tests/unit/test_remembered.py
# The kernels in Gluon, which moves between releases of Triton; and the newest one, which stands before the pinned one.
GLUON := $(wildcard tests/aot/test_hopper*.py)
NEWEST := $(abspath $(VENV))/newest
DOCS := tests/repo/test_readme.py tests/repo/test_docs_snippets.py

export TEXT STEPS

.PHONY: help demo test test-gpu sanitize check aot bench docs clean
.DELETE_ON_ERROR:

help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(VENV)/demo.stamp
	@$(BIN)/anabranch demo $${TEXT:+--text "$$TEXT"} $${STEPS:+--steps "$$STEPS"} $(ARGS)

# The second runs whether the first passes or not. 5: ARGS picks none of what is interpreted.
test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not gpu' --ignore tests/aot $(ARGS); plain=$$?; \
	  TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not gpu' $(INTERPRETED) $(ARGS); \
	  interpreted=$$?; test $$plain -eq 0 -a \( $$interpreted -eq 0 -o $$interpreted -eq 5 \)

# What needs a GPU's whole memory runs alone, after the others, and whether they pass or not. 5: ARGS picks none.
test-gpu: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'gpu and not large' $(ARGS); many=$$?; \
	  $(BIN)/python -m pytest -m 'gpu and large' tests/gpu $(ARGS); large=$$?; \
	  test \( $$many -eq 0 -o $$many -eq 5 \) -a \( $$large -eq 0 -o $$large -eq 5 \)

sanitize: $(VENV)/test.stamp
	JOBS=$(JOBS) $(BIN)/python tests/gpu/sanitize.py

check: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/repo

# The second runs whether the first passes or not, with what Gluon moves most between. 5: ARGS picks none of it.
aot: $(VENV)/test.stamp $(VENV)/newest.stamp
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/aot $(ARGS); pinned=$$?; \
	  PYTHONPATH="$(NEWEST)" $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(GLUON) $(ARGS); newest=$$?; \
	  test $$pinned -eq 0 -a \( $$newest -eq 0 -o $$newest -eq 5 \)

bench: $(VENV)/demo.stamp
	$(BIN)/anabranch bench $(ARGS)

docs: $(VENV)/test.stamp
	$(BIN)/python -m pytest -q $(DOCS)

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The environment grows in layers, each redone when its pins are newer than its stamp. torch comes first and alone, so that
# nothing else can choose its build.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than Python 3.11; name another with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/torch.stamp: requirements/torch.txt requirements/triton.txt | $(BIN)/python
	@echo "Installing torch into $(VENV); the first time, this can take some minutes."
	$(PIP) -r requirements/torch.txt
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) -r requirements/triton.txt
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp requirements/demo.txt pyproject.toml
	$(PIP) -r requirements/demo.txt
	$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp requirements/test.txt
	$(PIP) -r requirements/test.txt
	@touch $@

$(VENV)/newest.stamp: $(VENV)/torch.stamp requirements/triton-newest.txt
	rm -rf $(NEWEST)
	$(PIP) --no-deps --target $(NEWEST) -r requirements/triton-newest.txt
	@touch $@
