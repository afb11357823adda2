# make demo   sets up and trains the tiny config on a corpus that Python itself ships
# make test   sets up and runs the tests
# PYTHON=...  chooses the interpreter that .venv is built from

PYTHON ?= python3
RUN := .venv/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check
# glibc's allocator takes large pages and keeps what is freed: a tenth more steps a second
# in the demo, see docs/benchmarks.md. It must stand in the environment before the process
# starts; other systems ignore it.
KEPT := glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:$\
glibc.malloc.mmap_threshold=1099511627776:glibc.malloc.trim_threshold=1099511627776
# By file: the tests of a file share a run or a compilation. tests/conftest.py decides
# on the order of the files.
PARALLEL := -n auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder

.PHONY: demo test slow soak bench lint clean

demo: export GLIBC_TUNABLES ?= $(KEPT)
demo: .venv/ready
	$(RUN) -m spanbert_jax.main --config=configs/tiny.py --workdir=runs/demo

test: .venv/tests-ready
	$(RUN) -m pytest -q $(PARALLEL)

slow: .venv/tests-ready
	$(RUN) -m pytest -q $(PARALLEL) -m slow

# KILLS=...   how many, of each of its two runs
soak: .venv/tests-ready
	$(RUN) -m pytest -q -s -m soak tests/test_soak.py

# Beside PyTorch, which lives in an environment of its own; writes docs/benchmarks.md.
bench: .venv/ready .venv-bench/ready
	$(RUN) benchmarks/table.py

lint: .venv/tests-ready
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

clean:
	rm -rf .venv .venv-bench runs .pytest_cache .ruff_cache

# The stamp comes last, so that an interrupted installation is taken up again.
.venv/ready: requirements.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: there is no $(PYTHON); name a Python 3.11 to 3.13 with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), but jax and tensorflow need Python 3.11 to 3.13; name one with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module (on Debian and Ubuntu: apt-get install python3-venv); install it or name another Python with PYTHON=..." >&2; exit 2; }
	@echo "setting up .venv: a few minutes, 2.8 GB"
	$(PYTHON) -m venv .venv
	$(INSTALL) -r requirements.txt
	@touch $@

.venv/tests-ready: .venv/ready requirements-dev.txt
	@echo "adding what the tests need: a minute or two, 1.5 GB (with PyTorch's CUDA: 6 GB)"
	$(INSTALL) -r requirements-dev.txt
	@touch $@

.venv-bench/ready: benchmarks/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@
