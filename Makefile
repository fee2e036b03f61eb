# A clean clone needs nothing but Python 3.10 or newer: every target first makes the environment it needs.
#
#   make quickstart   set up, then run examples/quickstart.py
#   make test         tests and doctests          PYTEST_ARGS="-k name"  JOBS=3
#   make compile-all  every configuration of the kernels for every architecture, of which the tests compile a sample;
#                     and every combination of cross-entropy's options
#   make lint types   ruff and clang-format; mypy
#   make sanitize     the core under address, undefined-behaviour and thread sanitizers; 5 to 10 minutes
#   make bench        every script in benchmarks/ BENCH_ARGS=--smoke  BENCHMARKS=benchmarks/rms_norm.py
#   make tables       tunes opgraft-kernels on all GPUs of this machine, into the tables that it ships; another run goes on
#                     BUDGET=10m
#   make wheel        a wheel with a core for each torch, in dist/; fetches them, some hundred MB each, for their
#                     headers           TORCHES="2.13.0 2.15.0"
#   make cutedsl      CuteDSL and FlashAttention-4, beside the environment: tests then compile their kernels, which
#                     needs no GPU; 60 MB, NVIDIA's licence
#   make docs         the documentation as a site, in build/site, the reference from the docstrings included
#   make clean        what was built, and the caches; `make distclean` removes the environment too
#
# PYTHON=python3.12 picks the interpreter, TORCH="torch==2.13.0" the torch to install where the interpreter has
# none, VENV=.venv the environment's place.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
# One more than CI has cores: tests wait for processes that they start.
JOBS ?= 3
PYTEST_ARGS ?=
BENCH_ARGS ?=
BUDGET ?= 10m
# One release of each minor version: a core fits exactly the release that it was compiled for.
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
BENCHMARKS ?= $(sort $(wildcard benchmarks/[!_]*.py))

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
# The bytecode of what is imported is all that the quickstart needs: that of all of torch would take a good part of its
# time. An empty variable lets Python write it, even where the environment says that it should not.
PY_KEEPING_BYTECODE := PYTHONDONTWRITEBYTECODE= $(PY)
# Tests import most of it, in many processes, but not what tests it. A few files of torch are for other versions of
# Python.
BYTECODE = $(PY) -m compileall -qq -j $(JOBS) -x '/tests/' "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# One stamp for each step that succeeded: the next call skips it, and repeats what failed.
STAMPS := $(VENV)/stamps

# What the kernels were measured with.
CUTEDSL ?= nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1 nvidia-cutlass-dsl-libs-core==4.8.1 \
	nvidia-cutlass-dsl-libs-cu12==4.8.1 cuda-bindings cuda-pathfinder protobuf apache-tvm-ffi==0.1.15.post2 \
	flash-attn-4==4.0.0b36 quack-kernels==0.6.5 einops

MKDOCS ?= 'mkdocs>=1.6,<2' 'mkdocs-material>=9.8,<10' 'mkdocstrings[python]>=1,<2'

.PHONY: quickstart test compile-all lint types bench sanitize tables wheel cutedsl docs clean distclean
.NOTPARALLEL:

quickstart: $(STAMPS)/install
	@$(PY_KEEPING_BYTECODE) examples/quickstart.py

# Programs that tests start import these, hundreds of times: with bytecode, also where the environment keeps none.
OWN_BYTECODE = $(PY) -m compileall -qq python kernels/opgraft-kernels/src || true
# Where it is not written pytest does what is in it.
REWRITTEN = $(PY) -m tests.rewritten 2>/dev/null || true

# Processes share the cores: a thread of OpenMP that spins while it waits takes the core from the one that it waits for.
test: $(STAMPS)/probes
	@$(OWN_BYTECODE)
	@$(REWRITTEN)
	@OMP_WAIT_POLICY=passive $(PY) -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# All of a family of kernels is one test.
compile-all: $(STAMPS)/bytecode
	@COMPILE_ALL=1 $(PY) -m pytest -n $(JOBS) --dist worksteal --timeout 3600 $(PYTEST_ARGS) \
		$(addprefix kernels/opgraft-kernels/tests/,test_compile.py test_rms_norm_compile.py \
			test_cross_entropy_triton.py::test_options)

lint: $(STAMPS)/dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(VENV)/bin/clang-format --dry-run -Werror $(wildcard csrc/* tests/*/*.cpp benchmarks/*.cpp)

types: $(STAMPS)/dev
	@$(PY) -m mypy

# Not in CI, for what compiling the core once more takes there; tests/test_sanitize.py has the short part of it.
sanitize: $(STAMPS)/test
	@$(PY) tools/sanitize.py

bench: $(STAMPS)/bench
	@for script in $(BENCHMARKS); do echo "== $$script"; $(PY) $$script $(BENCH_ARGS) || exit 1; done

# A process for each GPU, of which each has a part of every grid: they add to one table. Then one
# process looks at the whole, which says that a table is complete.
TUNE = $(PY) -m opgraft tune opgraft-kernels --output kernels/opgraft-kernels/src/opgraft_kernels/tables
tables: $(STAMPS)/install
	@gpus=$$(nvidia-smi --query-gpu=index --format=csv,noheader); count=$$(echo $$gpus | wc -w); part=0; \
	for gpu in $$gpus; do \
		part=$$((part + 1)); \
		CUDA_VISIBLE_DEVICES=$$gpu $(TUNE) --budget $(BUDGET) --part $$part/$$count & \
	done; wait; $(TUNE) --budget 2m

wheel: $(STAMPS)/tools
	@$(PY) tools/build_wheel.py $(TORCHES)

# The first of these that is Python 3.10 or newer.
BASE = $(shell for python in $(PYTHON) python3.13 python3.12 python3.11 python3.10; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$python && break; done)

# An interpreter that has a torch keeps it: the environment then sees that interpreter's packages, its pip and
# setuptools too. Where the interpreter is itself a virtual environment's, venv would look past it, and a .pth file
# points back.
$(STAMPS)/venv:
	@if [ ! -x $(PY) ]; then \
		base="$(BASE)"; \
		[ -n "$$base" ] || { echo "opgraft needs Python 3.10 or newer: make PYTHON=..."; exit 1; }; \
		echo "== creating $(VENV) with $$base"; \
		if site=$$($$base -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null); then \
			$$base -m venv --system-site-packages --without-pip $(VENV) \
				&& { $(PY) -c 'import torch' 2>/dev/null || echo "$$site" \
				> "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base_torch.pth"; }; \
		else \
			$$base -m venv $(VENV); \
		fi || { rm -rf $(VENV); exit 1; }; \
	fi
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	@$(PY) -c 'import torch' 2>/dev/null || { echo "== installing $(TORCH) and numpy"; \
		$(PIP) --no-compile '$(TORCH)' numpy; }
	@$(PY_KEEPING_BYTECODE) -c 'import torch, sys; v = torch.__version__; print("== torch", v); \
		sys.exit(tuple(map(int, v.split(".")[:2])) < (2, 11) and "opgraft needs torch 2.11 or newer")'
	@touch $@

# The Triton that each torch was released with, as its CUDA wheels require it and bring it along: CPU wheels name none.
# It has no builds outside Linux.
$(STAMPS)/tools: $(STAMPS)/torch pyproject.toml
	@set -- $$($(PY) -c 'import click, expecttest, numpy, packaging, rich' 2>/dev/null \
			|| echo click expecttest numpy packaging rich) \
		$$($(PY) -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' 2>/dev/null \
			|| echo 'setuptools>=77'); \
	if [ "$$(uname -s)" = Linux ] && ! $(PY) -c 'import triton' 2>/dev/null; then \
		case "$$($(PY) -c 'import torch; print(torch.__version__)')" in \
			2.11.*) triton='triton==3.6.0' ;; \
			2.12.*|2.13.*) triton='triton==3.7.1' ;; \
			2.14.*) triton='triton~=3.8.0' ;; \
			2.15.*) triton='triton~=3.9.0' ;; \
			*) triton='triton>=3.6' ;; \
		esac; \
		set -- "$$@" "$$triton"; \
	fi; \
	[ $$# -eq 0 ] || { echo "== installing $$*"; $(PIP) --no-compile "$$@"; }
	@touch $@

# The core first, for the torch that is there: pip would show nothing meanwhile, and keep no objects.
$(STAMPS)/install: $(STAMPS)/tools pyproject.toml setup.py $(wildcard csrc/*) kernels/opgraft-kernels/pyproject.toml
	@echo "== compiling the core, about a minute on two processors"
	@$(PY) setup.py -q build_ext --inplace
	@echo "== installing opgraft and opgraft-kernels"
	@OPGRAFT_BUILD_CORE=0 $(PIP) --no-build-isolation --no-deps -e . -e kernels/opgraft-kernels
	@$(PY) -c 'from opgraft.core import loader; print("==", loader.status())'
	@touch $@

# What pip installed was left without bytecode, for the quickstart's sake.
$(STAMPS)/bytecode: $(STAMPS)/test
	@echo "== compiling the bytecode of what tests import"
	@$(BYTECODE) || true
	@touch $@

# What tests do in C++, once for all their processes; not where there is no compiler.
$(STAMPS)/probes: $(STAMPS)/bytecode $(wildcard tests/probes/*.cpp)
	@echo "== compiling what tests do in C++"
	@$(PY) -m tests.probes
	@touch $@

# opgraft is there by now, so these install what its extras name and leave it as it is.
$(STAMPS)/test $(STAMPS)/dev $(STAMPS)/bench: $(STAMPS)/install
	@echo "== installing what $(@F) needs"
	@$(PIP) 'opgraft[$(@F)]'
	@touch $@

# In an environment of its own: a site's builder is no dependency of anything else here.
docs: $(STAMPS)/docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/python -m mkdocs build --quiet && echo "build/site/index.html"
$(STAMPS)/docs: $(STAMPS)/venv
	@echo "== installing mkdocs into $(VENV)/docs"
	@"$(BASE)" -m venv $(VENV)/docs
	@$(VENV)/docs/bin/python -m pip --disable-pip-version-check install --quiet $(MKDOCS)
	@touch $@

# Not into the environment: tests are to see what a machine without CuteDSL sees. --no-deps, since torch is there.
cutedsl: $(STAMPS)/cutedsl
$(STAMPS)/cutedsl: $(STAMPS)/test
	@echo "== installing CuteDSL into $(VENV)/cutedsl"
	@$(PIP) --no-deps --only-binary :all: --upgrade --target $(VENV)/cutedsl $(CUTEDSL)
	@touch $@

clean:
	rm -rf build dist *.egg-info python/*.egg-info kernels/*/build kernels/*/src/*.egg-info \
		examples/*/build examples/*/*.egg-info $(STAMPS)
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache python/opgraft/*.so
	find python kernels tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV)
