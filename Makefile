# `make serve` and `make test` set up everything they need in .venv on a fresh machine.

PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
MODEL ?= tiny-sala
EXTRAS ?=
ARGS ?=
BIN := .venv/bin

.PHONY: help venv serve test aot lint notebooks train bench interop clean

help:
	@echo "make serve [MODEL=tiny-sala] [ARGS='--port 30000']   set up, then serve an OpenAI-compatible API"
	@echo "make test                                            set up, then run the tests"
	@echo "make aot                                             compile every kernel for GPUs that are not here"
	@echo "make lint | notebooks | bench | clean"
	@echo "make interop MODEL=DIR TORCH_PYTHON=/path/to/python  compare a checkpoint with transformers"
	@echo "EXTRAS=cuda13 (or cuda12) installs the GPU build of JAX"

# Installing for serving needs less than installing for development.
.venv/serve.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "hybridjax needs Python 3.12 or newer; set PYTHON=/path/to/python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.$(if $(EXTRAS),[$(EXTRAS)])'
	touch $@

.venv/dev.stamp: .venv/serve.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,notebooks]'
	touch $@

venv: .venv/dev.stamp

serve: .venv/serve.stamp
	$(BIN)/python -m hybridjax.serve --model-path $(MODEL) $(ARGS)

test: .venv/dev.stamp
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

# The compilers for GPUs stand beside the environment: inside it JAX would look for a GPU.
.venv/aot.stamp: .venv/dev.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --target .venv/aot \
	  jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm
	touch $@

aot: .venv/aot.stamp
	HYBRIDJAX_REQUIRE_COMPILERS=1 PYTHONPATH=.venv/aot $(BIN)/python -m pytest -n auto tests/pallas_kernels/test_ahead_of_time.py \
	  tests/pallas_kernels/test_layer_programs.py $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

notebooks: .venv/dev.stamp
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=300 -p no:cacheprovider notebooks $(ARGS)

bench: .venv/dev.stamp
	$(BIN)/python -m benchmarks.serving $(ARGS)

interop: .venv/serve.stamp
	@test -n "$(TORCH_PYTHON)" || { echo "set TORCH_PYTHON to a Python that has torch and transformers" >&2; exit 1; }
	$(BIN)/python interop/compare.py $(MODEL) --torch-python $(TORCH_PYTHON) $(ARGS)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis runs build dist *.egg-info
