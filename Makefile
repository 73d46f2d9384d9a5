SHELL := bash
.PHONY: help setup style quality test demo docs pages pins

help: ## Show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: ## Make .venv with the pinned CPU stack
	bash scripts/setup_cpu.sh

style: setup ## Format and mend what can be mended
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

quality: setup ## Check style, types and imports
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyrefly check
	.venv/bin/lint-imports

test: ## Run the core tests
	bash scripts/test.sh

demo: ## Train a tiny model on CPU
	bash scripts/train/debug/cpu_demo.sh

docs: ## Build the site into site/, without a broken link
	bash scripts/build_docs.sh

pages: setup ## Write anew the pages that are made from code and from other pages
	.venv/bin/python -m open_instruct.report.metric_names
	.venv/bin/python tests/museum/exhibit.py
	.venv/bin/python scripts/reference_pages.py
	.venv/bin/python scripts/skill_pages.py

pins: setup ## Resolve both requirements files anew
	.venv/bin/python scripts/pins.py
