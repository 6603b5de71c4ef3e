# The commands for working on the project.  What each step runs is in .ci/steps.py.
.DEFAULT_GOAL := help
steps := .venv/bin/python .ci/steps.py

.PHONY: help
help:           ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: setup
setup:          ## make .venv with everything below
	@.ci/setup dev

.PHONY: fix
fix: setup      ## format, and apply the safe fixes of the linter
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

.PHONY: constraints
constraints: setup ## bring constraints.txt up to date
	UV_PYTHON_DOWNLOADS=never .venv/bin/uv pip compile pyproject.toml \
	  --universal --python-version 3.10 --all-extras --group dev --group fuzz --group bench --upgrade \
	  --no-header --no-annotate --quiet --output-file constraints.txt

.PHONY: check integration faults interop conformance dist ci coverage fuzz changes soak
check: setup    ## format, lint, layers, spelling, dependencies, types, unit tests (< 60 s)
	@$(steps) check
integration: setup ## sockets, files, real etcd and NATS processes
	@$(steps) integration
coverage: setup ## unit and integration tests, and what they do not reach
	@$(steps) coverage
faults: setup   ## cut, stall, corrupt, kill
	@$(steps) faults
interop: setup  ## with the genuine wheel (DYN_GENUINE_PYTHON)
	@$(steps) interop
conformance: setup ## the black-box suite, in the pairs ours/ours, genuine/ours, ours/genuine
	@$(steps) conformance
dist: setup     ## build wheel and sdist in dist/ and look into them
	@$(steps) dist
ci: setup       ## what ./run-tests runs: the checks above, fuzz, examples (< 15 min)
	@$(steps) ci
fuzz: setup     ## any bytes into all that reads what peers wrote (5 s each, DYN_FUZZ_SECONDS)
	@$(steps) fuzz
changes: setup  ## what CHANGELOG.md will say of the fragments in changes/
	@$(steps) changes
soak: setup     ## integration, faults and fuzz in their long forms (hours)
	@$(steps) soak

.PHONY: bench
bench: setup    ## ours, the genuine wheel, grpc.aio, NATS (BENCH="--quick --only calls")
	@.venv/bin/python -m pip install -qq --group bench --constraint constraints.txt
	@.venv/bin/python -m benchmarks $(BENCH)

.PHONY: changelog
changelog: setup ## assemble changes/ into CHANGELOG.md, for a release
	.venv/bin/towncrier build --yes --version "$$(.venv/bin/hatchling version)"
