"""Tensors that lie at workers: a command stream to each, and PyTorch above it."""

# ruff: noqa: F401

from . import replaced as _replaced  # names of torch; tensors as arguments of calls
from .devices import device
from .recording import Recording, recording
from .stream import close_streams, stream_to, streams
from .tensor import RemoteTensor, at_place, bring_home, place_of
from .wrap import WrappedModel, wrap
