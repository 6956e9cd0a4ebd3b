"""Figures that were published with PyTorch RPC, for comparison: another machine, other versions.

Mean milliseconds of a call with 10 under way, Python functions, tensors in main memory, two processes of one machine: the logs
``single_aws_2`` of the first author's harness (github.com/mrshenli/grpc_benchmark, commit 0bfbf1b).
"""

PUBLISHED: dict[tuple[str, int], tuple[float, float]] = {
    ("identity", 4_000_000): (26.7, 8.72),
    ("heavy", 4_000_000): (203.6, 81.7),
    ("identity", 400_000_000): (22_203.0, 1_249.0),
    ("heavy", 400_000_000): (42_541.0, 16_570.0),
}
"""By function and bytes: gRPC, torch RPC."""
