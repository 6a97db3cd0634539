# The two main commands: `make run` and `make test`. `make run` and `make demo` build without the command `lab`, which takes a while to compile.

CARGO ?= cargo
MINUTES ?= 10

# What the tests build (also in scripts/run-tests): the whole workspace with failpoints.
TESTED = --workspace --features stampede-cli/failpoints

# The modules of the end-to-end tests, for `make soak ONLY=name`.
END_TO_END = $(sort $(basename $(notdir $(filter-out %/main.rs %/shop.rs %/cluster.rs,$(wildcard crates/cli/tests/it/*.rs)))) \
	$(notdir $(patsubst %/mod.rs,%,$(wildcard crates/cli/tests/it/*/mod.rs))))

.PHONY: help run demo test lint soak chaos bench bench-minimums lab lab-docs deps

help:
	@echo "make run              build and serve the tier solo with demo data on http://127.0.0.1:8080/"
	@echo "make demo             two nodes of the tier shared with demo data, a private PostgreSQL and a private Redis; Ctrl-C stops them;"
	@echo "                      TIER=queued QUEUE=rabbitmq: another tier, another queue"
	@echo "make test             format, lints, documentation and all tests with few repetitions (installs missing servers)"
	@echo "make lint             format, lints and documentation only"
	@echo "make soak             all tests with full repetitions, release build, and bench-minimums (more than an hour)"
	@echo "make soak ONLY=name   a part of them: a crate (lock, cache, ledger, engine, http, …) or a module of the end-to-end tests"
	@echo "                      ($(END_TO_END))"
	@echo "make chaos MINUTES=n  random faults with random seeds for n minutes; a failure prints its seed, CHAOS_SEED=n replays it"
	@echo "make bench            load test with verification; the report is written to target/bench; TIER=shared: of that tier"
	@echo "make bench-minimums   the benchmarks that fail below a minimum: of the gate, the ledger, the locks and the cache"
	@echo "make lab              the known versions of a flash sale side by side; the report is written to target/lab"
	@echo "make lab-docs         writes the figures of the last make lab into docs/lab.md, docs/lab.zh-CN.md and docs/lab.svg"
	@echo "make deps             licences, sources and known advisories of all dependencies (installs cargo-deny)"

run:
	$(CARGO) run --profile quick --locked -p stampede-cli --no-default-features -- serve --demo

demo:
	$(CARGO) run --profile quick --locked -p stampede-cli --no-default-features -- demo $(if $(TIER),--tier $(TIER)) $(if $(QUEUE),--queue $(QUEUE))

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked $(TESTED) --all-targets -- -D warnings
	$(CARGO) clippy --locked -p stampede-cli --no-default-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps

test: lint
	scripts/install-test-tools
	CARGO="$(CARGO)" scripts/run-tests

soak:
	scripts/install-test-tools
	CARGO="$(CARGO)" ONLY="$(ONLY)" scripts/soak

chaos:
	scripts/install-test-tools
	CARGO_PROFILE_RELEASE_LTO=off CHAOS_MINUTES=$(MINUTES) $(CARGO) test --release --locked $(TESTED) --test end_to_end chaos -- --nocapture

bench:
	$(CARGO) run --release --locked -p stampede-cli -- bench $(if $(TIER),--tier $(TIER)) $(if $(QUEUE),--queue $(QUEUE)) --report target/bench

bench-minimums:
	scripts/install-test-tools
	$(CARGO) bench --locked --no-fail-fast -p stampede-gate -p stampede-ledger -p stampede-lock -p stampede-cache \
		--bench admit --bench record --bench expiry --bench redis --bench hits

lab:
	$(CARGO) run --release --locked -p stampede-cli -- lab --report target/lab

lab-docs:
	$(CARGO) run --release --locked -p stampede-cli -- lab --report target/lab --update-docs docs

deps:
	$(CARGO) deny --version >/dev/null 2>&1 || $(CARGO) install --locked cargo-deny
	$(CARGO) deny check bans licenses sources
	CARGO=$(CARGO) scripts/check-advisories
