# Everything that one does here. Plain `make` prints the ten targets of every day, `make help-all` all of them.

PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
ARGS ?=
# More than the two cores that the tests are timed on: one worker or another waits for a process to start.
WORKERS ?= 3
# Tests start hundreds of Python processes: each module is compiled for the first of them only, whatever
# the environment says of bytecode.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest

# Settings of the local cluster and of load, handed on as they are (docs/reference/settings.md).
export DATA PORT BOOKIES GATEWAYS ZONES DURABILITY AUTO_FIX_COOKIES LOST_BOOKIE_DELAY_S RESTART
export TLS LOG POSTGRES_DSN REDIS_URL LOG_LEVEL FILE USERS TIME GATEWAY SEED SEEDS

.DEFAULT_GOAL := help
.PHONY: help help-all docs setup setup-spark browser fmt check test unit run spark demo bench load scenarios sim logsim explore mutants mutate chaos fuzz heal produce lock dist release crash flips clean chaos-spark attack conformance

DAILY := run test unit check fmt demo bench spark docs clean

help:
	@$(foreach name,$(DAILY),$(call described,$(name));) echo "  make help-all     all targets"

help-all: ## print all targets
	@$(call described,[a-z0-9-]+)

described = grep -hE '^([a-z0-9-]+ )*$(1):.*\#\#' $(MAKEFILE_LIST) | awk -F ':.*\#\# ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: .venv/installed-dev shared/quorumlog/client/sync.py ## make .venv with all that tests, checks and benchmarks need

setup-spark: .venv/installed-spark ## the same for the cluster and Spark only

# Where PYTHON is given, a .venv of another Python is made anew.
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

# An installation generates it too. This is for a clone whose async SDK has changed since.
shared/quorumlog/client/sync.py: setup.py $(filter-out %/sync.py,$(wildcard shared/quorumlog/client/*.py)) | .venv/installed-dev
	@$(PY) -c "import setup; setup.SYNC.write_text(setup.generated())"

# Debian's package: no registry has a browser as a wheel. Tests that need one are skipped where there is none.
browser: .venv/installed-browser ## a Chromium for the tests of web pages, where apt-get may install it

.venv/installed-browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] \
		&& export DEBIAN_FRONTEND=noninteractive && timeout 600 sh -c 'apt-get update \
		&& apt-get install -y --no-install-recommends chromium' >/dev/null 2>&1; } \
		|| echo "no Chromium here, and apt-get can't install it: tests of web pages are skipped"
	@[ ! -d .venv ] || touch $@

fmt: setup ## format the code, fix what can be fixed
	$(PY) -m ruff check -q --fix .
	$(PY) -m ruff format .

check: setup ## format, lint, types, import rules, the compose file
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/lint-imports
	.venv/bin/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml deploy/compose/compose.yaml

test: setup browser ## all tests
	@mkdir -p build
	$(PYTEST) -n $(WORKERS) --durations 15 --junitxml build/junit.xml $(ARGS)

unit: setup ## the quick tests, a minute: the protocol, wire formats, scenarios; what starts no processes and searches no worlds
	$(PYTEST) -n 2 -m "not processes and not searches" $(ARGS)

run: .venv/installed-run ## a whole cluster on this machine, until Ctrl-C; TLS=1: with mutual TLS inside
	@exec .venv/bin/quorumlog serve

spark: .venv/installed-spark ## run the Spark job FILE= against the local cluster, started where none runs
	@exec $(PY) -m loadtest.submit $(ARGS)

demo: .venv/installed-run ## send FILE= (or a log of this machine) through a cluster in which processes are killed
	@exec $(PY) -m loadtest.demo

# `make bench ARGS=--list` names all benchmarks. The variables that are set become options; a benchmark rejects those that
# it does not have.
BENCH_ALONE := bookie compression consumers deleted durable-streams forward idle many metadata rebuild spark streams submit tail tokens
BENCH_OPTIONS := TIME ROUNDS OUT LEDGERS ENTRIES IDS COUNT ROWS
lower = $(shell echo $(1) | tr A-Z a-z)

bench: setup $(if $(or $(filter $(BENCH_ALONE),$(ONLY)),$(filter --list --help,$(ARGS))),,build/nats build/bookkeeper) ## ours beside peers, or ONLY= another benchmark (ARGS=--list): TIME= ROUNDS= OUT=docs/internals/journal TLS=1
	@exec $(PY) -m loadtest.bench $(addprefix --only ,$(ONLY)) \
		$(foreach name,$(BENCH_OPTIONS),$(if $($(name)),--$(call lower,$(name)) $($(name)))) $(ARGS)

# What is not here is left out of the benchmark, which says so.
build/nats: $(wildcard loadtest/nats/go.*)
	@mkdir -p build
	@(cd loadtest/nats && $(GO) build -o $(CURDIR)/build/nats github.com/nats-io/natscli/nats) \
		|| echo "no Go here, or no way to its modules: nats bench is left out"

build/bookkeeper: loadtest/bookkeeper/pom.xml loadtest/bookkeeper/src/main/java/Load.java loadtest/bookkeeper/src/main/resources/log4j2.properties
	@{ command -v mvn >/dev/null && mvn -q -B -f loadtest/bookkeeper/pom.xml package && touch build/bookkeeper; } \
		|| echo "no Maven here, or no way to its artifacts: BookKeeper is left out"

load: setup ## USERS= users for TIME= against a running cluster (GATEWAY=), with an HTML report
	@exec $(PY) -m loadtest.load

scenarios: setup ## play the golden traces again and write down what comes of them
	$(PY) -m tests.model.scenarios --write

docs: setup ## write the tables that come from the code, and build the documentation as a site: build/site/index.html
	@for table in matrix picture roles scopes settings; do $(PY) -m tests.support.$$table --write || exit; done
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict -q && echo "open build/site/index.html"

sim: setup ## simulate clusters under faults: SEEDS= how many, or SEED= one as a story; OF=services
	$(PY) -m tests.model.sim --of $(or $(OF),machines) --seed $(or $(SEED),1) --seeds $(or $(SEEDS),$(if $(SEED),1,1000))

logsim: setup ## simulate a log of several gateways under publishers, kills and duels: SEEDS=, or SEED= as a story
	$(PY) -m tests.model.logs --seed $(or $(SEED),1) --seeds $(or $(SEEDS),$(if $(SEED),1,1000))

explore: setup ## search all interleavings of small worlds: SCOPES= names, or all
	$(PY) -m tests.model.explore $(SCOPES)

mutants: setup ## take each safety guard out; its absence must be noticed: RULES= words
	$(PY) -m tests.mutation.mutants $(RULES)

mutate: setup ## take every if, early return, lock and SQL condition out in turn for TIME=: PATHS=, ARGS=--resume
	@exec $(PY) -m tests.mutation.mutate $(if $(PATHS),--paths $(PATHS)) $(if $(TIME),--time $(TIME)) $(ARGS)

chaos: setup ## kills, power cuts, partitions, failing calls for TIME=, or until KILLS= CUTS= PARTITIONS= METADATA_CUTS= FAILOVERS=
	@exec $(PY) -m tests.cluster.chaos --seed $(or $(SEED),1) $(if $(TIME),--time $(TIME)) \
		--kills $(or $(KILLS),0) --power-cuts $(or $(CUTS),0) --partitions $(or $(PARTITIONS),0) \
		--metadata-cuts $(or $(METADATA_CUTS),0) --failovers $(or $(FAILOVERS),0) $(ARGS)

.PHONY: upgrade
upgrade: setup ## a cluster of an earlier release (FROM= tag or commit) is upgraded service by service under load, and back
	@exec $(PY) -m tests.cluster.upgrade $(if $(FROM),--from $(FROM)) --seed $(or $(SEED),1) $(ARGS)

.PHONY: restore
restore: setup ## a database restored (RESTORES=), failed over (FAILOVERS=), rebuilt (REBUILDS=) in a storm: SEED=
	@exec $(PY) -m tests.cluster.restore --seed $(or $(SEED),1) $(if $(RESTORES),--restores $(RESTORES)) \
		$(if $(FAILOVERS),--failovers $(FAILOVERS)) $(if $(REBUILDS),--rebuilds $(REBUILDS)) $(ARGS)

fuzz: setup .venv/installed-fuzz ## any bytes and any requests for TIME=: refused as such, or right
	@exec $(PY) -m tests.outside.fuzz --time $(or $(TIME),120s) --seed $(or $(SEED),1) $(ARGS)

attack: setup ## strangers, slow peers and crowds on a cluster of its own: SEED= REQUESTS= SECONDS= ONLY= campaigns
	@exec $(PY) -m tests.outside.attack --seed $(or $(SEED),1) $(if $(REQUESTS),--requests $(REQUESTS)) \
		$(if $(SECONDS),--seconds $(SECONDS)) $(addprefix --only ,$(ONLY)) $(ARGS)

.PHONY: hosts
hosts: setup ## three hosts in network namespaces, made by the commands of docs/learn/production.md; one is taken away
	@exec $(PY) -m tests.cluster.hosts

.PHONY: chart
chart: setup build/chart ## render the Helm chart of deploy/ and check each object by Kubernetes' own types; needs Go
	@[ ! -x build/chart ] || $(PYTEST) -q -n 0 tests/cluster/hosts/test_chart.py

# Its modules come from Go's proxy, some 400 MB with what is compiled of them; the tests are skipped without it.
GO := env GOMODCACHE=$(CURDIR)/build/go/mod GOCACHE=$(CURDIR)/build/go/cache GOFLAGS=-modcacherw GOTOOLCHAIN=local \
	$(or $(shell command -v go),$(wildcard /usr/local/go/bin/go))

build/chart: $(wildcard tests/cluster/hosts/chart/*)
	@mkdir -p build
	@(cd tests/cluster/hosts/chart && $(GO) build -o $(CURDIR)/build/chart .) \
		|| echo "no Go here, or no way to its modules: the chart is not rendered"

.PHONY: e2e-compose
e2e-compose: setup ## compose.yaml on an engine of its own (root, apt-get, Go): every container, the engine, networks hurt
	@exec $(PY) -m tests.cluster.compose --seed $(or $(SEED),1) $(ARGS)

produce: setup ## RECORDS= numbered records go to a log and its consumers while gateways, bookies and workers are killed
	@exec $(PY) -m loadtest.produce $(if $(RECORDS),--records $(RECORDS)) $(ARGS)

conformance: setup ## the Durable Streams suite against a cluster of its own, where Node is; KILLS=1: processes are killed
	@exec $(PY) -m tests.outside.conformance $(if $(KILLS),--kills) $(ARGS)

heal: setup ## bookies die with their disks under load and all copies come back; ARGS=--rolling restarts them
	@exec $(PY) -m loadtest.heal $(ARGS)

.PHONY: many rebuild
many rebuild: setup ## benchmarks: what an audit, or a rebuild of the metadata, costs with LEDGERS="10000 100000"
	@exec $(PY) -m loadtest.bench --only $@ $(if $(LEDGERS),--ledgers $(LEDGERS)) $(ARGS)

.PHONY: test-spark
test-spark: setup ## Spark's slow tests: older PySparks (VERSIONS="4.0.5 4.1.4", installed below build/), Connect, killed drivers, executors with a zip
	@PYSPARK_VERSIONS="$(or $(VERSIONS),4.0.5)" $(PYTEST) -n 0 -rs tests/spark/test_versions.py tests/spark/test_chaos.py \
		tests/spark/test_zip.py $(ARGS)

chaos-spark: setup ## Spark jobs and streams whose drivers and gateways are killed, for TIME=: ROWS= RESTARTS=
	@exec $(PY) -m loadtest.spark_chaos --time $(or $(TIME),60s) --seed $(or $(SEED),1) \
		$(if $(ROWS),--rows $(ROWS)) $(if $(RESTARTS),--restarts $(RESTARTS))

.PHONY: scaling
scaling: setup ## what 100 bookies and 20 gateways carry by the measured figures: ARGS="--bookies 10 --gateways 2"
	@exec $(PY) -m loadtest.scaling $(ARGS)

crash: setup ## cut a bookie's storage off at POINTS= moments, by power or by a kill
	@$(PY) -m tests.unit.bookie.crash --points $(or $(POINTS),1000) --seed $(or $(SEED),1)

flips: setup ## change FLIPS= bits and sizes of a stopped bookie's files: all are found, or harmless
	@$(PY) -m tests.unit.bookie.flips --flips $(or $(FLIPS),10000) --seed $(or $(SEED),1)

dist: setup ## a wheel and an sdist of HEAD in dist/, tried in an empty environment
	rm -rf dist build/dist
	mkdir -p dist build/dist
	git archive HEAD | tar -x -C build/dist
	cd build/dist && $(CURDIR)/$(PY) -c "from setuptools import build_meta as build; \
		build.build_sdist('$(CURDIR)/dist'); build.build_wheel('$(CURDIR)/dist')" > $(CURDIR)/build/dist.log
	$(PY) -m tests.cluster.dist dist/*.whl

release: ## check, build and name what to push: VERSION=
	@test -n "$(VERSION)" || { echo "say which: make release VERSION=0.1.0"; exit 2; }
	@test -z "$$(git status --porcelain)" || { echo "commit or remove what git status shows"; exit 2; }
	@grep -q '^__version__.*"$(VERSION)"' shared/quorumlog/__init__.py \
		|| { echo "shared/quorumlog/__init__.py has another version"; exit 2; }
	@grep -q '^## \[$(VERSION)\] - 20' CHANGELOG.md || { echo "CHANGELOG.md has no dated section of $(VERSION)"; exit 2; }
	@grep -q '^appVersion: "$(VERSION)"' deploy/helm/quorumlog/Chart.yaml || { echo "Chart.yaml has another appVersion"; exit 2; }
	$(MAKE) check test dist
	@echo "now: git tag -a v$(VERSION), with the section of CHANGELOG.md; git push origin v$(VERSION)"
	@echo "     python -m twine upload dist/*; docker build -t quorumlog:$(VERSION) . and push the image"

lock: setup ## write requirements/*.lock anew from pyproject.toml
	@$(PIP) install -q uv
	.venv/bin/uv pip compile -q pyproject.toml $(LOCK) --group setup --extra services -o requirements/services.lock
	.venv/bin/uv pip compile -q pyproject.toml $(LOCK) --group setup --extra server -o requirements/run.lock
	.venv/bin/uv pip compile -q pyproject.toml $(LOCK) --group setup --extra server --extra spark \
		-o requirements/spark.lock
	.venv/bin/uv pip compile -q pyproject.toml $(LOCK) $(DEV) -o requirements/dev.lock
	.venv/bin/uv pip compile -q pyproject.toml $(LOCK) $(DEV) --group fuzz -o requirements/fuzz.lock

# All but what only `make fuzz` needs.
DEV := --all-extras $(addprefix --group ,bench setup dev)
LOCK := --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --upgrade

clean: ## remove what was built; .quorumlog (your data) stays
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -rf shared/*.egg-info
