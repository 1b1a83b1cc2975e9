# Plain `make` prints the targets. What they need of the machine is in scripts/setup.sh, which each of them runs.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# End-to-end tests are root's: real Slurm, systemd, mounts. Their caches do not mix with the user's.
ROOT := $(shell [ "$$(id -u)" = 0 ] || echo sudo --preserve-env=CI)
CACHE := /var/cache/healthd-tests
AS_ROOT := $(ROOT) env HEALTHD_REQUIRE_E2E=1 PYTHONPYCACHEPREFIX=$(CACHE)/bytecode HYPOTHESIS_STORAGE_DIRECTORY=$(CACHE)/hypothesis
# Side by side (tests/conftest.py): most tests wait. What fails runs again, alone; nothing is left.
PYTEST := .venv/bin/python scripts/run_tests.py -n auto
# Compiles the test modules once, on two cores: each process of pytest-xdist would compile them all.
COLLECT := .venv/bin/python -m pytest --collect-only -p no:cacheprovider
COMPILE := $(AS_ROOT) bash -c '$(COLLECT) tests/[a-d]*/ >/dev/null & $(COLLECT) tests/[e-z]*/ tests/test_*.py >/dev/null & wait'
# What test-all has beyond test: warnings that blame others' modules, and random examples, the same again with SEED=7.
EXAMPLES := $(or $(SEED),$(shell echo $$RANDOM))
FURTHER := -W error --hypothesis-profile=random --hypothesis-seed=$(EXAMPLES)
# Without bytecode each of the thousands of programs that the tests start would be compiled anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all soak test-long test-gpu test-spark check types lint design unit coverage unit-all unit-others test-packages e2e fuzz mutants bench bench-fleet bench-failslow simulate wheel package release pins clean

help: ## print this
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do printf '  make %-14s %s\n' "$$name" "$$what"; done

demo: .venv/.runtime ## healthd on this machine with a fake DGX H100: a fault, the decision, the recovery
	@.venv/bin/python scripts/demo.py

test: .venv/.stamp test-packages ## what a change must pass: units, and a core with a real Slurm and systemd; minutes
	@echo "test: all tests that are not wide"
	@$(ROOT) rm -rf $(CACHE)/bytecode/tmp
	@$(COMPILE)
	@$(AS_ROOT) $(PYTEST) -rs

test-all: .venv/.stamp test-packages ## all tests, on each Python and each Slurm there is; one that failed only beside the others fails
	@echo "test-all: the random examples are those of SEED=$(EXAMPLES)"
	@scripts/unit_others.sh $(FURTHER)
	@echo "test-all: all tests"
	@$(ROOT) rm -rf $(CACHE)/bytecode/tmp
	@$(AS_ROOT) $(PYTEST) -rs -m 'not long and not gpu' --flaky-is-red $(FURTHER)
	@scripts/test_spark_within.sh $(or $(HEALTHD_SPARK_SECONDS),300)

check: .venv/.stamp ## lint, format, types, the design rules and the checks' contract; seconds
	@echo "check: ruff, mypy, import-linter, shellcheck, design"
	@$(MAKE) --no-print-directory --output-sync=target -j2 types lint design

# Most of the time is mypy's, which uses one processor.
types: .venv/.stamp
	@.venv/bin/mypy --strict --no-error-summary

lint: .venv/.stamp
	@.venv/bin/ruff check --quiet .
	@.venv/bin/ruff format --quiet --check . || { .venv/bin/ruff format --check .; exit 1; }
	@mkdir -p build; .venv/bin/lint-imports --no-cache >build/imports 2>&1 || { cat build/imports; exit 1; }
	@if command -v shellcheck >/dev/null; then shellcheck scripts/*.sh packaging/tree.sh packaging/debian/healthd.p* .ci/run; fi

design: .venv/.stamp
	@.venv/bin/python -m pytest tests/development/test_design.py tests/agent/settings/test_contract.py

unit: .venv/.stamp ## the tests that need no root and no daemons
	@$(PYTEST) --ignore=tests/e2e -m 'not long and not gpu'

coverage: .venv/.stamp ## branch coverage of each check by the unit tests; one below 90 % fails
	@COVERAGE_FILE=.coverage .venv/bin/python -m coverage run --branch --include='checks/*,healthd/checks/*' -m pytest --ignore=tests/e2e
	@.venv/bin/python -m coverage report
	@for check in checks/*.py; do .venv/bin/python -m coverage report --include="$$check,healthd/$$check" --fail-under=90 --format=total >/dev/null || { echo "coverage: $$check is below 90 %"; exit 1; }; done

unit-all: unit unit-others ## the unit tests on each Python from 3.10 to 3.13 that this machine has

unit-others: .venv/.stamp
	@scripts/unit_others.sh

e2e: .venv/.stamp test-packages ## the end-to-end tests alone
	@$(AS_ROOT) $(PYTEST) -rs -m 'not long and not gpu' tests/e2e

test-long: .venv/.stamp test-packages ## what make test does in a shorter form: 1,000 kills
	@$(AS_ROOT) $(PYTEST) -rs -m long

# SECONDS=600 is shorter, SEED=7 what happened under that seed.
soak: .venv/.stamp test-packages ## an hour of faults, kills, reloads, scrapes and clients at random; SECONDS=600 SEED=7
	@$(AS_ROOT) PYTHONPATH=bench .venv/bin/python -m soak --seconds $(or $(SECONDS),3600) --seed $(or $(SEED),0)

test-gpu: .venv/.stamp ## healthd validate on this machine's GPUs beside published numbers; needs PyTorch in .venv, skipped without
	@$(ROOT) env PYTHONPATH=.:tests/support .venv/bin/python -m pytest -rs -n 0 -p no:cacheprovider -m gpu tests/validation/test_validate_gpu.py

test-spark: ## compare the fleet's questions and answers on DuckDB and on Spark, which it sets up: 600 MB, and a Java
	@scripts/test_spark.sh

fuzz: .venv/.stamp ## four minutes of hostile inputs for every boundary; make test has a short form
	@PYTHONPATH=.:tests/support .venv/bin/python -m tests.fuzz

# JOBS=4 tests four mutants at a time. The results of a commit are kept in build/: a run that was stopped goes on.
mutants: .venv/.stamp ## faults put into the decisions, one at a time: the tests must still notice each; an hour
	@.venv/bin/python scripts/mutants.py run --jobs $(or $(JOBS),2) --out build/mutants-$$(git describe --always --dirty).json

# NHC=DIR is a checkout of github.com/mej/nhc, NODE_EXPORTER=PROGRAM Prometheus' own, if it is not in the PATH.
bench: .venv/.stamp test-packages ## what healthd costs on this machine, as a table; NHC=DIR: beside it
	@.venv/bin/python bench/bench.py

# JOBS=400000 is a smaller one; MONTHS and SEED too. The history is made once and kept in build/histories. LANL=FILE
# is the public data that lemons are measured on too, LA-UR-05-7318: without it that is not measured, and said to be.
bench-fleet: .venv/.stamp ## what the fleet's store costs: a made history of 4 million jobs, ingested and asked; LANL=FILE: public data too
	@.venv/bin/python bench/bench_fleet.py --jobs $(or $(JOBS),4000000) --months $(or $(MONTHS),11) --seed $(or $(SEED),1) $(if $(LANL),--lanl '$(LANL)')

# SEED=1 is one of those that thresholds were chosen on, 101 and above are not; ROWS=0 leaves cost and periods out. ALIBABA=DIR
# is a public trace, mini-batch-time of alibaba/clusterdata, cluster-trace-gpu-v2020: without it that is not measured.
bench-failslow: .venv/.stamp ## how right healthd failslow is: 500 made sets of series, and its cost; ALIBABA=DIR: public data too
	@PYTHONPATH=. .venv/bin/python bench/bench_failslow.py --seed $(or $(SEED),101) --rows $(or $(ROWS),10000000) $(if $(ALIBABA),--alibaba '$(ALIBABA)')

simulate: .venv/.stamp ## a dead file server, a wave of faults: 10,000 nodes simulated, 1,000 on a real slurmctld
	@$(ROOT) env PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 .venv/bin/python bench/simulate.py

wheel: .venv/.stamp ## build dist/*.whl and the sdist, install the wheel into a fresh environment and try it
	@scripts/wheel.sh

# REVISION=2 is the next package of the same version; RELEASE="bookworm trixie" are those that are tested.
package: ## dist/*.deb for Debian 12 and 13, each built in a root of its own; RELEASE=bookworm builds one
	@$(ROOT) env REVISION=$(or $(REVISION),1) MIRROR=$(MIRROR) PIP_INDEX_URL=$(PIP_INDEX_URL) scripts/package.sh $(RELEASE)

release: .venv/.stamp ## build dist/: wheel, sdist, .deb packages and SHA256SUMS, from a clean tree; REVISION=2
	@REVISION=$(or $(REVISION),1) scripts/release.sh

# Without .venv, which could not be made of pins that pyproject.toml has left behind.
pins: ## constraints.txt anew: the newest of all that tests, wheel and packages are made with
	@"$$(scripts/setup.sh interpreters | tail -n 1 | cut -d' ' -f2-)" scripts/pins.py

test-packages:
	@scripts/setup.sh test-packages

clean: ## remove everything that was built here; the system packages and /var/cache/healthd-tests stay
	@rm -rf .venv .venv-3.* .venv-spark build dist wheels ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.stamp: pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh venv

# Without the tools for development, which take three times as long to install.
.venv/.runtime: pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh venv-runtime
