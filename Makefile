# `make demo` and `make test` are all a newcomer needs; `make help` lists the rest.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

VENV := $(CURDIR)/.venv
# The locked CMake, Ninja and formatters come before the system's.
export PATH := $(VENV)/bin:$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
export PHASEKV_DEMO_MODEL ?= $(HOME)/.cache/phasekv/SmolLM2-135M-Instruct
# Test files run side by side, each worker's engines with one thread.
export PYTEST_WORKERS ?= $(shell nproc)
# Without bytecode every process compiles torch and vLLM anew, which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE
# Nothing here needs a model hub, and nothing is reported to anybody.
export HF_HUB_OFFLINE ?= 1
export DO_NOT_TRACK ?= 1

# Environments that have other versions of what we have; what they do not bring themselves they take
# from .venv. $(call overlay,FOLDER,REQUIREMENTS) makes or completes one.
PEERS := $(CURDIR)/.venv-peers
TRANSFORMERS_4 := $(CURDIR)/.venv-transformers4
PRINT_PACKAGES := import sysconfig; print(sysconfig.get_paths()["purelib"])
define overlay
@test -x "$(1)/bin/python" || python -m venv "$(1)"
@"$(1)/bin/python" -m pip install --quiet --no-deps -r $(2)
@python -c '$(PRINT_PACKAGES)' >"$$("$(1)/bin/python" -c '$(PRINT_PACKAGES)')/zz_phasekv.pth"
endef

WARNINGS_AS_ERRORS := $(if $(CI),ON,OFF)
# Each takes minutes; the newer ones differ in nothing that the kernels ask for.
CUDA_ARCHITECTURES := $(if $(CI),-DCMAKE_CUDA_ARCHITECTURES="80-real;90-real;90-virtual")
PACKAGE_SOURCES := $(shell find include src kernels python CMakeLists.txt pyproject.toml README.md LICENSE \
    -not -name '*.pyc' -not -name __pycache__ 2>/dev/null)
CXX_FILES = $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
TIDY_FILES = $(shell git ls-files 'src/*.cpp' 'python/bindings/*.cpp')
# GCC's omp.h, after clang's own headers; flags that only GCC knows, and what its library uses of itself,
# are not errors.
TIDY_ARGS = --extra-arg=-idirafter$(shell c++ -print-file-name=include) \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-deprecated-declarations
CMAKE_FILES = $(shell git ls-files '*CMakeLists.txt' '*.cmake')
INSTALLED := $(VENV)/.phasekv-installed

.PHONY: help env configure build install model demo test test-cpp test-python test-transformers-4 \
    lint format peers bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## Make or complete .venv and, where allowed, install the Debian packages
	@python/environment/setup.sh

configure: env
	@test -f build/build.ninja && cmake build >/dev/null || \
	  { echo "==> Configuring build/"; \
	    cmake --preset release -DPHASEKV_PYTHON=ON -DPython_EXECUTABLE=$(VENV)/bin/python \
	      -DPHASEKV_WARNINGS_AS_ERRORS=$(WARNINGS_AS_ERRORS) $(CUDA_ARCHITECTURES); }

build: configure ## Build the C++ library, its tests and the Python module in build/
	@echo "==> Building build/"
	@cmake --build build

install: configure $(INSTALLED) ## Install the Python package into .venv

# pip builds in build/ too, where everything it needs is compiled by then. Tests are not needed.
$(INSTALLED): $(PACKAGE_SOURCES)
	@echo "==> Building the Python module"
	@cmake --build build --target _core
	@echo "==> Installing phasekv into .venv"
	@python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall --no-index \
	  -C build-dir=build -C build.targets=_core -C cmake.define.PHASEKV_TESTS=ON .
	@touch $@

model: install
	@test -f "$(PHASEKV_DEMO_MODEL)/config.json" || { echo "==> Converting the demo model"; \
	  phasekv convert --if-missing; }

demo: model ## Run the memory and the agent demo and write their report
	@phasekv demo memory
	@phasekv demo agent

test: model ## Run the C++ and the Python tests
	@status=0; \
	for part in test-cpp test-python test-transformers-4; do \
	  $(MAKE) --no-print-directory $$part || status=1; \
	done; exit $$status

# Two tests at a time have more threads than cores: those that wait must not spin.
test-cpp: build
	@echo "==> C++ tests"
	@OMP_WAIT_POLICY=passive ctest --test-dir build --output-on-failure --timeout 300 \
	  -j $(CMAKE_BUILD_PARALLEL_LEVEL)

test-python: model
	@echo "==> Python tests"
	@python -m pytest --numprocesses $(PYTEST_WORKERS) --dist loadfile \
	  --no-loadscope-reorder $(PYTEST_ARGS)

test-transformers-4: model ## Run the tests of the transformers adapter with transformers 4.57
	@echo "==> Python tests with transformers 4"
	$(call overlay,$(TRANSFORMERS_4),tests/python/transformers4.txt)
	@"$(TRANSFORMERS_4)/bin/python" -m pytest --numprocesses $(PYTEST_WORKERS) --dist loadfile \
	  tests/python/engine/test_transformers_*.py tests/python/engine/test_quantized_cache.py \
	  tests/python/analysis $(PYTEST_ARGS)

lint: configure ## Run every formatter and linter without changing a file
	@status=0; \
	run() { echo "==> $$1"; shift; "$$@" || status=1; }; \
	run clang-format clang-format --dry-run --Werror $(CXX_FILES); \
	run gersemi gersemi --check $(CMAKE_FILES); \
	run "ruff format" ruff format --check .; \
	run "ruff check" ruff check .; \
	run mypy mypy; \
	run clang-tidy xargs -P $(CMAKE_BUILD_PARALLEL_LEVEL) -n 4 \
	  clang-tidy --quiet -p build $(TIDY_ARGS) <<<"$(TIDY_FILES)"; \
	exit $$status

format: env ## Format every file
	@clang-format -i $(CXX_FILES)
	@gersemi --in-place $(CMAKE_FILES)
	@ruff format . && ruff check --fix .

peers: install ## Make .venv-peers with kvpress, for benchmarks/peers.py
	$(call overlay,$(PEERS),benchmarks/peers.txt)

bench: model ## Measure the prefill speedup
	@python benchmarks/prefill.py $(BENCH_ARGS)

clean: ## Remove the build, but not .venv
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
