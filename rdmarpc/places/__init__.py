"""Tensors that lie at workers: a command stream to each, and PyTorch above it."""

from . import carried as _carried  # noqa: F401  (tensors as arguments of calls)
from .devices import device
from .wrap import WrappedModel, bring_home, wrap
from .recording import Recording, recording
from .stream import close_streams, stream_to, streams
from .tensor import RemoteTensor, at_place, place_of

__all__ = ["RemoteTensor", "Recording", "WrappedModel", "bring_home", "at_place", "close_streams", "device", "place_of", "recording", "stream_to", "streams", "wrap"]
