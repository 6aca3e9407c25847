# Commands of the project. `make help` lists them; `make up` and `make test` work from a bare checkout.

PYTHON ?= python3
BIN := .venv/bin
# hundreds of processes start: each would compile the sources, and pytest rewrite the tests, again
export PYTHONDONTWRITEBYTECODE =
PYTEST = $(BIN)/python -m pytest -n auto --dist loadfile --durations 50

.PHONY: help install install-test up test test-quick test-all test-mutation chaos fuzz check lint format messages bench gpu lock sdk clean

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Orrery needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Name one: make up PYTHON=python3.12")'
	@$(PYTHON) -m venv .venv || { echo "Python could not create a virtual environment. On Debian: apt install python3-venv" >&2; rm -rf .venv; exit 1; }

install: $(BIN)/python ## create .venv with everything needed to run, and to compile kernels without a GPU
	@$(BIN)/python tools/install.py

install-test: $(BIN)/python
	@$(BIN)/python tools/install.py --test

up: install ## start everything on this machine; Ctrl-C stops it
	@exec $(BIN)/python manage.py up

test: install-test ## install the test dependencies and run every test
	@$(BIN)/python tools/system.py
	@exec $(PYTEST) $(ARGS)

test-quick: install-test ## the tests without ranks, browser, flows, Triton interpreter and long computations
	@exec $(PYTEST) -m "not ranks and not browser and not flow and not interpreter and not slow" $(ARGS)

test-all: install-test ## every test with full matrices; takes long
	@$(BIN)/python tools/system.py
	@exec env ORRERY_TEST_MATRIX=full $(PYTEST) $(ARGS)

test-mutation: install-test ## mutation testing of five modules, within a time budget: ARGS="--only policy --budget-s 600"
	@exec $(BIN)/python tools/mutation.py $(ARGS)

chaos: install-test ## fault injection into a cluster of real processes: ARGS="--faults 10000 --seed 1"
	@exec $(BIN)/python -m tests.chaos $(ARGS)

fuzz: install-test ## 100,000 random mutations over all kinds of messages, 20,000 of sockets: ORRERY_FUZZ_MUTATIONS=5000 ORRERY_FUZZ_SEED=2
	@ORRERY_FUZZ_MUTATIONS=$${ORRERY_FUZZ_MUTATIONS:-100000} $(BIN)/python -m pytest tests/orchestrator/fuzz/test_messages.py tests/orchestrator/fuzz/test_sockets.py tests/orchestrator/fuzz/test_socket_server.py $(ARGS)

check: install-test ## ruff, djLint, mypy, import-linter, Django checks, missing migrations
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/djlint webui/templates --check --quiet
	@$(BIN)/djlint webui/templates --lint --quiet
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -W error manage.py check --fail-level WARNING
	@$(BIN)/python manage.py makemigrations --check --dry-run

format: install-test ## format and fix code and templates
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/djlint webui/templates --reformat --quiet

messages: install-test ## update the English message catalogue (needs gettext)
	@cd webui && ../$(BIN)/python ../manage.py makemessages -l en --add-location file --no-wrap
	@cd webui && ../$(BIN)/python ../manage.py makemessages -d djangojs -l en --add-location file --no-wrap

bench: install-test ## run the benchmarks that this machine supports; appends rows to docs/results/
	@exec $(BIN)/python -m tests.bench $(ARGS)

gpu: ## check and measure kernels on this machine's GPU with its own torch (PYTHON=…); stops after 480 s
	@$(PYTHON) -c 'import torch' || { echo "This Python has no torch. Name one that has: make gpu PYTHON=.venv/bin/python" >&2; exit 1; }
	@exec $(PYTHON) -m kernels.gpu --budget-s 480 --out docs/results $(ARGS)

lock: install-test ## resolve the dependencies into requirements/
	@$(BIN)/python tools/lock.py

sdk: install-test ## generate the typed Python SDK into sdk/: ARGS="--url http://127.0.0.1:8000 --out DIR"
	@exec $(BIN)/python tools/sdk.py $(ARGS)

clean: ## remove the virtual environment and caches; keeps the data directory
	rm -rf .venv .venv-mutation node_modules .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
