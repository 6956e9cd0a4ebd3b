"""A simulated continuation to more hosts than there are: arithmetic over two measured numbers, and nothing else.

Every host has one worker and one parameter server, as in the paper. A step is its computation, then the exchange. The tensors
are dealt out round-robin, so one server has the largest share s, and in every step N workers send s bytes to it and get s bytes
back over a link of measured bandwidth B; a worker sends and gets the whole model M. The slower of both decides:

    exchange(N) = latency + 2 * max(M, N * s) / B

Links do not disturb each other, both directions are counted one after the other, and no worker is late: a bound from above.
"""

from __future__ import annotations

from .scaling_worker import shares

BYTES = 4
COMPUTE_MS = {"AlexNet": 4.61, "InceptionV3": 68.32, "VGG16": 30.92, "LSTM": 33.33, "GRU": 30.44, "FCN5": 4.88}
"""Milliseconds of a mini-batch of the paper's models on the paper's GPUs, as remembered of its table 2; not verified.
``exchange.models`` has the models' sizes, which are."""


def bandwidth(tensors: list[int], exchange_ms: float, latency_ms: float) -> float:
    """Bytes a millisecond, from the exchange of one worker with one server."""
    return 2 * BYTES * sum(tensors) / max(exchange_ms - latency_ms, 1e-6)


def step_ms(hosts: int, tensors: list[int], compute_ms: float, latency_ms: float, rate: float) -> float:
    """Milliseconds of a mini-batch with so many hosts."""
    largest = max(shares(tensors, hosts))
    return compute_ms + latency_ms + 2 * BYTES * max(sum(tensors), hosts * largest) / rate


def speed_up(hosts: int, tensors: list[int], compute_ms: float, latency_ms: float, rate: float) -> float:
    """Mini-batches a second of all hosts, by those of one host that computes alone and exchanges nothing."""
    return hosts * compute_ms / step_ms(hosts, tensors, compute_ms, latency_ms, rate)
