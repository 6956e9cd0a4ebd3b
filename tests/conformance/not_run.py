"""Which of PyTorch's tests are not run, and exactly why. Everything else that the installed torch has is run and must pass."""

from __future__ import annotations

GPU = "needs GPUs"
LEGACY = "asserts the names of torch's own events in its legacy profiler (ours: tests/rpc/observe/test_observability.py)"
INTERNAL = "replaces or calls internal functions of torch's own implementation"
FAULTS = "drops or delays TensorPipe's messages by their kind, inside TensorPipe"
BACKENDS = "chooses between backends by the type of the options; there is one here"
SCRIPTED = "also asks for a remote module that can be scripted (_module_interface_cls), which is not built"
SCHEMA = (
    "asserts the text of TorchScript's dispatch; torch's operators are called from Python here, and their TypeError arrives"
)

PYTHON = "asserts a refusal, or a text, of TorchScript's; here a script that uses RPC runs as its Python (tools/hook)"
IN_SCRIPT = "has references, or RPC's own functions, inside of what TorchScript itself keeps or runs (tools/hook)"

SUITES: dict[str, str] = {
    "CudaRpcTest": GPU,
    "CudaDistAutogradTest": GPU,
    "CudaRemoteModuleTest": GPU,
    "CudaDdpComparisonTest": GPU,
    "TensorPipeCudaDistAutogradTest": GPU,
    "TensorPipeAgentCudaRpcTest": GPU,
    "FaultyAgentDistAutogradTest": FAULTS,
    "FaultyAgentRpcTest": FAULTS,
}
"""Whole classes, but for ``STILL_RUN``."""

STILL_RUN = {
    "test_device_map_cpu",
    "test_udf_remote_message_delay_timeout",
    "test_udf_remote_message_delay_timeout_to_self",
}
"""Tests of the classes above that hold without what these need."""

TESTS: dict[str, str] = {
    "test_dynamic_rpc_existing_rank_can_communicate_with_new_rank_cuda": GPU,
    "test_backward_unused_send_function": "asserts that backward hangs; ours does not (test_autograd_delays.py)",
    "test_no_grad_copy": "asserts that a gradient is copied which nobody else has",
    "test_trainer_ps_torchscript_functions": "gives a reference to a TorchScript function, which only takes torch's own RRef",
    "test_register_rpc_backend_and_set_and_start_rpc_backend": INTERNAL,
    "test_duplicate_name": INTERNAL,
    "test_wait_all_workers_timeout": INTERNAL,
    "test_rref_leak": INTERNAL,
    "test_ignore_rref_leak": INTERNAL,
    "test_shutdown_errors": INTERNAL,
    "test_disable_gil_profiling": "torch's own measure of waits for the interpreter's lock",
    "test_server_process_global_profiler": "a profiler inside TensorPipe's server",
    "test_cannot_infer_backend_from_options": BACKENDS,
    "test_mismatched_type_for_options": BACKENDS,
    "test_infer_backend_from_options": BACKENDS,
    "test_op_with_invalid_args": SCHEMA,
    "test_forward_async": SCRIPTED,
    "test_forward_sync": SCRIPTED,
    "test_forward_async_script": SCRIPTED,
    "test_forward_sync_script": SCRIPTED,
    "test_remote_module_py_pickle_not_supported_script": SCRIPTED,
    "test_send_remote_module_over_the_wire_script_not_supported": SCRIPTED,
    "test_rref_local_value": PYTHON,
    "test_create_local_script_module_rref_in_py": PYTHON,
    "test_call_python_function_remotely_from_script_not_supported": PYTHON,
    "test_remote_script_module": PYTHON,
    "test_rref_jit_pickle_not_supported": PYTHON,
    "test_my_script_module_with_rrefs": IN_SCRIPT,
    "test_load_script_module_with_pickled_rref": IN_SCRIPT,
    "test_dist_backward": IN_SCRIPT,
    "test_get_gradients": IN_SCRIPT,
    "test_jit_fork_within_context": IN_SCRIPT,
    "test_rpc_async_jit_profiled": LEGACY,
    "test_record_function_on_caller_rpc_async": LEGACY,
    "test_rpc_torchscript_record_function": LEGACY,
}

_LEGACY = (
    *("profiler_rpc_record_shapes", "profiler_rpc_memory", "profiler_export_trace", "profiler_remote_events_profiled"),
    *("profiler_remote_events_profiled_single_threaded", "rpc_profiling_async_function"),
    *("rpc_profiling_async_function_single_threaded", "rpc_profiling_remote_record_function"),
    *(
        f"profiler_with_{form}_{what}{threads}"
        for form in ("sync_rpc", "async_rpc", "remote")
        for what in ("udf", "builtin")
        for threads in ("", "_single_threaded")
    ),
    *(
        f"profiler_with_script_{form}_rpc{threads}"
        for form in ("sync", "async", "remote")
        for threads in ("", "_single_threaded")
    ),
    *("profiler_with_autograd_context", "profiler_with_autograd_context_single_threaded", "dist_autograd_profiling"),
    "profiler_rpc_key_names",
    *("async_record_function_cbs_jit_call", "rref_type_blocking", "rref_type_non_blocking"),
)
TESTS |= {f"test_{name}": LEGACY for name in _LEGACY}
