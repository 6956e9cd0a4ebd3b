"""A mixture of experts and a graph network, in small; no figure is judged here."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor
from torch.nn import functional as F

from rdmarpc.experiments import graph_network, mixture
from rdmarpc.experiments.harness.findings import Findings
from rdmarpc.experiments.harness.functions import function
from rdmarpc.experiments.harness.turns import Turns
from rdmarpc.experiments.training import graphs
from rdmarpc.experiments.training import learning_server as server
from rdmarpc.experiments.training.experts import Experts
from rdmarpc.experiments.training.mixture import Worker, measured

CALLED = ["rdmarpc", "torch_rpc", *(["grpc"] if importlib.util.find_spec("grpc") else [])]
SMALL = {
    "mixture": (["tokens=12", "width=8"], [*CALLED, "rdmarpc_group", "gloo"], {}),
    "graph_network": (["nodes=500", "features=6", "width=8", "batch=5"], CALLED, {"fetch": 2}),
}
EVERY = {"step": 2, "computation": 2, "at servers": 2, "communication": 2, "average tensor": 1, "sent": 1}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """``Experts`` sets their number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SMALL)
def test_all_libraries_leave_the_same(name: str, tmp_path: Path) -> None:
    """It fails where losses or weights differ. Not over shared memory, where torch RPC keeps every core busy."""
    small, libraries, more = SMALL[name]
    given = [*small, f"libraries=[{','.join(libraries)}]", "steps=2", "rounds=1", "device=tcp", f"hydra.run.dir={tmp_path}"]
    done = programs.run("-m", f"experiments.{name}", *given, timeout=240.0)
    assert done.returncode == 0, done.stdout
    assert not list(tmp_path.glob(".meeting-*"))
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert not found["left_out"]
    counts = {(each["case"], each["what"]): each["n"] for each in found["samples"]}
    assert counts == {(what, library): n for what, n in (EVERY | more).items() for library in libraries}


class Local:
    """A mixture's owners in this process (``mixture.Way``)."""

    def __init__(self, owners: list[Experts]) -> None:
        self.all, self.owners = owners, len(owners)
        self.at_servers_ms = self.communication_ms = 0.0
        self.bytes = self.tensors = 1

    def forward(self, tokens: list[Tensor], counts: list[list[int]]) -> list[Tensor]:
        return [experts.forward(0, part, each) for experts, part, each in zip(self.all, tokens, counts)]

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        return [experts.backward(0, part) for experts, part in zip(self.all, gradients)]


def test_a_mixture_trains_as_one_model_does() -> None:
    """Beside plain autograd through the gate, the experts and the head."""
    job = {"experts": 2, "tokens": 20, "width": 6, "lr": 0.2, "steps": 5}
    made = lambda: [Experts(first, 2, 6, 1, 0.2, 5.0) for first in (0, 2)]  # noqa: E731
    _, results = measured(0, Local(made()), job)

    worker, experts = Worker(0, job, 2), [expert for each in made() for expert in each.experts]
    parameters = [*worker.parameters, *(parameter for expert in experts for parameter in expert.parameters())]
    optimizer, losses = torch.optim.SGD(parameters, lr=0.2), []
    for _ in range(6):
        optimizer.zero_grad()
        classes = torch.randint(10, (20,), generator=worker.drawn)
        hidden = torch.relu(worker.body(worker.centres[classes] + torch.randn(20, 6, generator=worker.drawn)))
        worth, chosen = torch.softmax(worker.gate(hidden), 1).max(1)
        said = torch.stack([experts[expert](token) for expert, token in zip(chosen.tolist(), hidden)])
        loss = F.cross_entropy(worker.head(hidden + worth.unsqueeze(1) * said), classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    theirs = torch.frombuffer(bytearray(results["losses of worker 0"]), dtype=torch.float32)
    torch.testing.assert_close(theirs, torch.tensor(losses))
    dense = torch.frombuffer(bytearray(results["dense"]), dtype=torch.float32)
    torch.testing.assert_close(dense, torch.cat([each.detach().reshape(-1) for each in worker.parameters]))
    assert losses[-1] != losses[0]


def test_a_step_of_experts_needs_all_workers() -> None:
    experts = Experts(0, 1, 4, 2, 0.1, 0.01)
    before = torch.cat([each.detach().reshape(-1).clone() for each in experts.experts.parameters()])
    x = torch.ones(3, 4)
    for rank in (0, 1):
        experts.forward(rank, x, [3])
    experts.backward(0, x)
    with pytest.raises(RuntimeError, match="only 1 of 2 workers sent gradients"):
        experts.forward(0, x, [3])
    experts.backward(1, x)
    after = torch.cat([each.detach().reshape(-1) for each in experts.experts.parameters()])
    assert not torch.equal(before, after)
    experts.forward(0, x, [3])


class Here:
    """Calls functions in this process, which is the only server."""

    def start(self, name: str, x: Tensor, done: Callable[[], Any] | None = None, number: int = 0) -> Tensor:
        return function(name)(x)

    def finish(self, call: Tensor) -> Tensor:
        return call


def test_a_graph_network_trains_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_features", None)
    monkeypatch.setattr(server, "_server", None)
    job = {"clients": 1, "servers": 1, "lr": 0.01, "nodes": 300, "features": 5, "width": 7, "batch": 6, "steps": 4}
    job |= {"timeout_s": 5.0, "meeting_place": str(tmp_path)}
    graphs.begin(job | {"rank": 1})
    _, results = graphs.drive(Here(), job | {"rank": 0})

    net, graph, drawn = graphs.Sage(5, 7), graphs.Graph(300), torch.Generator().manual_seed(200)
    everything, _ = graphs.fetched(Here(), torch.arange(300), job)
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=0.01), []
    for _ in range(5):
        batch = torch.randint(300, (6,), generator=drawn)
        near = graph.neighbours(batch, graphs.FANS[0], drawn)
        far = graph.neighbours(near.view(-1), graphs.FANS[1], drawn).view(*near.shape, -1)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(everything[batch], everything[near], everything[far]), graphs.community(batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    theirs = torch.frombuffer(bytearray(results["losses of worker 0"]), dtype=torch.float32)
    torch.testing.assert_close(theirs, torch.tensor(losses), rtol=1e-4, atol=1e-5)


def test_every_server_has_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node n is row n // servers of server n % servers, and lies about the centre of its community."""
    job = {"clients": 2, "servers": 3, "lr": 0.01, "nodes": 100, "features": 64, "timeout_s": 5.0}
    centres = torch.randn(graphs.COMMUNITIES, 64, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(server, "_server", None)
    for number in range(3):
        monkeypatch.setattr(graphs, "_features", None)
        graphs.begin(job | {"rank": 2 + number})
        nodes = torch.arange(number, 100, 3)
        rows = graphs.features((nodes // 3).float())[1:].view(len(nodes), 64)
        nearest = torch.cdist(rows, centres).argmin(1)
        assert (nearest == graphs.community(nodes)).double().mean() > 0.9


def test_all_to_all_needs_as_many_workers_as_servers(tmp_path: Path) -> None:
    findings = Findings("", "ms")
    mixture.run(job_of(mixture, "workers=3", "servers=2", "libraries=[gloo]"), Turns(findings, tmp_path))
    [left] = findings.left
    assert left["what"] == "gloo, all-to-all" and "workers=servers" in left["why"]


def job_of(app: Any, *overrides: str) -> dict[str, Any]:
    with initialize_config_dir(app.CONF, version_base="1.3"):
        return app.checked(compose(app.__name__.rpartition(".")[2], list(overrides)))


@pytest.mark.parametrize(
    ("app", "override", "says"),
    [
        (mixture, "experts=0", "experts=0"),
        (mixture, "libraries=[mpi]", "libraries=['mpi']"),
        (graph_network, "nodes=20000000", "nodes=20000000 must be at most 16777216"),
        (graph_network, "servers=5", "servers=5 must be at most 4"),
        (graph_network, "libraries=[gloo]", "libraries=['gloo']"),
    ],
)
def test_bad_config_is_a_clear_error(app: Any, override: str, says: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(says)):
        job_of(app, override)


def test_experts_have_the_same_bits_in_every_thread() -> None:
    """Libraries call them in threads of their own, where MKL would use all cores."""
    torch.set_num_threads(1)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    counts = [[7, 33], [40, 0], [17, 23]]

    def bits(experts: Experts) -> list[bytes]:
        found = []
        for each in counts:
            found += [experts.forward(0, x, each), experts.backward(0, x)]
        return [each.numpy().tobytes() for each in found]

    one, twin = (Experts(0, 2, 256, 1, 0.1, 5.0) for _ in range(2))
    here = bits(one)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(bits, twin).result(60) == here
