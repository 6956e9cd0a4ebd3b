"""The experiments that the report is made of, in its order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PAPERS = {
    "mlsys": "PyTorch RPC (Damania et al., MLSys 2023)",
    "rdma": "Fast Distributed Deep Learning over RDMA (Xue et al., EuroSys 2019)",
    "ddp": "PyTorch Distributed (Li et al., VLDB 2020)",
    "cuda": "Direct device-to-device communication with CUDA RPC (PyTorch's recipe)",
}


@dataclass(frozen=True)
class Experiment:
    """One program. ``name``: its module in ``experiments``; ``paper``: a key of ``PAPERS``.

    ``quick`` are its overrides for a quick run, beside ``overrides`` of every run. ``minutes`` and ``quick_minutes``: how long
    it takes on two cores, about; it is ended after fifteen times as long. ``gib``, ``quick_gib``: memory that it needs.
    ``packages``: without one of these it says nothing.
    """

    name: str
    paper: str
    title: str
    about: str
    minutes: float
    quick_minutes: float
    overrides: Sequence[str] = ()
    quick: Sequence[str] = ("quick=true",)
    gib: float = 2.0
    quick_gib: float = 1.5
    packages: Sequence[str] = field(default=())
    gpu: bool = False

    def takes(self, quick: bool) -> float:
        return self.quick_minutes if quick else self.minutes

    def needs_gib(self, quick: bool) -> float:
        return self.quick_gib if quick else self.gib

    def arguments(self, quick: bool) -> list[str]:
        return [*self.overrides, *(self.quick if quick else ())]


EXPERIMENTS = (
    Experiment(
        "grid", "mlsys", "Many calls at once",
        "10 identity calls, or calls with 200 operations, at the same time: the paper's first measurement.",
        minutes=11.5, quick_minutes=0.25, overrides=("rounds=2", "batches=3"), gib=6.0, quick_gib=1.5,
    ),
    Experiment(
        "lines", "mlsys", "Lines of code",
        "The same programs over gRPC, torch RPC and rdmarpc, run, compared and counted.",
        minutes=0.25, quick_minutes=0.25, quick=("programs=[parameter_server,pipeline]",),
    ),
    Experiment(
        "a3c", "mlsys", "Asynchronous reinforcement learning",
        "Actors fetch parameters and push gradients: time to a reward.",
        minutes=0.7, quick_minutes=0.25, overrides=("seeds=[0,1]",), packages=("gymnasium",),
    ),
    Experiment(
        "reinforcement", "mlsys", "PyTorch's benchmark of reinforcement learning",
        "One agent, many observers, calls in batches.",
        minutes=1.2, quick_minutes=0.25, overrides=("episodes=2",),
    ),
    Experiment(
        "parameter_server", "mlsys", "PyTorch's benchmark of parameter servers",
        "Trainers, servers, embedding tables and sparse gradients.",
        minutes=0.3, quick_minutes=0.25, overrides=("rounds=2",),
    ),
    Experiment(
        "dlrm", "mlsys", "A recommendation model",
        "Embedding tables at servers by RPC, the dense part at trainers by DDP, one distributed autograd over both.",
        minutes=0.5, quick_minutes=0.25, overrides=("rounds=2",),
    ),
    Experiment(
        "gpt", "mlsys", "A GPT in stages",
        "A transformer by micro-batches over stages, beside torch RPC, torch.distributed.pipelining and one process.",
        minutes=2.7, quick_minutes=0.25, overrides=("rounds=1",), quick=("quick=true", "micro_batches=[8]"),
    ),
    Experiment(
        "schedules", "mlsys", "Pipelines",
        "Micro-batches over stages, by several schedules.",
        minutes=2.5, quick_minutes=0.5, overrides=("rounds=1",),
        quick=("workers=[2]", "cases.wide=null"),
    ),
    Experiment(
        "federated", "mlsys", "Federated learning",
        "FedAvg and FedSGD over links of 10 and 1 Gb/s.",
        minutes=8, quick_minutes=0.25, overrides=("local_steps=2",), gib=8.0,
    ),
    Experiment(
        "sizes", "rdma", "Message sizes",
        "One tensor a step to a light consumer, from 4 bytes to 1 GB.",
        minutes=2.5, quick_minutes=0.25,
        overrides=("rounds=2", "rounds_large=1"), quick=("quick=true", "devices=[shm]"), gib=8.0,
    ),
    Experiment(
        "bench", "rdma", "Latency beside its floor",
        "Every kind of call beside a memcpy and a flag, and beside torch RPC.",
        minutes=3.5, quick_minutes=0.25, overrides=("rounds=3", "start=3"),
        quick=("quick=true", "start=0", "autograd=false", "sizes=[4,4194304]"), gib=4.0,
    ),
    Experiment(
        "minibatch", "rdma", "Mini-batches of the paper's models",
        "All gradients to a parameter server and all weights back; average tensor sizes; and whole mini-batches of several"
        " workers with several servers.",
        minutes=8.5, quick_minutes=0.25,
        overrides=("rounds=2", "end_to_end_rounds=2", "steps=2", "workers=[2]", "servers=[2]", "placements=[balanced]"),
        gib=8.0, packages=("grpc",),
    ),
    Experiment(
        "mixture", "rdma", "A mixture of experts",
        "Tokens go to experts and back, by calls to servers and by all-to-all.",
        minutes=0.5, quick_minutes=0.25,
    ),
    Experiment(
        "graph_network", "rdma", "A graph network",
        "Features of neighbourhoods are fetched from several servers in every step.",
        minutes=0.25, quick_minutes=0.25,
    ),
    Experiment(
        "train", "rdma", "Training: computation and communication",
        "A small CNN split over two workers, beside one process and torch RPC: the same losses.",
        minutes=0.3, quick_minutes=0.25, quick=("epochs=2",),
    ),
    Experiment(
        "convergence", "rdma", "Convergence",
        "A convolutional net, a sequence-to-sequence model and an encoder of sentences learn to a target.",
        minutes=2, quick_minutes=0.25, quick=("quick=true", "problems=[sequences]"),
    ),
    Experiment(
        "scaling", "rdma", "More workers",
        "1 to 8 workers with emulated computation, and a simulated continuation to 256 hosts.",
        minutes=1, quick_minutes=0.25, overrides=("steps=6",), gib=4.0,
    ),
    Experiment(
        "ddp", "ddp", "Data parallel training",
        "DistributedDataParallel over our backend and over gloo: buckets, overlap, skipped synchronisation, more ranks.",
        minutes=5.5, quick_minutes=0.25, overrides=("batches=400", "steps=6"), gib=5.0,
    ),
    Experiment(
        "collectives", "ddp", "Collectives",
        "Each collective beside gloo and beside its floor.",
        minutes=2.5, quick_minutes=0.25, overrides=("rounds=2",), quick=("quick=true", "round_s=0.1"),
    ),
    Experiment(
        "cuda", "cuda", "CUDA tensors",
        "PyTorch's recipe and the paper's grid on GPUs.",
        minutes=8, quick_minutes=1, quick=("rounds=1", "sizes=[40000,4000000]"), gpu=True,
    ),
)  # fmt: skip


def chosen(only: str | list[str] | None, known: Sequence[Experiment] = EXPERIMENTS) -> list[Experiment]:
    """Those that ``only`` names, by their own names or by their paper's, in the order of the catalogue; all for ``None``.

    Ends the program for a name that nothing has.
    """
    if not only:
        return list(known)
    names = [only] if isinstance(only, str) else list(only)
    strange = [name for name in names if name not in {label for each in known for label in (each.name, each.paper)}]
    if strange:
        all_names = ", ".join(dict.fromkeys([*(each.paper for each in known), *(each.name for each in known)]))
        raise SystemExit(f"error: only={strange[0]} is none of {all_names}")
    return [each for each in known if {each.name, each.paper} & set(names)]
