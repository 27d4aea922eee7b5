# `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Extra words of a target's command: make train ARGS="--seed 3 --total-steps 500000"
ARGS ?=
# Index of torch wheels. PyPI's own are built for CUDA (gigabytes); on a machine without a GPU:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

# The Terraform configuration that plan, apply, destroy and scale are about, and words for it.
TF_DIR ?= deploy/terraform
TF_ARGS ?=
TERRAFORM = terraform -chdir=$(TF_DIR)
DEPLOY_VENV := .venv-deploy

# Every module of benchmarks/ but the ones that others import, and forgetting, scale and system_peers, which take minutes.
BENCHMARKS := $(filter-out __init__ common forgetting replay_rig replay_load replay_scale scale system_peers, $(basename $(notdir $(wildcard benchmarks/*.py))))

# Processes of tests: most of them wait for services. A file's tests stay together.
WORKERS ?= 4
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Seconds: `make chaos SOAK=3600` is one long run with few faults, and nothing else.
SOAK ?=

# Tests that are longer and rougher with TROUPE_CHAOS=1: every file that takes the word from tests/harness.py.
CHAOS = $(sort $(shell grep -rlE --include='test_*.py' '^from tests.harness import .*\b(CHAOS|only_in_chaos)\b' tests))

# `make fuzz MESSAGES=10_000_000 MINUTES=120`: where the time is up first, the log says how many were sent.
MESSAGES ?= 1_000_000
MINUTES ?= 60

# How often `make test-slurm` preempts a run.
PREEMPTIONS ?= 3

# How often `make test-ec2` takes a spot machine away, and how many minutes its budget lasts.
INTERRUPTIONS ?= 3
EC2_MINUTES ?= 15

SEEDS ?= 200
FIRST ?= 1

# Several processes share the cores: numeric libraries must not take all of them each.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup train test coverage test-pages test-deploy test-ec2 test-slurm lint unit chaos fuzz simulate simulate-plants format bench docs report plan apply destroy scale clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  ARGS="..." adds words to train, bench and unit; TORCH_INDEX=URL chooses torch wheels (see README.md)'

setup: $(STAMP) ## make .venv with everything, pinned (again only when the pins change)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "troupe: error: $(PYTHON) is older than Python 3.11; choose another with make PYTHON=python3.11" >&2; exit 2; }
	@echo 'installing what constraints.txt pins into $(VENV): some minutes on a machine that has none of it'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifneq ($(TORCH_INDEX),)
	$(BIN)/python -m pip install --quiet -c constraints.txt --index-url $(TORCH_INDEX) --extra-index-url https://pypi.org/simple torch
endif
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

train: setup ## learn Atari Pong on this machine (TensorBoard on port 6006; Ctrl-C stops, `.venv/bin/troupe resume RUN` continues)
	$(BIN)/troupe train pong-ppo $(ARGS)

test: setup lint ## everything that CI checks
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

coverage: setup ## the tests, half as long again, and the share of lines that they run
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report= $(ARGS)
	@echo "covered: $$($(BIN)/coverage report --format=total) % of all lines, without the processes that tests start"

test-pages: setup ## run every command and block of code of every page, with the wheel and without a checkout
	TROUPE_TEST_PAGES=1 $(BIN)/python -m pytest -rs $(PARALLEL) tests/pages $(ARGS)

test-deploy: setup $(DEPLOY_VENV)/.installed ## what is under deploy/: Terraform against a stand-in for AWS, Packer, boot, containers
	@for tool in terraform packer docker chromium shellcheck kubectl podman; do command -v $$tool >/dev/null || \
	  echo "troupe: NOT TESTED: $$tool is not installed, its tests are skipped" >&2; done
	@docker info >/dev/null 2>&1 || echo "troupe: NOT TESTED: no Docker daemon answers, containers are skipped" >&2
	@$(BIN)/python -c 'import s3fs' 2>/dev/null || \
	  echo "troupe: NOT TESTED: s3fs is not installed ($(BIN)/python -m pip install -e '.[s3]'), snapshots in S3 are skipped" >&2
	TROUPE_TEST_DEPLOY=1 $(BIN)/python -m pytest -vv -rs tests/deploy $(ARGS)

test-ec2: setup $(DEPLOY_VENV)/.installed ## runs in a stand-in for AWS: every instance is a machine on this host (root); INTERRUPTIONS=20 EC2_MINUTES=28
	@for tool in terraform ip unshare systemctl; do command -v $$tool >/dev/null || \
	  echo "troupe: NOT TESTED: $$tool is not installed, EC2 in a box is skipped" >&2; done
	@test "$$(id -u)" = 0 || echo "troupe: NOT TESTED: EC2 in a box needs root, it is skipped" >&2
	TROUPE_TEST_EC2=1 TROUPE_EC2_INTERRUPTIONS=$(INTERRUPTIONS) TROUPE_EC2_MINUTES=$(EC2_MINUTES) $(BIN)/python -m pytest -vv -rs tests/deploy/test_ec2.py tests/deploy/test_ec2_train.py $(ARGS)

test-slurm: setup ## runs and a sweep on a Slurm of this host (root; slurmctld, slurmd, slurm-client, munge); PREEMPTIONS=20
	@PATH=$$PATH:/usr/sbin; for tool in slurmctld slurmd sbatch munged; do command -v $$tool >/dev/null || \
	  echo "troupe: NOT TESTED: $$tool is not installed, Slurm is skipped" >&2; done
	@test "$$(id -u)" = 0 || echo "troupe: NOT TESTED: the daemons of Slurm need root, it is skipped" >&2
	TROUPE_TEST_SLURM=1 TROUPE_SLURM_PREEMPTIONS=$(PREEMPTIONS) $(BIN)/python -m pytest -vv -rs tests/deploy/test_slurm.py $(ARGS)

# Apart: what the stand-in needs must not move the pins of what trains.
$(DEPLOY_VENV)/.installed: tests/deploy/requirements.txt
	test -x $(DEPLOY_VENV)/bin/python || $(PYTHON) -m venv $(DEPLOY_VENV)
	$(DEPLOY_VENV)/bin/python -m pip install --quiet -r $<
	@touch $@

unit: setup ## the tests that need neither several processes nor much time
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

chaos: setup ## a run through 100 faults (root), deaths of replay and learners, power cuts, 10 million hostile messages (TROUPE_FUZZ_MESSAGES), learning in every way
	@test "$$(id -u)" = 0 && command -v ip tc >/dev/null || \
	  echo "troupe: NOT TESTED: faults to a whole run need root, ip and tc; they are skipped" >&2
	TROUPE_CHAOS=1 TROUPE_CHAOS_SOAK_S=$(SOAK) $(BIN)/python -m pytest -rs --timeout=7200 $(if $(SOAK),tests/chaos,$(CHAOS)) $(ARGS)

fuzz: setup ## send MESSAGES=1_000_000 hostile messages in at most MINUTES=60; fuzz.log says each minute what was sent, answered, and lives
	TROUPE_FUZZ_MESSAGES=$(MESSAGES) TROUPE_FUZZ_LIMIT_S=$$(($(MINUTES) * 60)) TROUPE_FUZZ_LOG=$(or $(FUZZ_LOG),fuzz.log) \
	  $(BIN)/python -m pytest -n 2 --dist load tests/fuzz $(ARGS)

simulate: setup ## run SEEDS=200 trainings of simulated services under faults; FIRST=1 is the first of them
	$(BIN)/python -m tests.simulation --first $(FIRST) --seeds $(SEEDS) $(ARGS)

simulate-plants: SEEDS = 1000
simulate-plants: setup ## look for bugs planted in the services, in SEEDS=1000 trainings each; ARGS="NAMES" of some
	$(BIN)/python -m tests.simulation --first $(FIRST) --seeds $(SEEDS) --find $(ARGS)

lint: setup ## style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## put the code into the one style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## measure: one JSON line per benchmark
	@for name in $(BENCHMARKS); do \
	  echo "== $$name" >&2; $(BIN)/python -m benchmarks.$$name --json $(ARGS) || exit 1; \
	done

docs: setup ## write the generated pages and lists, and build the site of all pages (build/site)
	$(BIN)/python -m docs.configuration > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md
	$(BIN)/python -m docs.configuration presets > docs/presets.md.new
	mv docs/presets.md.new docs/presets.md
	$(BIN)/python -m troupe.services.commands > docs/commands.md.new
	mv docs/commands.md.new docs/commands.md
	$(BIN)/python -m troupe.services.launcher.troubleshooting > docs/troubleshooting.md.new
	mv docs/troubleshooting.md.new docs/troubleshooting.md
	$(BIN)/python -m docs.configuration compose > deploy/docker/fields.yml.new
	mv deploy/docker/fields.yml.new deploy/docker/fields.yml
	$(BIN)/python -m docs.protocol
	$(BIN)/python deploy/terraform/document.py
	$(BIN)/python -m docs.site

report: setup ## write docs/scores.md, a table of the recorded trainings, from their metrics in docs/results
	$(BIN)/python -m docs.report > docs/scores.md.new
	mv docs/scores.md.new docs/scores.md

plan: ## show what `make apply` would change in AWS (TF_DIR, TF_ARGS; see docs/aws.md)
	$(TERRAFORM) init -input=false
	$(TERRAFORM) plan $(TF_ARGS)

apply: ## start, or change, the run in AWS: costs money until `make destroy`
	$(TERRAFORM) init -input=false
	$(TERRAFORM) apply $(TF_ARGS)

destroy: ## stop the run in AWS and delete everything that costs money
	$(TERRAFORM) init -input=false
	$(TERRAFORM) destroy $(TF_ARGS)

scale: ## change the number of actor processes in AWS: make scale ACTORS=192
	@case "$(ACTORS)" in ''|*[!0-9]*) \
	  echo "troupe: error: ACTORS='$(ACTORS)' should be a number: make scale ACTORS=192" >&2; exit 2;; esac
	$(TERRAFORM) init -input=false
	@printf '{"actors": %s}\n' "$(ACTORS)" > $(TF_DIR)/scale.auto.tfvars.json
	$(TERRAFORM) apply $(TF_ARGS)

clean: ## remove .venv and caches (runs stay)
	rm -rf $(VENV) $(DEPLOY_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .import_linter_cache build *.egg-info
