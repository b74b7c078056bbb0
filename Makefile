# `make demo` and `make test` need Python >= 3.11, a C++17 compiler and make; the rest goes into .venv.
#   make TORCH_INDEX=URL ...   takes torch from that package index
#   make STRICT=1 ...          a part skipped for want of a tool is a failure
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
STRICT ?= 0
MAX_JOBS ?= 2
export MAX_JOBS

BIN := $(VENV)/bin
RUN := $(BIN)/python
PIP := $(RUN) -m pip --disable-pip-version-check --quiet
NATIVE := $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*.cuh csrc/*/*.cu)
TESTS := $(RUN) -m pytest --junitxml=build/tests.xml

.PHONY: help demo test test-long native cuda-check bench lint format readme build clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train four replicas with and without EDiT, compare, draw runs/demo/report.png"
	@echo "make test       build; C++ tests, plain and under sanitizers; Python tests; a summary"
	@echo "make test-long  the same with the slow tests"
	@echo "make native     the C++ tests alone"
	@echo "make cuda-check the CUDA build against a CUDA torch, in .venv-cuda (6 GB); no GPU needed"
	@echo "make bench      kernel benchmarks against this machine's memory bandwidth"
	@echo "make lint       ruff, mypy, clang-format         (make format: rewrite)"
	@echo "make readme     write the table of defaults into README.md"
	@echo "make clean      remove what was built; .venv stays"

demo: build
	$(RUN) -m edit_ext.bench.demo --out runs/demo

test: build
	@mkdir -p build && rm -f build/tests.xml
	$(TESTS) -m "not slow and not gpu"; code=$$?; \
	$(RUN) python_tests/summary.py build/tests.xml --strict $(STRICT) && exit $$code

test-long: build
	@mkdir -p build && rm -f build/tests.xml
	$(TESTS) -m "not gpu"; code=$$?; \
	$(RUN) python_tests/summary.py build/tests.xml --strict $(STRICT) && exit $$code

native: $(VENV)/.installed
	$(RUN) -m pytest python_tests/test_native.py -v

# Exit code 3 says that a tool is missing.
cuda-check: $(VENV)/.installed
	@$(RUN) python_tests/cuda_check.py; code=$$?; \
	if [ $$code -eq 3 ] && [ $(STRICT) -ne 1 ]; then exit 0; else exit $$code; fi

bench: build
	@mkdir -p runs/bench
	$(BIN)/edit-ext bench kernels --n 33554432 --json runs/bench/kernels.json

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

readme: build
	$(RUN) python_tests/test_readme.py

build: $(VENV)/.registered

# The stamps live in .venv, so that removing it starts everything anew.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("edit_ext needs Python 3.11 or newer, this is %d.%d: make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: constraints.txt $(VENV)/.created
	@echo "installing constraints.txt into $(VENV) (torch alone is large: this takes a while)"
	$(if $(TORCH_INDEX),$(PIP) install --no-deps --index-url $(TORCH_INDEX) -c constraints.txt torch)
	$(PIP) install -r constraints.txt
	@touch $@

$(VENV)/.compiled: $(filter-out csrc/tests/%,$(NATIVE)) setup.py $(VENV)/.installed
	@$${CXX:-c++} --version > /dev/null || { echo "edit_ext needs a C++17 compiler: install g++ or clang++, or set CXX"; exit 1; }
	$(RUN) setup.py --quiet build_ext --inplace
	@touch $@

$(VENV)/.registered: pyproject.toml | $(VENV)/.compiled
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf build dist *.egg-info edit_ext/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.compiled $(VENV)/.registered
