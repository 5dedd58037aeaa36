# `make train` and `make test` need Python 3.11 or newer, a C++ compiler and make. The rest comes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What an install depends on: when one of these changes, the next command installs again.
INSTALLED := $(VENV)/.installed
PEERS := $(VENV)/.peers
# Pages are made of text: what makes them has an environment of its own, without torch and the rest of .venv.
DOCS := build/docs
INPUTS := pyproject.toml constraints.txt $(wildcard CMakeLists.txt src/wherry/native/src/*)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# The Python of the machine that `make gpu` collects for.
FOR ?= 3.12

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
# Tests of what a wheel holds: `make wheel-test` runs those that start processes against an installed one.
WHEEL_TESTS := tests/compat tests/integrations tests/examples

.PHONY: help train finetune test test-near test-all test-doors test-nightly accelerator-test wheel-test mutants bench gpu
.PHONY: docs lint asan tsan clean

help:
	@echo "make train   train a small GPT-2 here, on two ranks; flags go in ARGS, as in make train ARGS='--steps 50'"
	@echo "make finetune   train what make train made further, on questions and answers; MODEL=FOLDER takes another"
	@echo "make test    run the fast tests, six minutes on two cores; ARGS='tests/train -k loop' chooses among them"
	@echo "make test-near   run those of the rooms that differ from main"
	@echo "make test-all    run every test but the nightly ones, build and test a wheel, build the docs, lint: 20 minutes"
	@echo "make test-nightly   run whole products, faults by hand, new examples, sanitizers and mutants: hours"
	@echo "make accelerator-test   part of test-all: the engine on an emulated accelerator, which is compiled first"
	@echo "make wheel-test   part of test-all: build the wheel, and test the alias and other libraries against it"
	@echo "make mutants     plant each fault of tests/mutants, and report whether the fast tests find it"
	@echo "make bench   measure this machine, and Wherry beside DDP, FSDP2 and DeepSpeed: about ten minutes"
	@echo "make gpu     collect what a GPU machine without a network lacks, and say what to run there; FOR=3.12 is its Python"
	@echo "make docs    docs/ as a site, in site/"
	@echo "make lint    ruff, mypy and the layers of imports"
	@echo "make asan    the native tests under the address and undefined behavior sanitizers"
	@echo "make tsan    the native tests under the thread sanitizer"
	@echo "make clean   remove .venv and what was built"

train: $(INSTALLED)
	$(BIN)/wherry train $(ARGS)

# The newest run that `make train` has made, or a small one, learns to say what functions of the standard library do.
finetune: $(INSTALLED)
	@mkdir -p build && $(BIN)/python examples/docstrings.py build/docstrings.jsonl
	@model="$(MODEL)"; test -n "$$model" || model="$$(ls -td runs/*/checkpoints 2>/dev/null | head -1)"; \
	if test -z "$$model"; then model=runs/small; $(BIN)/wherry train --run-dir $$model --steps 100; fi; \
	$(BIN)/wherry finetune "$$model" --data build/docstrings.jsonl --lr 1e-3 --epochs 2 $(ARGS)

test: $(INSTALLED)
	$(PYTEST) --durations 10 -m fast $(ARGS)

test-near: $(INSTALLED)
	tests="$$($(BIN)/python -m tests.rooms)" && $(PYTEST) -m fast $$tests $(ARGS)

test-all: $(INSTALLED)
	$(MAKE) test
	$(MAKE) test-doors
	$(MAKE) accelerator-test
	$(MAKE) wheel-test
	$(MAKE) docs
	$(MAKE) lint

# Tests that start processes or need seconds; those of the wheel run against an installed one.
test-doors: $(INSTALLED)
	$(PYTEST) -rs --durations 10 -m 'not fast and not nightly' $(WHEEL_TESTS:%=--ignore %) --ignore tests/gpu $(ARGS)

# Property tests draw new examples; by_hand kills and interrupts runs at instants that it draws, and damages their disks.
test-nightly: $(INSTALLED)
	@ended=0; also() { echo "$$*"; "$$@" || ended=1; }; export OMP_NUM_THREADS=1; \
	pytest="$(BIN)/python -m pytest -n 2 --dist worksteal -rs --timeout 1800 --cpu-limit 3600"; \
	also $$pytest -m nightly $(ARGS); \
	also $$pytest -m 'hypothesis and not nightly' --hypothesis-profile search; \
	also env WHERRY_FUZZ=10000 $$pytest tests/security/test_fuzz.py; \
	also $(BIN)/python -m tests.security.by_hand.kills --times 200; \
	also $(BIN)/python -m tests.security.by_hand.faults; \
	also $(BIN)/python -m tests.security.by_hand.interrupts; \
	for part in asan tsan mutants; do also $(MAKE) $$part ARGS=; done; \
	exit $$ended

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants $(ARGS)

# A device with a memory of its own, whose copies and kernels are late.
accelerator-test: $(INSTALLED)
	$(PYTEST) -rs -p tests.accelerator.plugin tests/accelerator tests/gpu $(ARGS)

# A wheel of the sdist, in an environment of its own beside the other packages of .venv, and no sources in reach.
wheel-test: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.installed build/wheel
	cd build/wheel && venv/bin/wherry --help >/dev/null && venv/bin/python -m wherry version \
	  && OMP_NUM_THREADS=1 venv/bin/python -m pytest -rs -n 2 --dist worksteal -m 'not fast and not nightly' $(WHEEL_TESTS) $(ARGS)

# One that fails says so, and the others go on; Ctrl-C ends all.
bench: $(PEERS)
	@ended=0; measure() { \
	  echo "$$*"; $(BIN)/python "$$@" --quick || { ended=$$?; test $$ended -ne 130 || exit 130; }; }; \
	measure benchmarks/cpu_adam.py; \
	measure benchmarks/disk.py --path .; \
	measure benchmarks/overhead.py --systems ddp,fsdp2,deepspeed-0,deepspeed-3,wherry-0,wherry-3; \
	measure benchmarks/steps.py resident --ranks 2 --places 0,3; \
	measure benchmarks/steps.py offload --path . --dtypes bf16 --places 3-cpu,3-nvme; \
	measure benchmarks/steps.py window --path . --places 3-nvme; \
	measure benchmarks/memory.py --path . --dtypes fp32 --systems ddp,fsdp2,deepspeed-3,wherry-0,wherry-3; \
	measure benchmarks/construction.py; \
	measure benchmarks/checkpoint.py --path .; \
	measure benchmarks/import_time.py; \
	exit $$ended

gpu: $(INSTALLED)
	@$(BIN)/python benchmarks/gpu_machine.py --python $(FOR) $(ARGS)

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

asan: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHON="$(CURDIR)/$(BIN)/python" sh tests/native/sanitize.sh asan

tsan: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHON="$(CURDIR)/$(BIN)/python" sh tests/native/sanitize.sh tsan

clean:
	rm -rf $(VENV) .whl .native .site site build src/wherry/native/libwherry.so

# The build's own tools are installed first and pinned like the rest, so the build needs no isolation.
$(INSTALLED): $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Wherry needs Python 3.11 or newer; set PYTHON=...")'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV): torch is large, the first time takes some minutes"
	@$(PIP) scikit-build-core cmake ninja
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation -e '.[test,dev]'
	@touch $@

# The packages of the extra alone, without Wherry: the reference is read from the sources, and nothing is imported.
$(DOCS)/.installed: pyproject.toml constraints.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS)/extra.txt
	@$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -r $(DOCS)/extra.txt
	@touch $@

# DeepSpeed compiles its parts at their first use: here, so that no benchmark waits. What is missing, the benchmarks say.
$(PEERS): $(INSTALLED)
	@DS_BUILD_OPS=0 PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation -e '.[bench]' && $(BIN)/python benchmarks/build_peers.py && touch $@ || echo "DeepSpeed could not be installed: its rows will be empty"
