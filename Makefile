# Two commands are enough: `make train` and `make test`. Each does the set-up that it needs, see tools/setup/.
# More arguments for the command behind a target: make test ARGS="-k topology", make train ARGS="...".

PYTHON := .venv/bin/python
UPSTREAM_STYLE := megatron tests/unit_tests
ARGS :=

.PHONY: help install train test test-gpu lint format clean

help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

install: ## make .venv with the pinned packages and the patched megatron-core
	@sh tools/setup/setup.sh

train: install ## train the digits model, stop half way, resume, and report its exact match
	@$(PYTHON) -m examples.mimo.digits $(ARGS)

test: install ## run the tests that need no GPU (tiers 0 and 1)
	@$(PYTHON) -m pytest $(ARGS)

test-gpu: install ## run the tests that need GPUs (tier 2)
	@$(PYTHON) -m pytest --tier 2 $(ARGS)

lint: install ## run the linters and the house rules
	@$(PYTHON) -m tools.setup.lint

format: install ## format the code, each zone with its own formatter
	@$(PYTHON) -m tools.setup.lint --fix

clean: ## remove everything that the targets made, training runs excepted
	rm -rf .venv .cache build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
