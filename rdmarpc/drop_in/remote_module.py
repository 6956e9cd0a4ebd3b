"""Names that ``torch.distributed.nn.api.remote_module`` has for its own use."""

from ..nn import RemoteModule as _RemoteModule

_REMOTE_MODULE_PICKLED_ATTRIBUTES = ("on", "device", "is_device_map_set", "is_scriptable", "module_rref")
"""What travels of a handle. Torch also sends its ``generated_methods``, which are the class's here."""

__all__ = ["_REMOTE_MODULE_PICKLED_ATTRIBUTES", "_RemoteModule"]
