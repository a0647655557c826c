# make e2e-upgrade runs an upgrade and judges it; make test runs what a change must pass. README.md explains both.
SHELL := bash
GO    ?= go
CMD   := bin/upgrade-e2e

# What is run: make e2e-upgrade TAGS=plain-pool,re-run OLD=/src/cozystack@main NEW=/src/cozystack@my-branch
FAMILY    ?=
TAGS      ?=
SKIP      ?=
PROVIDER  ?= embedded
NODES     ?=
REUSE     ?=
AUDIT_LOG ?=
OLD       ?=
NEW       ?=
FLUX      ?=
KEEP      ?=
ARTIFACTS ?=
SEED      ?=
DEFECT    ?=
BATCH     ?=
JOIN      ?=
DIRS      ?=
RUN       ?=
BUNDLE    ?=
SNAPSHOTS ?=
N         ?= 20

FLAGS = $(if $(FAMILY),--family=$(FAMILY)) $(if $(TAGS),--tags=$(TAGS)) $(if $(SKIP),--skip=$(SKIP)) --provider=$(PROVIDER) \
        $(if $(REUSE),--reuse=$(REUSE)) $(if $(NODES),--nodes=$(NODES)) $(if $(AUDIT_LOG),--audit-log='$(AUDIT_LOG)') $(if $(OLD),--old='$(OLD)') $(if $(NEW),--new='$(NEW)') $(if $(FLUX),--flux=$(FLUX)) \
        $(if $(ARTIFACTS),--artifacts='$(ARTIFACTS)') $(if $(SEED),--seed=$(SEED)) \
        $(if $(filter 0,$(SNAPSHOTS)),--snapshots=false) $(if $(BUNDLE),--bundle='$(BUNDLE)')

.PHONY: help e2e-upgrade e2e-repeat e2e-list e2e-defects e2e-judge e2e-merge e2e-bundle tools node-image test unit lint clean command

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

e2e-upgrade: command ## one upgrade per family: FAMILY= TAGS= SKIP= PROVIDER= NODES= REUSE= AUDIT_LOG= OLD= NEW= FLUX= KEEP=1 ARTIFACTS= SEED= SNAPSHOTS=0 BUNDLE=
	@$(CMD) run $(FLAGS) $(if $(filter 1,$(KEEP)),--keep)

e2e-repeat: command ## the same upgrade N=20 times, and what differs: TAGS= and the rest as above
	@$(CMD) repeat --times=$(N) $(FLAGS)

e2e-list: command ## families and scenarios, one line each
	@$(CMD) list

e2e-defects: command ## plant each defect and show what turns red: DEFECT=n BATCH=1 PROVIDER= TAGS= ARTIFACTS=, or JOIN="dir dir" of earlier calls
	@$(CMD) defects $(if $(JOIN),join $(JOIN),--provider=$(PROVIDER) $(if $(DEFECT),--defect=$(DEFECT)) $(if $(filter 1,$(BATCH)),--batch) $(if $(TAGS),--tags=$(TAGS)) $(if $(ARTIFACTS),--artifacts='$(ARTIFACTS)'))

e2e-judge: command ## judge a recorded run again: RUN=_artifacts/latest
	@$(CMD) judge $(or $(RUN),_artifacts/latest)

e2e-merge: command ## one verdict of several jobs' artifacts: DIRS="dir dir", FAMILY= TAGS= SKIP= when they were not to run all
	@$(CMD) merge $(if $(FAMILY),--family=$(FAMILY)) $(if $(TAGS),--tags=$(TAGS)) $(if $(SKIP),--skip=$(SKIP)) $(if $(ARTIFACTS),--artifacts='$(ARTIFACTS)') $(DIRS)

e2e-bundle: command ## save programs and node image into one archive for machines that shall not build them: BUNDLE=upgrade-e2e.bundle
	@$(CMD) bundle $(or $(BUNDLE),upgrade-e2e.bundle)

tools: command ## build the programs that a cluster consists of (some 20 minutes on 2 cores, once)
	@$(CMD) tools

node-image: command ## build the image of kind's nodes from Debian packages and Go modules, for PROVIDER=kind (as root)
	@$(CMD) node-image

test: tools unit ## unit tests with the race detector, and one embedded run per family
	@$(CMD) run

unit: ## unit tests with the race detector
	@$(GO) build -race ./...
	@# One package at a time: several boot a whole cluster, and two of those starve each other on two cores.
	@$(GO) tool gotestsum --format=pkgname-and-test-fails -- -race -p=1 $$($(GO) list ./... | grep -v /scenarios/)

lint: ## gofmt, go vet, staticcheck, actionlint
	@test -z "$$(gofmt -l e2e scenarios fixtures tools)" || { gofmt -l e2e scenarios fixtures tools; exit 1; }
	@$(GO) vet ./...
	@$(GO) tool staticcheck ./...
	@$(GO) tool actionlint

clean: command ## end what killed runs left behind, remove built programs and artifacts
	@$(CMD) clean
	@rm -rf bin _artifacts .snapshots

command:
	@$(GO) build -o $(CMD) ./e2e/cmd/upgrade-e2e
