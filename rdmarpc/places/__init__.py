"""Tensors that lie at workers: a command stream to each, and PyTorch above it."""

from .devices import device
from .wrap import WrappedModel, bring_home, wrap
from .stream import close_streams, stream_to, streams
from .tensor import RemoteTensor, at_place, place_of

__all__ = ["RemoteTensor", "WrappedModel", "bring_home", "at_place", "close_streams", "device", "place_of", "stream_to", "streams", "wrap"]
