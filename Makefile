# `make` alone prints the targets. Each target runs scripts/setup.sh, which installs what it needs.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# End-to-end tests run as root (real Slurm, systemd, mounts), with caches separate from the user's.
ROOT := $(shell [ "$$(id -u)" = 0 ] || echo sudo --preserve-env=CI)
CACHE := /var/cache/healthd-tests
AS_ROOT := $(ROOT) env HEALTHD_REQUIRE_E2E=1 PYTHONPYCACHEPREFIX=$(CACHE)/bytecode HYPOTHESIS_STORAGE_DIRECTORY=$(CACHE)/hypothesis
# Tests run in parallel (tests/conftest.py), since most of them wait. Failed tests run again alone; leftovers are removed.
PYTEST := .venv/bin/python scripts/run_tests.py -n auto
# Compile the test modules once, on two cores; otherwise each process of pytest-xdist would compile all of them.
COLLECT := .venv/bin/python -m pytest --collect-only -p no:cacheprovider
COMPILE := $(AS_ROOT) bash -c '$(COLLECT) tests/[a-d]*/ >/dev/null & $(COLLECT) tests/[e-z]*/ tests/test_*.py >/dev/null & wait'
# Options of test-all: warnings in third-party modules are errors, and examples are random (SEED=7 repeats them).
EXAMPLES := $(or $(SEED),$(shell echo $$RANDOM))
FURTHER := -W error --hypothesis-profile=random --hypothesis-seed=$(EXAMPLES)
# Without bytecode, each of the thousands of programs that the tests start would be compiled again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all soak test-long test-gpu test-spark check types lint design unit coverage unit-all unit-others test-packages e2e fuzz mutants bench bench-fleet bench-failslow bench-repair simulate wheel package release pins clean

help: ## print this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do printf '  make %-14s %s\n' "$$name" "$$what"; done

demo: .venv/.runtime ## run healthd with a fake DGX H100: a fault, the decision, the recovery
	@.venv/bin/python scripts/demo.py

test: .venv/.stamp test-packages ## tests that each change must pass: unit tests, and the main tests with a real Slurm and systemd; minutes
	@echo "test: all tests except the wide ones"
	@$(ROOT) rm -rf $(CACHE)/bytecode/tmp
	@$(COMPILE)
	@$(AS_ROOT) $(PYTEST) -rs

test-all: .venv/.stamp test-packages ## all tests, on each installed Python and Slurm version; a test that fails only in parallel also counts as failed
	@echo "test-all: random examples with SEED=$(EXAMPLES)"
	@scripts/unit_others.sh $(FURTHER)
	@echo "test-all: all tests"
	@$(ROOT) rm -rf $(CACHE)/bytecode/tmp
	@$(AS_ROOT) $(PYTEST) -rs -m 'not long and not gpu' --flaky-is-red $(FURTHER)
	@scripts/test_spark_within.sh $(or $(HEALTHD_SPARK_SECONDS),300)

check: .venv/.stamp ## lint, format, types, design rules and the contract of checks; seconds
	@echo "check: ruff, mypy, import-linter, shellcheck, design"
	@$(MAKE) --no-print-directory --output-sync=target -j2 types lint design

# mypy takes most of the time and uses one core.
types: .venv/.stamp
	@.venv/bin/mypy --strict --no-error-summary

lint: .venv/.stamp
	@.venv/bin/ruff check --quiet .
	@.venv/bin/ruff format --quiet --check . || { .venv/bin/ruff format --check .; exit 1; }
	@mkdir -p build; .venv/bin/lint-imports --no-cache >build/imports 2>&1 || { cat build/imports; exit 1; }
	@if command -v shellcheck >/dev/null; then shellcheck scripts/*.sh packaging/tree.sh packaging/debian/healthd.p* .ci/run; fi

design: .venv/.stamp
	@.venv/bin/python -m pytest tests/development/test_design.py tests/agent/settings/test_contract.py

unit: .venv/.stamp ## tests that need neither root nor daemons
	@$(PYTEST) --ignore=tests/e2e -m 'not long and not gpu'

coverage: .venv/.stamp ## branch coverage of each check by the unit tests; fails below 90 %
	@COVERAGE_FILE=.coverage .venv/bin/python -m coverage run --branch --include='checks/*,healthd/checks/*' -m pytest --ignore=tests/e2e
	@.venv/bin/python -m coverage report
	@for check in checks/*.py; do .venv/bin/python -m coverage report --include="$$check,healthd/$$check" --fail-under=90 --format=total >/dev/null || { echo "coverage: $$check is below 90 %"; exit 1; }; done

unit-all: unit unit-others ## unit tests on each installed Python from 3.10 to 3.13

unit-others: .venv/.stamp
	@scripts/unit_others.sh

e2e: .venv/.stamp test-packages ## only the end-to-end tests
	@$(AS_ROOT) $(PYTEST) -rs -m 'not long and not gpu' tests/e2e

test-long: .venv/.stamp test-packages ## the long form of some tests of make test: 1,000 kills
	@$(AS_ROOT) $(PYTEST) -rs -m long

# SECONDS=600 is shorter; SEED=7 repeats the events of that seed.
soak: .venv/.stamp test-packages ## an hour of random faults, kills, reloads, scrapes and clients; SECONDS=600 SEED=7
	@$(AS_ROOT) PYTHONPATH=bench .venv/bin/python -m soak --seconds $(or $(SECONDS),3600) --seed $(or $(SEED),0)

test-gpu: .venv/.stamp ## compare healthd validate on this machine's GPUs with published figures; needs PyTorch in .venv, else skipped
	@$(ROOT) env PYTHONPATH=.:tests/support .venv/bin/python -m pytest -rs -n 0 -p no:cacheprovider -m gpu tests/validation/test_validate_gpu.py

test-spark: ## compare fleet queries and answers on DuckDB and Spark; installs Spark (600 MB) and Java
	@scripts/test_spark.sh

fuzz: .venv/.stamp ## hostile inputs for every boundary, four minutes; make test has a short form
	@PYTHONPATH=.:tests/support .venv/bin/python -m tests.fuzz

# JOBS=4 tests four mutants in parallel. Results are kept in build/ by commit, so an interrupted run continues.
mutants: .venv/.stamp ## mutation tests of the decisions: the tests must detect each injected fault; an hour
	@.venv/bin/python scripts/mutants.py run --jobs $(or $(JOBS),2) --out build/mutants-$$(git describe --always --dirty).json

# NHC=DIR: a checkout of github.com/mej/nhc. NODE_EXPORTER=PROGRAM: Prometheus' node_exporter, if it is not in the PATH.
bench: .venv/.stamp test-packages ## measure the cost of healthd on this machine; NHC=DIR: measure NHC too
	@.venv/bin/python bench/bench.py

# JOBS=400000 is a smaller history; MONTHS and SEED work too. A history is generated once and kept in build/histories.
# LANL=FILE is public failure data (LA-UR-05-7318) for measuring lemons; without it that part is reported as not measured.
bench-fleet: .venv/.stamp ## measure the fleet store: ingest and query a generated history of 4 million jobs; LANL=FILE: public data too
	@.venv/bin/python bench/bench_fleet.py --jobs $(or $(JOBS),4000000) --months $(or $(MONTHS),11) --seed $(or $(SEED),1) $(if $(LANL),--lanl '$(LANL)')

# Thresholds were chosen on seeds below 100, such as SEED=1. ROWS=0 skips cost and periods. ALIBABA=DIR is a public trace
# (mini-batch-time of alibaba/clusterdata, cluster-trace-gpu-v2020); without it that part is not measured.
bench-failslow: .venv/.stamp ## measure accuracy and cost of healthd failslow on 500 generated sets; ALIBABA=DIR: public data too
	@PYTHONPATH=. .venv/bin/python bench/bench_failslow.py --seed $(or $(SEED),101) --rows $(or $(ROWS),10000000) $(if $(ALIBABA),--alibaba '$(ALIBABA)')

# ONLY="times races kills limit" runs these parts; SEED=7 repeats the trials of that seed.
bench-repair: .venv/.stamp test-packages ## measure the safety and speed of repair mode act: operators, jobs and 1,000 kills during repairs; an hour
	@$(AS_ROOT) .venv/bin/python bench/repair_trials.py --seed $(or $(SEED),0) $(if $(ONLY),--only $(ONLY))

simulate: .venv/.stamp ## simulate the fleet limit (file server failure, wave of faults) on 10,000 nodes, and 1,000 on a real slurmctld
	@$(ROOT) env PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 .venv/bin/python bench/simulate.py

wheel: .venv/.stamp ## build dist/*.whl and the sdist, install the wheel into a fresh environment and test it
	@scripts/wheel.sh

# REVISION=2 is the next package of the same version. The tested releases are RELEASE="bookworm trixie".
package: ## build dist/*.deb for Debian 12 and 13, each in its own root; RELEASE=bookworm builds one
	@$(ROOT) env REVISION=$(or $(REVISION),1) MIRROR=$(MIRROR) PIP_INDEX_URL=$(PIP_INDEX_URL) scripts/package.sh $(RELEASE)

release: .venv/.stamp ## build dist/: wheel, sdist, .deb packages and SHA256SUMS, from a clean tree; REVISION=2
	@REVISION=$(or $(REVISION),1) scripts/release.sh

# Does not use .venv: pins that no longer match pyproject.toml would prevent its installation.
pins: ## rewrite constraints.txt with the newest versions for tests, wheel and packages
	@"$$(scripts/setup.sh interpreters | tail -n 1 | cut -d' ' -f2-)" scripts/pins.py

test-packages:
	@scripts/setup.sh test-packages

clean: ## remove everything that was built; system packages and /var/cache/healthd-tests stay
	@rm -rf .venv .venv-3.* .venv-spark build dist wheels ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.stamp: pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh venv

# Without the development tools, which take three times as long to install.
.venv/.runtime: pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh venv-runtime
