# The tasks of development. Plain `make` prints the daily targets, `make help-all` all targets.

PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
ARGS ?=
# One more than the two cores that the tests are timed on, because workers often wait for processes to start.
WORKERS ?= 3
# Tests start hundreds of Python processes. With bytecode, a module is compiled for the first of them only, so
# PYTHONDONTWRITEBYTECODE is unset.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest

# Settings of the local cluster and of load, which are passed on unchanged (docs/reference/settings.md).
export DATA PORT BOOKIES GATEWAYS ZONES DURABILITY AUTO_FIX_COOKIES LOST_BOOKIE_DELAY_S RESTART
export TLS LOG POSTGRES_DSN REDIS_URL LOG_LEVEL FILE USERS TIME GATEWAY SEED SEEDS

.DEFAULT_GOAL := help
.PHONY: help help-all docs setup setup-spark browser fmt check test unit run spark demo bench load scenarios sim logsim explore mutants mutate chaos fuzz heal produce lock vendor screenshots dist release crash flips clean chaos-spark attack conformance

DAILY := run test unit check fmt demo bench spark docs clean

help:
	@$(foreach name,$(DAILY),$(call described,$(name));) echo "  make help-all     all targets"

help-all: ## print all targets with their descriptions
	@$(call described,[a-z0-9-]+)

described = grep -hE '^([a-z0-9-]+ )*$(1):.*\#\#' $(MAKEFILE_LIST) | awk -F ':.*\#\# ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: .venv/installed-dev shared/quorumlog/client/sync.py ## create .venv with all packages that the tests, checks and benchmarks need

setup-spark: .venv/installed-spark ## create .venv with the packages for a local cluster and Spark only

# If PYTHON is given, a .venv with another Python is created again.
ASKED := $(filter-out file,$(origin PYTHON))
ANEW := $(if $(ASKED),$(shell $(PYTHON) requirements/venv.py --differs && echo anew))
.PHONY: anew
anew:

define install
	@$(PYTHON) requirements/venv.py $(1) $(if $(ASKED),--asked)
	@touch .venv/installed-run $(if $(filter dev,$(1)),.venv/installed-spark) $@
endef

.venv/installed-dev: requirements/dev.lock pyproject.toml $(ANEW)
	$(call install,dev)

.venv/installed-run: requirements/run.lock pyproject.toml $(ANEW)
	$(call install,run)

.venv/installed-fuzz: requirements/fuzz.lock pyproject.toml $(ANEW)
	$(call install,fuzz)

.venv/installed-spark: requirements/spark.lock pyproject.toml $(ANEW)
	$(call install,spark)

# Each installation generates this file too. The rule is for a clone whose async SDK has changed since.
shared/quorumlog/client/sync.py: setup.py $(filter-out %/sync.py,$(wildcard shared/quorumlog/client/*.py)) | .venv/installed-dev
	@$(PY) -c "import setup; setup.SYNC.write_text(setup.generated())"

# Debian's package, because no registry has a browser as a wheel. Without a browser, the tests that need it are skipped.
browser: .venv/installed-browser ## install Chromium with apt-get (needs root), for the tests of web pages

.venv/installed-browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] \
		&& export DEBIAN_FRONTEND=noninteractive && timeout 600 sh -c 'apt-get update \
		&& apt-get install -y --no-install-recommends chromium' >/dev/null 2>&1; } \
		|| echo "Chromium is missing and apt-get can't install it: tests of web pages are skipped"
	@[ ! -d .venv ] || touch $@

fmt: setup ## format the code, and fix lint errors that can be fixed automatically
	$(PY) -m ruff check -q --fix .
	$(PY) -m ruff format .

check: setup ## check formatting, lint rules, types, import rules and the compose files
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/lint-imports
	.venv/bin/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml deploy/compose/compose.yaml

test: setup browser ## run all tests; ARGS= for pytest
	@mkdir -p build
	$(PYTEST) -n $(WORKERS) --durations 15 --junitxml build/junit.xml $(ARGS)

# Folders, because importing all other tests would take longer than running these.
UNIT := tests/unit/protocol tests/unit/wire tests/model/scenarios tests/model/regressions tests/outside/fuzz \
	tests/cluster/upgrade $(wildcard tests/test_*.py)

unit: setup ## run the quick tests (a minute): those that start no processes and search no state spaces
	$(PYTEST) -n 2 $(UNIT) $(ARGS)

run: .venv/installed-run ## run a whole cluster on this machine until Ctrl-C; TLS=1 uses mutual TLS between its services
	@exec .venv/bin/quorumlog serve

spark: .venv/installed-spark ## run the Spark job in FILE= against the local cluster, which is started if none runs
	@exec $(PY) -m loadtest.submit $(ARGS)

demo: .venv/installed-run ## send each line of FILE= (default: a log file) through a cluster whose processes are killed
	@exec $(PY) -m loadtest.demo

# `make bench ARGS=--list` names all benchmarks. Variables that are set become options, and a benchmark rejects options
# that it does not have.
BENCH_ALONE := bookie compaction compression consumers deleted durable-streams forward idle keys many metadata queues rebuild spark streams submit tail tokens
BENCH_OPTIONS := TIME ROUNDS OUT LEDGERS ENTRIES IDS COUNT ROWS RECORDS KEYS
lower = $(shell echo $(1) | tr A-Z a-z)

bench: setup $(if $(or $(filter $(BENCH_ALONE),$(ONLY)),$(filter --list --help,$(ARGS))),,build/nats build/bookkeeper) ## compare with JetStream and BookKeeper, or run benchmark ONLY= (ARGS=--list); TIME= ROUNDS= OUT=docs/internals/journal TLS=1
	@exec $(PY) -m loadtest.bench $(addprefix --only ,$(ONLY)) \
		$(foreach name,$(BENCH_OPTIONS),$(if $($(name)),--$(call lower,$(name)) $($(name)))) $(ARGS)

# The benchmark leaves out systems that could not be built, and its report names them.
build/nats: $(wildcard loadtest/nats/go.*)
	@mkdir -p build
	@(cd loadtest/nats && $(GO) build -o $(CURDIR)/build/nats github.com/nats-io/natscli/nats) \
		|| echo "Go is missing or its modules can't be downloaded: nats bench is left out"

build/bookkeeper: loadtest/bookkeeper/pom.xml loadtest/bookkeeper/src/main/java/Load.java loadtest/bookkeeper/src/main/resources/log4j2.properties
	@{ command -v mvn >/dev/null && mvn -q -B -f loadtest/bookkeeper/pom.xml package && touch build/bookkeeper; } \
		|| echo "Maven is missing or its artifacts can't be downloaded: BookKeeper is left out"

load: setup ## let USERS= users append and read for TIME=, at a new cluster or at GATEWAY=; writes an HTML report
	@exec $(PY) -m loadtest.load

scenarios: setup ## replay the recorded scenarios of the protocol, and rewrite their expected results
	$(PY) -m tests.model.scenarios --write

docs: setup ## regenerate the tables in the docs and the picture of README, and build the docs as a site in build/site
	@for table in matrix picture roles scopes settings; do $(PY) -m tests.support.$$table --write || exit; done
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict -q && echo "open build/site/index.html"

sim: setup ## simulate clusters with faults: SEEDS= is the number of runs, SEED= prints one as a story; OF=services simulates whole services, OF=queues work queues
	$(if $(filter queues,$(OF)),$(PY) -m tests.model.queues,$(PY) -m tests.model.sim --of $(or $(OF),machines)) --seed $(or $(SEED),1) --seeds $(or $(SEEDS),$(if $(SEED),1,1000))

logsim: setup ## simulate a log with several gateways, publishers and kills: SEEDS= is the number of runs, SEED= prints one as a story
	$(PY) -m tests.model.logs --seed $(or $(SEED),1) --seeds $(or $(SEEDS),$(if $(SEED),1,1000))

explore: setup ## search all interleavings of events in small models: SCOPES= names of models (default: all)
	$(PY) -m tests.model.explore $(SCOPES)

mutants: setup ## remove each safety guard of the protocol in turn, and check that a test notices; RULES= words that select guards
	$(PY) -m tests.mutation.mutants $(RULES)

mutate: setup ## remove each if, early return, lock and SQL condition in turn, and run its tests, for TIME=; PATHS=, ARGS=--resume
	@exec $(PY) -m tests.mutation.mutate $(if $(PATHS),--paths $(PATHS)) $(if $(TIME),--time $(TIME)) $(ARGS)

chaos: setup ## kill processes, cut power, partition networks for TIME=, or until KILLS= CUTS= PARTITIONS= METADATA_CUTS= FAILOVERS=
	@exec $(PY) -m tests.cluster.chaos --seed $(or $(SEED),1) $(if $(TIME),--time $(TIME)) \
		--kills $(or $(KILLS),0) --power-cuts $(or $(CUTS),0) --partitions $(or $(PARTITIONS),0) \
		--metadata-cuts $(or $(METADATA_CUTS),0) --failovers $(or $(FAILOVERS),0) $(ARGS)

.PHONY: upgrade
upgrade: setup ## upgrade a cluster from an earlier release (FROM= tag or commit), one service at a time under load, and back
	@exec $(PY) -m tests.cluster.upgrade $(if $(FROM),--from $(FROM)) --seed $(or $(SEED),1) $(ARGS)

.PHONY: restore
restore: setup ## restore (RESTORES=), fail over (FAILOVERS=) and rebuild (REBUILDS=) the database under load and faults; SEED=
	@exec $(PY) -m tests.cluster.restore --seed $(or $(SEED),1) $(if $(RESTORES),--restores $(RESTORES)) \
		$(if $(FAILOVERS),--failovers $(FAILOVERS)) $(if $(REBUILDS),--rebuilds $(REBUILDS)) $(ARGS)

fuzz: setup .venv/installed-fuzz ## send random bytes and requests for TIME=; each must be rejected cleanly or answered correctly
	@exec $(PY) -m tests.outside.fuzz --time $(or $(TIME),120s) --seed $(or $(SEED),1) $(ARGS)

attack: setup ## attack a new cluster as strangers, slow peers and crowds: SEED= REQUESTS= SECONDS=, ONLY= campaigns
	@exec $(PY) -m tests.outside.attack --seed $(or $(SEED),1) $(if $(REQUESTS),--requests $(REQUESTS)) \
		$(if $(SECONDS),--seconds $(SECONDS)) $(addprefix --only ,$(ONLY)) $(ARGS)

.PHONY: hosts
hosts: setup ## run a cluster on three hosts (network namespaces) with the commands of docs/learn/production.md, and remove one host
	@exec $(PY) -m tests.cluster.hosts

.PHONY: chart
chart: setup build/chart ## render the Helm chart in deploy/, and check each object against Kubernetes' types; needs Go
	@[ ! -x build/chart ] || $(PYTEST) -q -n 0 tests/cluster/hosts/test_chart.py

# The modules come from Go's proxy, and take some 400 MB when compiled. Without Go, the tests of the chart are skipped.
GO := env GOMODCACHE=$(CURDIR)/build/go/mod GOCACHE=$(CURDIR)/build/go/cache GOFLAGS=-modcacherw GOTOOLCHAIN=local \
	$(or $(shell command -v go),$(wildcard /usr/local/go/bin/go))

build/chart: $(wildcard tests/cluster/hosts/chart/*)
	@mkdir -p build
	@(cd tests/cluster/hosts/chart && $(GO) build -o $(CURDIR)/build/chart .) \
		|| echo "Go is missing or its modules can't be downloaded: the chart is not rendered"

.PHONY: e2e-compose
e2e-compose: setup ## test compose.yaml in a separate container engine (needs root, apt-get, Go), with failures of containers and networks
	@exec $(PY) -m tests.cluster.compose --seed $(or $(SEED),1) $(ARGS)

produce: setup ## append RECORDS= records to a log and consume them, while gateways, bookies and workers are killed
	@exec $(PY) -m loadtest.produce $(if $(RECORDS),--records $(RECORDS)) $(ARGS)

conformance: setup ## run the Durable Streams conformance suite against a new cluster (needs Node); KILLS=1 kills processes meanwhile
	@exec $(PY) -m tests.outside.conformance $(if $(KILLS),--kills) $(ARGS)

heal: setup ## kill bookies and delete their disks under load, and wait for all copies; ARGS=--rolling restarts bookies instead
	@exec $(PY) -m loadtest.heal $(ARGS)

.PHONY: many rebuild
many rebuild: setup ## measure the cost of an audit (many) or of rebuilding the metadata (rebuild) with LEDGERS="10000 100000"
	@exec $(PY) -m loadtest.bench --only $@ $(if $(LEDGERS),--ledgers $(LEDGERS)) $(ARGS)

.PHONY: test-spark
test-spark: setup ## run Spark's slow tests: older PySparks (VERSIONS="4.0.5 4.1.4"), Spark Connect, killed drivers, executors with a zip of the package
	@PYSPARK_VERSIONS="$(or $(VERSIONS),4.0.5)" $(PYTEST) -n 0 -rs tests/spark/test_versions.py tests/spark/test_chaos.py \
		tests/spark/test_zip.py $(ARGS)

chaos-spark: setup ## kill the drivers and gateways of Spark jobs and streams for TIME=; ROWS= RESTARTS=, or EVERY= for one stream
	@exec $(PY) -m loadtest.spark_chaos --time $(or $(TIME),60s) --seed $(or $(SEED),1) \
		$(if $(ROWS),--rows $(ROWS)) $(if $(RESTARTS),--restarts $(RESTARTS)) \
		$(if $(EVERY),--every $(EVERY))

.PHONY: scaling
scaling: setup ## estimate the load that 100 bookies and 20 gateways can carry; ARGS="--bookies 10 --gateways 2"
	@exec $(PY) -m loadtest.scaling $(ARGS)

crash: setup ## cut off a bookie's storage at POINTS= moments, by power cut or kill, and check what it recovers
	@$(PY) -m tests.unit.bookie.crash --points $(or $(POINTS),1000) --seed $(or $(SEED),1)

flips: setup ## change FLIPS= bits and sizes in a stopped bookie's files: each change must be detected or harmless
	@$(PY) -m tests.unit.bookie.flips --flips $(or $(FLIPS),10000) --seed $(or $(SEED),1)

dist: setup ## build a wheel and an sdist of HEAD in dist/, and try the wheel in an empty environment
	rm -rf dist build/dist
	mkdir -p dist build/dist
	git archive HEAD | tar -x -C build/dist
	cd build/dist && $(CURDIR)/$(PY) -c "from setuptools import build_meta as build; \
		build.build_sdist('$(CURDIR)/dist'); build.build_wheel('$(CURDIR)/dist')" > $(CURDIR)/build/dist.log
	$(PY) -m tests.cluster.dist dist/*.whl

release: ## check and build release VERSION=, and print the commands that publish it
	@test -n "$(VERSION)" || { echo "give the version, for example: make release VERSION=0.1.0"; exit 2; }
	@test -z "$$(git status --porcelain)" || { echo "commit or remove what git status shows"; exit 2; }
	@grep -q '^__version__.*"$(VERSION)"' shared/quorumlog/__init__.py \
		|| { echo "shared/quorumlog/__init__.py has another version"; exit 2; }
	@grep -q '^## \[$(VERSION)\] - 20' CHANGELOG.md || { echo "CHANGELOG.md has no dated section of $(VERSION)"; exit 2; }
	@grep -q '^appVersion: "$(VERSION)"' deploy/helm/quorumlog/Chart.yaml || { echo "Chart.yaml has another appVersion"; exit 2; }
	$(MAKE) check test dist
	@echo "now: git tag -a v$(VERSION), with the section of CHANGELOG.md; git push origin v$(VERSION)"
	@echo "     python -m twine upload dist/*; docker build -t quorumlog:$(VERSION) . and push the image"

screenshots: setup browser ## take pictures of the console beside a cluster under load (docs/console)
	@.venv/bin/python -m tests.support.screenshots

vendor: setup ## copy the console's JavaScript libraries, as its lock file names them (needs npm)
	@.venv/bin/python -m tests.support.vendor

lock: setup ## rewrite requirements/*.lock from pyproject.toml, with the newest versions
	@$(PIP) install -q uv
	.venv/bin/uv pip compile -q pyproject.toml $(LOCK) --group setup --extra services -o requirements/services.lock
	.venv/bin/uv pip compile -q pyproject.toml $(LOCK) --group setup --extra server -o requirements/run.lock
	.venv/bin/uv pip compile -q pyproject.toml $(LOCK) --group setup --extra server --extra spark \
		-o requirements/spark.lock
	.venv/bin/uv pip compile -q pyproject.toml $(LOCK) $(DEV) -o requirements/dev.lock
	.venv/bin/uv pip compile -q pyproject.toml $(LOCK) $(DEV) --group fuzz -o requirements/fuzz.lock

# All packages except those that only `make fuzz` needs.
DEV := --all-extras $(addprefix --group ,bench setup dev)
LOCK := --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --upgrade

clean: ## remove everything that was built; .quorumlog (the cluster's data) stays
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -rf shared/*.egg-info
