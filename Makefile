# One way to run things; CI runs the same. Everything is installed into .venv inside the checkout.
PYTHON ?= python3
VENV := .venv
SWEEP ?= slow or long
BIN := $(VENV)/bin
# Tests start thousands of interpreters: each would compile the package again where the environment forbids to keep that.
export PYTHONDONTWRITEBYTECODE :=
BASE := $(VENV)/.base
STAMP := $(VENV)/.stamp
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-frameworks lint docs bench house sweep mutants clean

# torch and Holdfast alone. Nothing is compiled ahead, here and below: of what is installed a small part is imported.
$(BASE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --no-compile --editable .
	touch $(BASE)

# What every process of tests would compile at its start is compiled beside pip, and so is the device of the tests.
$(STAMP): $(BASE) requirements-dev.txt
	($(BIN)/python -c "import torch._dynamo"; $(BIN)/python tests/kits/late_device.py) & \
	  $(INSTALL) --no-compile --requirement requirements-dev.txt
	touch $(STAMP)

demo: $(BASE)  ## train a small GPT on real text, kill it three times, prove that nothing was lost
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## the whole suite, some 7 minutes on 2 cores (tests wait for disks and processes: four at a time)
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not slow and not long"

test-frameworks: $(STAMP)  ## object stores from npm (370 MB, if npm is there), and real frameworks in environments of their own
	@if command -v npm > /dev/null; then \
	  timeout 300 npm install --prefix tests/stores --no-package-lock --no-audit --no-fund --loglevel=error \
	    || echo "npm could not install the stores: the tests that need s3rver and Azurite are skipped"; \
	else echo "npm is not installed: the tests that need s3rver and Azurite are skipped"; fi
	$(BIN)/python -m pytest -n 2 -m frameworks -rs
	$(BIN)/python tests/frameworks/run.py

lint: $(STAMP)  ## style, types, layers, no large files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@large=$$(git ls-files -z -- . ':!tests/data' ':!docs' | xargs -0 ls -dl 2> /dev/null | awk '$$5 > 300 * 1024 {print $$5, $$NF}'); \
	  if [ -n "$$large" ]; then echo "files over 300 KiB outside tests/data and docs (bytes, name):"; echo "$$large"; exit 1; fi

docs: .venv-docs/.stamp  ## the site, with a reference from the docstrings, in build/site; in an environment of its own
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --clean --quiet
	@echo "build/site: python3 -m http.server --directory build/site shows it"

.venv-docs/.stamp: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements-docs.txt
	touch $@

mutants: $(STAMP)  ## small mistakes, one at a time: each has to fail a test; MUTANTS=--tenth for some of them
	$(BIN)/python tests/mutants/run.py $(MUTANTS)

sweep: $(STAMP)  ## every crash point, hundreds of kills and bit flips
	$(BIN)/python -m pytest -n 2 -m "$(SWEEP)"

bench: $(STAMP)  ## against limits and peers, in one run; writes benchmarks/results/
	$(INSTALL) --requirement requirements-bench.txt
	$(BIN)/python benchmarks/run.py

TREE ?= .
house: $(STAMP)  ## how large the house is, and how much of it a save passes; TREE=OTHER/CHECKOUT for another one
	$(BIN)/python -m benchmarks.house --tree $(TREE)

clean:
	rm -rf $(VENV) .venv-docs build demo-runs tests/stores/node_modules
