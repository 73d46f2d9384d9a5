SHELL := bash
.PHONY: help setup style quality test demo pins

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

# Unused on CPU: vLLM's CPU build asks for the first three, whose registry builds are for CUDA and break `import
# transformers`; triton (1 GB) is asked for by libraries that do without it when there is no GPU.
NOT_ON_CPU := torchvision torchaudio torchcodec triton
UV_COMPILE = .venv/bin/uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	--index-strategy unsafe-best-match --no-annotate

# torch's CPU build: from where pip is told to look, else from PyTorch's own index.
pins: setup ## Resolve both requirements files anew
	resolve() { $(UV_COMPILE) --group cpu --output-file requirements-cpu.txt \
		--custom-compile-command "make pins   (installed by scripts/setup_cpu.sh)" \
		--excludes <(printf '%s\n' $(NOT_ON_CPU)) "$$@"; }; \
	resolve $$(.venv/bin/python scripts/uv_flags.py) || resolve --extra-index-url https://download.pytorch.org/whl/cpu
	$(UV_COMPILE) --group gpu --output-file requirements.txt \
		--custom-compile-command "make pins   (for: pip install -r requirements.txt)" \
		--constraints <(grep -vE '^(torch|intel-.*)==' requirements-cpu.txt)
