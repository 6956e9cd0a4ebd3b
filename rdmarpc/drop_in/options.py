"""Names that ``torch.distributed.rpc.options`` has for its own use."""

from ..message.device_maps import DeviceLike as DeviceType
from ..message.device_maps import _device as _to_device
from ..message.device_maps import to_devices as _to_device_list
from ..message.device_maps import to_map as _to_device_map

__all__ = ["DeviceType", "_to_device", "_to_device_list", "_to_device_map"]
