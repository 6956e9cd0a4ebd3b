"""Tensors that lie at workers: a command stream to each, and PyTorch above it."""

from . import replaced as _replaced  # noqa: F401  (names of torch; tensors as arguments of calls)
from .devices import device
from .recording import Recording, recording
from .stream import close_streams, stream_to, streams
from .tensor import RemoteTensor, at_place, bring_home, place_of
from .wrap import WrappedModel, wrap

__all__ = [
    "Recording",
    "RemoteTensor",
    "WrappedModel",
    "at_place",
    "bring_home",
    "close_streams",
    "device",
    "place_of",
    "recording",
    "stream_to",
    "streams",
    "wrap",
]
