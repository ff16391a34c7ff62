# Each target works as the only command on a fresh machine: all of them set up first (seconds when nothing changed).
# PYTEST_ARGS="-k hash -x" narrows `make test`, BENCH="cold warm" `make bench`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON_VENV := .venv/bin/python

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## install what is missing, make .venv, build
	@scripts/setup.sh

.PHONY: demo
demo: setup ## small tables, a server, real text, every row checked, a load test
	@$(PYTHON_VENV) scripts/demo.py

.PHONY: test
test: lint ## lint, then all tests
	@scripts/test_native.sh
	@$(PYTHON_VENV) -m pytest $(PYTEST_ARGS)
	@[[ -n "$(PYTEST_ARGS)" ]] || $(MAKE) --no-print-directory test-engines

.PHONY: test-asan
test-asan: setup ## native tests under AddressSanitizer and UBSan
	@scripts/test_native.sh address

.PHONY: test-tsan
test-tsan: setup ## native tests under ThreadSanitizer
	@scripts/test_native.sh thread

.PHONY: test-engines
test-engines: setup ## the plugins of vLLM and SGLang, in the engines' own modules
	@scripts/engines.sh
	@$(PYTHON_VENV) -m pytest tests/engines $(PYTEST_ARGS)

.PHONY: test-image
test-image: setup ## the Dockerfile's image, built and run; needs root
	@scripts/test_image.sh $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: setup ## tests and bandwidth of the GPU's kernels; needs a GPU
	@ENGRAM_TEST_GPU=1 $(PYTHON_VENV) -m pytest tests/gpu $(PYTEST_ARGS)
	@$(PYTHON_VENV) -m bench.gpu

.PHONY: bench
bench: setup ## measure beside fio, torch and others; bench/results/latest.json
	@$(PYTHON_VENV) -m bench $(BENCH)

.PHONY: lint
lint: setup ## ruff, mypy --strict, clang-format
	@.venv/bin/ruff check --quiet
	@.venv/bin/ruff format --check --quiet
	@.venv/bin/mypy
	@find kernels/src kernels/tests \( -name '*.cc' -o -name '*.h' \) -print0 | xargs -0 .venv/bin/clang-format --dry-run --Werror

.PHONY: proto
proto: setup ## regenerate client/engram_client/_proto from the .proto
	@scripts/proto.sh

.PHONY: wheel
wheel: ## dist/: sdist and a wheel that carries liburing, proven in a clean venv
	@scripts/build_wheel.sh
	@scripts/check_wheel.sh

.PHONY: clean
clean: ## remove .venv and all that was built; data/ stays
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find kernels -name '*.so' -delete
