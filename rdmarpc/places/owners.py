"""A writer and a reader for ``torch.distributed.checkpoint`` whose tensors at workers are written and read there.

A worker does its part as operations of its stream, so behind all that was posted before, and several workers do theirs at once.
Where a worker does not see the folder, its tensors come here, or go there, as any copy: the caller makes a folder of a name
that nobody else has, and tells files that are to be read by their size and time.

Importing this imports DCP, which takes a second.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_item_for_tensor
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .stream import Stream
from .tensor import at_place, place_of

_PIECE = 1 << 30
"""Bytes that a worker writes or reads in one operation, which has to end within ``rpc_timeout``."""
_MANY = 1 << 13
"""Tensors that one operation takes: a message has room for no more than twice as many."""


def _pieces(items: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Stream, list[Any], list[torch.Tensor]]]:
    """Items with their tensors, by worker, in pieces; those of tensors here are not among them."""
    found: dict[Stream, tuple[list[Any], list[torch.Tensor]]] = {}
    room: dict[Stream, int] = {}
    for item, tensor in zip(items, tensors):
        place = place_of(tensor)
        if place is None or tensor.layout is not torch.strided:
            continue
        room[place] = room.get(place, _PIECE) - tensor.nbytes
        if place in found and (room[place] < 0 or len(found[place][0]) >= _MANY):
            yield place, *found.pop(place)
            room[place] = _PIECE - tensor.nbytes
        some, theirs = found.setdefault(place, ([], []))
        some.append(item)
        theirs.append(tensor)
    yield from ((place, *both) for place, both in found.items())


def _told(about: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)


def _heard(told: torch.Tensor) -> Any:
    """What ``_told`` has made."""
    return json.loads(told.cpu().numpy().tobytes())


class Writer(FileSystemWriter):
    """Each worker writes files of its own."""

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        items = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        pieces = list(enumerate(_pieces(items, [planner.resolve_data(item) for item in items]), 1))
        with ThreadPoolExecutor(max(1, len({piece[0] for _, piece in pieces}))) as pool:
            written = [result for found in pool.map(self._write_at, pieces) for result in found]
        there = {result.index for result in written}
        left = replace(plan, items=[item for item in plan.items if item.index not in there])
        found = super().write_data(left, _planner(resolve_data=lambda item: _here(planner.resolve_data(item)))).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result([*found, *written])
        return done

    def _write_at(self, numbered: tuple[int, tuple[Stream, list[WriteItem], list[torch.Tensor]]]) -> list[WriteResult]:
        number, (place, items, tensors) = numbered
        about = {"folder": str(self.path), "prefix": f"__{number}_", "names": [item.index.fqn for item in items]}
        with torch.no_grad():
            told = _heard(torch.ops.rdmarpc.write_part(tensors, at_place(_told(about), place)))
        if not all((Path(self.path) / path).is_file() for _, path, _, _ in told):
            return []
        return [
            WriteResult(item.index, size, _StorageInfo(path, offset, length))
            for item, (size, path, offset, length) in zip(items, told)
        ]


_planner: Any = SimpleNamespace
"""What DCP asks of a planner where it writes or reads files."""


def _here(found: Any) -> Any:
    return at_place(found.detach(), None) if isinstance(found, torch.Tensor) else found


class Reader(FileSystemReader):
    """Each worker reads what is to lie there."""

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        items = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        pieces = list(_pieces(items, [planner.resolve_tensor(item).detach() for item in items]))
        with ThreadPoolExecutor(max(1, len({piece[0] for piece in pieces}))) as pool:
            read = set(map(id, (item for found in pool.map(self._read_at, pieces) for item in found)))
        return super().read_data(replace(plan, items=[i for i in plan.items if id(i) not in read]), planner)

    def _read_at(self, piece: tuple[Stream, list[ReadItem], list[torch.Tensor]]) -> list[ReadItem]:
        place, items, tensors = piece
        where = [self.storage_data[item.storage_index] for item in items]
        if any(info.transform_descriptors for info in where):
            return []
        paths = {info.relative_path: _stamp(Path(self.path) / info.relative_path) for info in where}
        parts = [
            (info.relative_path, info.offset, info.length, list(item.storage_offsets), list(item.lengths))
            for item, info in zip(items, where)
        ]
        about = {"folder": str(self.path), "files": paths, "parts": parts}
        with torch.no_grad():
            return items if torch.ops.rdmarpc.read_part(tensors, at_place(_told(about), place)).item() else []


def cause(error: BaseException | None) -> BaseException | None:
    """The lost worker, the file that cannot be written or read, Ctrl-C, or the program's own (of a handler of signals, say)
    behind an error: of a full disk torch says that a position is not the expected one."""
    while type(error) is RuntimeError:
        error = error.__cause__ or error.__context__
    torchs = type(error).__module__.partition(".")[0] in ("torch", *sys.stdlib_module_names)
    return None if torchs and isinstance(error, Exception) and not isinstance(error, OSError) else error


def _stamp(path: Path) -> list[int]:
    try:
        found = os.stat(path)
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


# -- at the worker


def write(tensors: list[torch.Tensor], told: torch.Tensor) -> torch.Tensor:
    """Write tensors that lie here; says of each (bytes, file, offset, length). Nothing, if the folder is not seen here."""
    about = _heard(told)
    if not os.path.isdir(about["folder"]):
        return _told([])
    items = [_create_write_item_for_tensor(name, tensor) for name, tensor in zip(about["names"], tensors)]
    found = {item.index: tensor for item, tensor in zip(items, tensors)}
    planner = _planner(resolve_data=lambda item: found[item.index])
    plan = SavePlan(items, storage_data=_StoragePrefix(about["prefix"]))
    try:
        written = FileSystemWriter(about["folder"]).write_data(plan, planner).wait()
    except RuntimeError as error:
        raise cause(error) or error from None
    done = {result.index: result for result in written}
    results = [done[item.index] for item in items]
    infos = [result.storage_data for result in results]
    return _told([(r.size_in_bytes, i.relative_path, i.offset, i.length) for r, i in zip(results, infos)])


def read(tensors: list[torch.Tensor], told: torch.Tensor) -> torch.Tensor:
    """Read into tensors that lie here: whether it was done, which is where the files are those that the caller sees."""
    about = _heard(told)
    folder = Path(about["folder"])
    if any(not stamp or _stamp(folder / path) != stamp for path, stamp in about["files"].items()):
        return torch.zeros((), dtype=torch.bool)
    reader, items = FileSystemReader(folder), []
    for number, (path, offset, length, offsets, lengths) in enumerate(about["parts"]):
        index, zero = MetadataIndex(str(number)), torch.Size([0] * len(lengths))
        reader.storage_data[index] = _StorageInfo(path, offset, length)
        items.append(ReadItem(LoadItemType.TENSOR, index, zero, index, torch.Size(offsets), torch.Size(lengths)))
    found = {item.dest_index: tensor for item, tensor in zip(items, tensors)}
    planner = _planner(resolve_tensor=lambda item: found[item.dest_index], commit_tensor=lambda item, tensor: None)
    reader.read_data(LoadPlan(items), planner).wait()
    return torch.ones((), dtype=torch.bool)
