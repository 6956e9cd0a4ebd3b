# make run   virtual environment, install, main job      make test   the test-suite in the same environment
# make smoke does something basic of each storey still work? 20 seconds, before every commit
# make bench every latency beside its floor              make lint   ruff, ruff format, mypy
# make paper  every experiment of the papers, one report; ARGS='quick=true' takes minutes, ARGS='only=mlsys' a part (docs/experiments.md)
# make test-cuda  the tests that need a GPU: on CUDA where there is one, else on the one in software (tests/softgpu)
# make campaign  faults, mutated frames and strangers, for as long as ARGS='--minutes 10' says (docs/trust.md)
# make zoo   real models and training loops beside one process, and docs/models.tsv; ARGS='GPT-2 loops' chooses
# make clients  libraries that import torch's RPC, plainly and through rdmarpc run (docs/clients.md); ARGS='pippy_stages' chooses
# make vm-test  the tests that need RDMA, in a QEMU guest with a Soft-RoCE device (tests/vm)
# make vm-bench  the verbs device beside perftest and torch RPC, in such a guest
# make vm-cluster  two emulated hosts: faults between them, a SLURM over them (Debian; see docs/clusters.md)
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FOLDERS   := graph transport experiments

.DELETE_ON_ERROR:
.PHONY: run paper smoke test zoo clients test-cuda vm-test vm-bench vm-cluster bench campaign lint format typecheck-links clean

run: $(INSTALLED)
	$(BIN)/python -m experiments.train $(ARGS)

bench: $(INSTALLED)
	$(BIN)/python -m experiments.bench $(ARGS)

paper: $(INSTALLED)
	$(BIN)/python -m experiments.paper $(ARGS)

# One test of each layer.
SMOKE := tests/test_house.py tests/transport/contract/test_contract.py::test_write_then_read_back tests/rpc/servers/test_bundle.py \
	tests/rpc/calls/test_calls.py::test_values_come_back_as_they_are \
	tests/rpc/references/test_rref.py::test_pickling_asks_nobody tests/rpc/gradients/test_autograd_results.py::test_graphs_and_hooks \
	tests/rpc/wrap/test_wrap_checkpoint.py tests/rpc/servers/test_served.py::test_one_worker_two_servers
smoke: $(INSTALLED)
	$(BIN)/python -m pytest -q $(SMOKE)

# Most tests wait more than they compute (for processes to start, for a limit to pass): they run four at once, in the order of the
# files, so that the longest, whole programs, come first. Those that look at times or at the memory of their process have no more
# than two others beside them: they use less than half of a core each.
QUIET := tests/campaign tests/vm tests/rpc/observe tests/transport/cuda tests/transport/tcp tests/transport/tls \
	$(addsuffix .py,$(addprefix tests/,$(addprefix rpc/gradients/test_autograd_,errors memory results) \
	$(addprefix rpc/calls/test_,calls errors) rpc/links/test_silence \
	$(addprefix transport/contract/test_,peers stress) $(addprefix transport/peers/test_,heartbeat strangers)))
# Hundreds of processes import the package, so it is compiled once, whatever the caller's environment says.
test: export PYTHONDONTWRITEBYTECODE =
# Threads of OpenMP that wait would spin on the cores that other tests need.
test: export OMP_WAIT_POLICY = PASSIVE
test: $(INSTALLED)
ifeq ($(ARGS),)
	@status=0; \
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(QUIET) || status=1; \
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder tests $(addprefix --ignore=,$(QUIET)) || status=1; \
	exit $$status
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-cuda: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu $(ARGS)

# torch is installed before, so that torchvision does not choose it; beside a torch for CPUs its compiled operators are missing.
zoo: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[zoo]'
	$(BIN)/python -m tests.zoo.tour $(ARGS) $(if $(ARGS),,--tables docs)

clients: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[clients]'
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation fedml==0.9.6 machin==0.4.2 fairscale==0.4.13
	$(BIN)/python -m tests.clients.client_tour $(ARGS)

campaign: $(INSTALLED)
	$(BIN)/python -m tests.campaign $(ARGS)

vm-test: $(INSTALLED)
	$(BIN)/python tests/vm/suite.py $(ARGS)

vm-cluster: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[slurm]'
	$(BIN)/python tests/vm/cluster_cases.py $(ARGS)

vm-bench: $(INSTALLED)
	$(BIN)/python tests/vm/bench.py $(ARGS)

lint: $(INSTALLED) typecheck-links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and pinned, so that no later requirement chooses another build of it.
$(INSTALLED): setup.py pyproject.toml constraints.txt
	@echo "installing into $(VENV), once: some minutes, and silent unless something is wrong"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[experiments,bench,examples,trainers,test,dev]'
	$(BIN)/python -m compileall -q $(FOLDERS) rdmarpc tests
	touch $@

# mypy reads packages from folders, and ours have other import names than folders: lay them out as links.
typecheck-links:
	rm -rf .typecheck && mkdir -p .typecheck/rdmarpc
	ln -s $(addprefix $(CURDIR)/,$(wildcard rdmarpc/*) $(FOLDERS)) .typecheck/rdmarpc/

clean:
	rm -rf $(VENV) .typecheck build *.egg-info
