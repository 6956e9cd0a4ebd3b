"""A simulated continuation to more hosts than there are: arithmetic over two measured numbers, and nothing else.

Every host has one rank. A bucket of M bytes is summed round a ring of N hosts, in 2 (N - 1) rounds of M / N bytes:

    sum(N, M) = 2 (N - 1) latency / 2  +  2 (N - 1) / N * M / B

``latency`` is that of an ``all_reduce`` of one number between two ranks, which is two such rounds; B is the bandwidth of a
large one between two ranks, where each sends M / 2 twice. Backward fills the buckets at equal distances, and they are summed
one after the other, each as soon as it is full. No link disturbs another, no rank is late, and sums cost no time of their
own."""

from __future__ import annotations

import math


def bandwidth(nbytes: int, ms: float, latency_ms: float) -> float:
    """Bytes a millisecond, from an ``all_reduce`` between two ranks."""
    return nbytes / max(ms - latency_ms, 1e-6)


def sum_ms(hosts: int, nbytes: float, latency_ms: float, rate: float) -> float:
    return (hosts - 1) * latency_ms + 2 * (hosts - 1) / hosts * nbytes / rate


def step_ms(hosts: int, nbytes: int, cap: float, compute_ms: float, latency_ms: float, rate: float) -> float:
    """Milliseconds of a step: a third of its computation is the forward, and buckets have ``cap`` bytes."""
    forward = compute_ms / 3
    count = max(1, math.ceil(nbytes / cap))
    free = forward
    for number in range(1, count + 1):
        full = forward + (compute_ms - forward) * number / count
        free = max(free, full) + sum_ms(hosts, nbytes / count, latency_ms, rate)
    return free


def skipped_ms(every: int, step: float, compute_ms: float) -> float:
    """A mean step where every n-th one alone is synchronised."""
    return ((every - 1) * compute_ms + step) / every
