# `make test` and `make demo` set up everything they need in .venv; a second run finds it done.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
WHEEL_VENV := .venv-wheel
WHEEL_PY := $(WHEEL_VENV)/bin/python

# Python files that the package consists of. A strict editable install links each by itself, so a new one needs a reinstall.
SOURCES := $(sort $(shell find . \( -name '.?*' -o -name build -o -name data -o -name dist -o -name site -o -name runs -o -name tests \
	-o -name recipes -o -name benchmarks \) -prune -o -name '*.py' -print))
# Scripts beside the package, which mypy checks by name.
RECIPES := $(basename $(notdir $(wildcard recipes/*.py)))
BENCHMARKS := $(basename $(notdir $(wildcard benchmarks/*.py)))
# What every method must pass.
SHARED_TESTS := $(addprefix tests/,machine/test_rules.py machine/test_generate.py adapters/test_peft.py \
	files/test_memory_files.py)

.PHONY: help install lint docs quick test slow smoke wheel demo clean FORCE

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

install: $(VENV)/.installed ## Set up .venv with the package (editable), its extras and the tools

lint: install ## Check style (ruff) and types (mypy)
	$(PY) -m ruff check .
	$(PY) -m mypy -p cacheformers
	cd recipes && ../$(PY) -m mypy --config-file ../setup.cfg --cache-dir ../.mypy_cache $(addprefix -m ,$(RECIPES))
	cd benchmarks && ../$(PY) -m mypy --config-file ../setup.cfg --cache-dir ../.mypy_cache $(addprefix -m ,$(BENCHMARKS))

docs: install ## Build the documentation site into site/; a warning or a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

quick test slow smoke: export HF_HUB_OFFLINE := 1
quick test slow smoke: export TOKENIZERS_PARALLELISM := false
quick: install ## Run what every method must pass, on two base models, in under two minutes
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -m 'not slow' --bases llama_gqa,opt $(SHARED_TESTS)

test: install ## Lint, build the site, try the wheel in an environment of its own, and run the tests
	$(MAKE) --no-print-directory -j2 -Otarget lint docs smoke
	-$(PY) -m cacheformers fetch  # without it, tests with real weights are skipped
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -m 'not slow' --durations=15

slow: install ## Run the tests that `make test` leaves out: real weights, several processes, whole recipes
	-$(PY) -m cacheformers fetch
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -m slow --durations=15

wheel: install ## Build the source archive and, from it, the wheel
	rm -rf dist
	$(PY) -m build --quiet --no-isolation --outdir dist
	$(PY) -m twine check --strict dist/*

smoke: wheel $(WHEEL_VENV)/.installed ## Install the wheel in an environment that holds only what it asks for, and use it
	$(WHEEL_PY) -m pip install --quiet --no-deps --force-reinstall dist/*.whl
	$(WHEEL_PY) -m pip check
	cd "$$(mktemp -d)" && $(CURDIR)/$(WHEEL_PY) -I $(CURDIR)/tests/smoke_wheel.py

# Ten questions about two texts, to be answered by the base from what it sees of them, and from a trained memory alone.
ASKED := eval_longbench.py --base data/smollm2-135m-instruct --data data/demo/records --chat --dtype float32 --batch 5 \
	--output runs/demo_asked
MEMORY := --methods memory --adapter model_cards/answers_facts
OFFLINE := HF_HUB_OFFLINE=1 $(PY)

demo: install ## Adapt a small pretrained model to plays, with and without a memory; ask a trained one what it has read
	$(PY) -m cacheformers fetch
	$(PY) recipes/fetch_plays.py
	$(OFFLINE) train_adapt.py recipes/demo.yaml
	$(OFFLINE) train_adapt.py recipes/demo.yaml --method lora --output runs/demo_lora --skip_base
	$(PY) recipes/compare_runs.py runs/demo_lora runs/demo --plots runs/demo/compared
	$(PY) recipes/make_facts.py data/demo --documents 1 --words 8000 --plays data/plays/valid/{hamlet,king-lear}.md
	$(OFFLINE) $(ASKED) --methods truncation --max_length 1024
	$(OFFLINE) $(ASKED) $(MEMORY) --memory_content other
	$(OFFLINE) $(ASKED) $(MEMORY)
	$(PY) recipes/show_answers.py data/demo/records runs/demo_asked
	$(OFFLINE) -m cacheformers read data/demo/hamlet.txt -o runs/demo/hamlet.memory --adapter model_cards/answers_facts --dtype float32 --overwrite
	$(OFFLINE) -m cacheformers ask runs/demo/hamlet.memory "What does Quentin paint?"

clean: ## Remove build products and caches; keep .venv, data and runs
	rm -rf build dist site *.egg-info $(WHEEL_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name '.?*' -prune -o -name __pycache__ -type d -prune -exec rm -r {} +
	rm -f $(VENV)/.installed  # the editable install has its links in build/

# The tools come from .venv, so that a build needs nothing beyond constraints.txt.
$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt $(VENV)/.sources
	[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt setuptools
	$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation --config-settings editable_mode=strict \
		-e '.[app,cpu,docs,documents,eval,gguf,serve,dev]'
	touch $@

# Changes only when a file comes or goes.
$(VENV)/.sources: FORCE
	@mkdir -p $(VENV)
	@cmp -s $@ <(echo '$(SOURCES)') || echo '$(SOURCES)' >$@

$(WHEEL_VENV)/.installed: setup.cfg pyproject.toml constraints.txt | wheel
	rm -rf $(WHEEL_VENV)
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_PY) -m pip install --quiet -c constraints.txt dist/*.whl
	touch $@
