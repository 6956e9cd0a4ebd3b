"""What torch's modules have and ours do not, and why. Errors quote it; a test compares it with the installed torch."""

from __future__ import annotations

_AGENT = "a step of torch's own agent in C++"
_LEFT = "left over from a loop at the module's end"
_JIT = "TorchScript's way to references, optimizers and remote modules, which is not built"
_GATHER = "the state of torch's meetings: rdmarpc's are kept by the agent (gather)"
_MAPS = "device maps are exchanged and checked when workers join (message/device_maps)"
_PICKLE = "how torch's pickler is made: rdmarpc has its own (message/serialize)"
_PROFILER = "torch's legacy profiler; calls appear in torch.profiler (rdmarpc.profiling)"
_HANDLE = "how torch's handle of a remote module travels: rdmarpc's is reduced by rdmarpc.nn"
_LOCAL = "torch's optimizers at the owners: rdmarpc's are in rdmarpc.optim.local"
_TYPES = "a type for annotations"

_RPC = {
    _AGENT: "_cleanup_python_rpc_handler _destroy_rref_context _disable_jit_rref_pickle _enable_jit_rref_pickle "
    "_invoke_remote_builtin _invoke_remote_python_udf _invoke_remote_torchscript _invoke_rpc_builtin _invoke_rpc_python_udf "
    "_invoke_rpc_torchscript _reset_current_rpc_agent _set_and_start_rpc_agent _init_rpc_backend _validate_rpc_args "
    "_init_counter _init_counter_lock _init_rpc_states _finalize_shutdown _init_process_group "
    "_tensorpipe_init_backend_handler _set_devices_and_reverse_device_map _utils _group_membership_management "
    "_update_group_membership",
    _PROFILER: "_disable_server_process_global_profiler _enable_server_process_global_profiler _server_process_global_profile "
    "server_process_global_profiler RemoteProfilerManager _set_profiler_node_id _get_should_profile _enable_rpc_profiler "
    "_start_record_function",
    _LEFT: "new_method method_name method docstring",
    _GATHER: "_ALL_WORKER_NAMES _all_gather_dict_lock _all_gather_sequence_id _all_gather_sequence_id_to_states "
    "_gather_to_leader _broadcast_to_followers",
    _MAPS: "_tensorpipe_validate_devices _tensorpipe_exchange_and_check_all_device_maps _validate_device_maps "
    "_create_device_list _create_reverse_mapping _get_device_infos _is_tensorpipe_available "
    "_TensorPipeRpcBackendOptionsBase",
    _PICKLE: "_thread_local_tensor_tables _pickler _unpickler _run_function _handle_exception",
    "the type is asked for by RRef._get_type": "_rref_typeof_on_owner _rref_typeof_on_user _local_invoke "
    "_local_invoke_async_execution _invoke_rpc",
    "references that are left when a worker shuts down are no error": "_ignore_rref_leak",
    "there is one backend": "_backend_type_repr _backend_type_doc _tensorpipe_construct_rpc_backend_options_handler",
    _TYPES: "T GenericWithOneTypeVar _P _R",
}
_NN = {
    _HANDLE: "_SerializedRemoteModule _REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING _remote_module_receiver "
    "_remote_module_reducer _create_module _param_rrefs _raise_not_supported _internal_rpc_pickler",
    _JIT: "_NON_SCRIPTABLE_REMOTE_MODULE_MODULE _instantiate_template _create_module_with_interface "
    "_recursive_script_module_receiver _recursive_script_module_reducer",
    _TYPES: "_grad_t T",
}
_OPTIM = {
    _LOCAL: "_LocalOptimizer _new_local_optimizer _local_optimizer_step _FunctionalLocalOptimizer "
    "_new_functional_local_optimizer _functional_local_optimizer_step",
    _JIT: "_ScriptLocalOptimizerInterface _ScriptLocalOptimizer _new_script_local_optimizer _script_local_optimizer_step "
    "functional_optim_map",
}
REASONS: dict[str, dict[str, str]] = {
    part: {name: why for why, names in table.items() for name in names.split()}
    for part, table in {
        "torch.distributed.rpc": _RPC,
        "torch._C._distributed_rpc": _RPC,
        "torch.distributed.nn": _NN,
        "torch.distributed.optim": _OPTIM,
    }.items()
}
MODULES = {
    "torch.distributed.rpc._testing": "an agent of torch that drops and delays TensorPipe's messages",
    "torch.distributed.rpc._utils": _AGENT,
    "torch.distributed.rpc.server_process_global_profiler": _PROFILER,
}
"""Modules that are absent as a whole."""


def known(module: str, name: str) -> str | None:
    """Why a module of ours lacks a name of torch's, if that is said here."""
    if f"{module}.{name}" in MODULES:
        return MODULES[f"{module}.{name}"]
    for part, table in REASONS.items():
        if (module == part or module.startswith(f"{part}.")) and name in table:
            return table[name]
    return None
