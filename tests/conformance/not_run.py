"""Which of PyTorch's tests are not run, and exactly why. Everything else that the installed torch has is run and must pass."""

from __future__ import annotations

AUTOGRAD = "distributed autograd is not built yet"
GPU = "needs GPUs"
SCRIPT = "TorchScript"
LEGACY = "asserts the events of torch's legacy profiler"
INTERNAL = "replaces or asserts internals of torch's own implementation"
FAULTS = "drops or delays TensorPipe's messages by their kind, inside TensorPipe"

SUITES: dict[str, str] = {
    "CudaRpcTest": GPU,
    "CudaDistAutogradTest": GPU,
    "CudaRemoteModuleTest": GPU,
    "TensorPipeCudaDistAutogradTest": GPU,
    "TensorPipeAgentCudaRpcTest": GPU,
    "DistAutogradTest": AUTOGRAD,
    "TensorPipeAgentDistAutogradTest": AUTOGRAD,
    "FaultyAgentDistAutogradTest": AUTOGRAD,
    "DistOptimizerTest": "the distributed optimizer is not built yet",
    "RemoteModuleTest": "RemoteModule is not built yet",
    "ThreeWorkersRemoteModuleTest": "RemoteModule is not built yet",
    "FaultyAgentRpcTest": FAULTS,
}
"""Whole classes, but for ``STILL_RUN``."""

STILL_RUN = {
    "test_device_map_cpu",
    "test_check_failed_messages",
    "test_udf_remote_message_delay_timeout",
    "test_udf_remote_message_delay_timeout_to_self",
}
"""Tests of the classes above that hold without what these need."""

TESTS: dict[str, str] = {}
AFTER_MERGE: dict[str, str] = {}
