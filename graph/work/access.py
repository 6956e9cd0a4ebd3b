"""What the caller may ask of the parts at their owner, besides steps: their state, their attributes, a try of a call.

Jobs run on the executor's thread, after so many ``commands`` as the caller had given before it asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ...transport import NotSupported, RdmaError
from ..edges.kept_memory import KeptMemory
from ..guards.flags import flags
from ..guards.generators import torch_mark
from ..guards.kept import Kept, plain
from ..guards.side_effects import Globals, changes_there, code_in
from ..plan.place import REPORT_BYTES
from ..plan.replicas import Replica
from ..servers.updates import copied
from ..trace.capture import TensorSpec, writes_input
from ..trace.devices import find, forked_generators
from ..trace.values import Before, cannot_cross, changes_argument, check_result, encode, leaves_of, map_tensors, sparse
from ..trace.watch import untouched
from ..trace.writes import Registered, aliases
from .command import WorkerError
from .run import KEPT_HINT

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

PLAIN, TENSOR, AS_IT_CAME, CHANGED, MISSING = "plain", "tensor", "as it came", "changed", "missing"
"""What ``Access.read`` finds."""

Submit = Callable[[Callable[[], Any], int], Any]
"""Runs a job on the executor's thread after so many commands, and gives its result."""


class Access:
    """``root`` has the parts under their paths; ``use_mode(number)`` puts them under the flags of a mode; ``recoded()`` is
    called, on the executor's thread, when parts may have other functions than before."""

    def __init__(
        self,
        root: nn.Module,
        submit: Submit,
        use_mode: Callable[[int], None],
        recoded: Callable[[], None],
        gpu: torch.device | None,
        memory: KeptMemory,
    ) -> None:
        self._root, self._submit, self._use_mode, self._recoded, self._gpu = root, submit, use_mode, recoded, gpu
        self._memory = memory
        self._kept: dict[tuple[str, str], Kept] = {}
        self._common: set[tuple[str, str]] = set()
        self._held: dict[int, tuple[str, Kept]] = {}
        """What ``_common`` are, by ``id``: a name of each, and what it held when it came."""
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                self._keep(path, name, value)

    def _keep(self, path: str, name: str, value: Any) -> None:
        """Remember what an attribute holds that the caller has too."""
        self._kept.pop((path, name), None)
        if name not in INTERNAL and not plain(value) and not isinstance(value, torch.Tensor):
            self._kept[path, name] = Kept(value)
        if (path, name) in self._common:
            self._hold_common()

    # -- state

    def state(self, path: str, keep_vars: bool, commands: int) -> dict[str, Any]:
        """A copy of the state of a part, or of a module inside one, after so many commands; in host memory. With ``keep_vars``,
        ``None`` for an entry that is the parameter or buffer of that name."""

        def copy() -> dict[str, Any]:
            module = self._root.get_submodule(path)
            state = module.state_dict(keep_vars=keep_vars)
            own = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            if keep_vars:
                state.update({name: None for name, tensor in own if state.get(name) is tensor})
            return {key: copied(value.detach()) if isinstance(value, torch.Tensor) else value for key, value in state.items()}

        return self._submit(copy, commands)

    def own_state(self, path: str, commands: int) -> dict[str, torch.Tensor]:
        """A copy of the parameters and buffers that lie in this very module; in host memory."""

        def copy() -> dict[str, torch.Tensor]:
            module = self._root.get_submodule(path)
            own = {**module._parameters, **module._buffers}
            return {name: copied(tensor.detach()) for name, tensor in own.items() if tensor is not None}

        return self._submit(copy, commands)

    def load(self, path: str, state: dict[str, Any], commands: int) -> None:
        """Load the entries that lie in this very module, not those of its children."""

        def load() -> None:
            # Not strict: a module's children are loaded by calls of their own.
            self._root.get_submodule(path).load_state_dict(state, strict=False)

        self._submit(load, commands)

    def load_all(
        self, path: str, prefix: str, state: dict[str, Any], metadata: dict[str, dict[str, Any]], commands: int
    ) -> tuple[list[str], list[str], list[str]]:
        """Load a module and all in it as ``load_state_dict`` of a model does, in which it has this prefix: its hooks, and those
        of its methods that take part, run. ``metadata`` (versions) is by prefix. Returns the names that are missing, the
        unexpected ones and the errors."""
        lists: tuple[list[str], list[str], list[str]] = [], [], []

        def load(module: nn.Module, prefix: str, state: dict[str, Any]) -> None:
            module._load_from_state_dict(state, prefix, metadata.get(prefix, {}), True, *lists)
            for name, child in module._modules.items():
                if child is not None:
                    below = f"{prefix}{name}."
                    load(child, below, {key: value for key, value in state.items() if key.startswith(below)})
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, _IncompatibleKeys(lists[0], lists[1]))

        self._change(path, lambda part: load(part, prefix, state), commands)
        return lists

    def flags(self) -> dict[str, Any]:
        """Those of torch in this process."""
        return flags()

    def other_globals(self, there: dict[str, dict[str, str]], commands: int) -> dict[str, str]:
        """By path, a global that a part names and that is another one in the process where it has these ``Globals.values``."""

        def compare() -> dict[str, str]:
            found = {}
            for path, values in there.items():
                mine = Globals(self._root.get_submodule(path)).values()
                other = next((label for label, value in values.items() if mine.get(label, value) != value), "")
                if other:
                    found[path] = other
            return found

        return self._submit(compare, commands)

    def call(self, path: str, method: str, args: tuple[Any, ...], commands: int) -> None:
        """``module.method(*args)`` for its effect on the module (``apply``, ``reset_parameters``)."""
        self._change(path, lambda part: getattr(part, method)(*args), commands)

    def compile(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], commands: int) -> None:
        """``module.compile(*args, **kwargs)``."""
        self._change(path, lambda part: part.compile(*args, **kwargs), commands)

    def _change(self, path: str, change: Callable[[Any], object], commands: int) -> None:
        """Have code of the user's change a module. ``NotSupported`` if it names other globals then: the caller cannot know."""

        def job() -> None:
            part = self._root.get_submodule(path)
            known = Globals(part)
            try:
                change(part)
            finally:
                self._recoded()
            if named := Globals(part, [known]).values():
                said = f"part {path!r} was given a function that names {next(iter(named))}, which is not followed here"
                raise NotSupported(
                    said, hint="the part has it now; close the model, or set the function from here, as an attribute"
                )

        self._submit(job, commands)

    def seed(self, seed: int, commands: int) -> None:
        """Seed the generators that parts draw from. Not by ``torch.manual_seed``: this worker may be a caller too, and its own
        program has not set this seed."""

        def sow() -> None:
            torch.default_generator.manual_seed(seed)
            if self._gpu is not None:
                torch.get_device_module(self._gpu).default_generators[self._gpu.index or 0].manual_seed(seed)

        self._submit(sow, commands)

    def take(self, pack: Callable[[Mapping[str, Any]], Any], commands: int) -> Any:
        """All parts but replicas of others, by path, as ``pack`` makes them ready to travel."""
        parts: dict[str, Any] = {}

        def walk(module: nn.Module, path: str) -> None:
            for name, part in {**module._modules, **module._parameters, **module._buffers}.items():
                below = f"{path}.{name}" if path else name
                if type(part) is nn.Module:
                    walk(part, below)
                elif not isinstance(part, Replica):
                    parts[below] = part

        def job() -> Any:
            parts.clear()
            walk(self._root, "")
            return pack(parts)

        return self._submit(job, commands)

    # -- attributes

    def read(self, path: str, name: str, commands: int) -> tuple[str, Any]:
        """What an attribute of a module is: ``PLAIN`` with its value, ``TENSOR`` with a copy in host memory, ``AS_IT_CAME`` for
        something that has not changed since the caller gave it, ``CHANGED`` with its type otherwise (also for a tensor whose
        gradient would be lost), or ``MISSING``."""

        def look() -> tuple[str, Any]:
            try:
                value = getattr(self._root.get_submodule(path), name)
            except AttributeError as error:
                return MISSING, str(error)
            if plain(value):
                return PLAIN, value
            if isinstance(value, torch.Tensor):
                if value.grad_fn is not None:
                    return CHANGED, "tensor with a gradient"
                return TENSOR, copied(value.detach())
            kept = self._kept.get((path, name))
            if kept is not None and not kept.opaque and kept.holds():
                return AS_IT_CAME, None
            return CHANGED, type(value).__name__

        return self._submit(look, commands)

    def write(self, values: dict[tuple[str, str], Any], replace: bool, commands: int) -> None:
        """Set attributes of modules, by path and name. ``replace=False``: they are what the caller has changed inside of values
        that it gave; ``NotSupported`` where the part has changed its copy of them too."""

        def store() -> None:
            for path, name in () if replace else values:
                kept = self._kept.get((path, name))
                if kept is None or kept.opaque or not kept.holds():
                    raise NotSupported(f"{path}.{name} was changed at its worker too, so the two cannot be brought together")
            for (path, name), value in values.items():
                setattr(self._root.get_submodule(path), name, value)
            for (path, name), value in values.items():
                self._keep(path, name, value)
            if any(map(code_in, values.values())):
                self._recoded()

        self._submit(store, commands)

    def join(self, common: set[tuple[str, str]], commands: int) -> None:
        """Attributes, by path and name, that the caller or another worker has, too: no part may change what they hold."""

        def follow() -> None:
            self._common = common
            self._hold_common()

        self._submit(follow, commands)

    def _hold_common(self) -> None:
        before, self._held = self._held, {}
        for path, name in sorted(self._common):
            value = getattr(self._root.get_submodule(path), name)
            if id(value) not in self._held:
                self._held[id(value)] = before.get(id(value)) or (f"{path}.{name}", Kept(value))

    def changed_common(self) -> str:
        """One of these that is not as the others have it."""
        return next((name for name, kept in self._held.values() if not kept.holds()), "")

    def delete(self, path: str, name: str, commands: int) -> None:
        """Delete an attribute of a module."""

        def drop() -> None:
            delattr(self._root.get_submodule(path), name)
            self._kept.pop((path, name), None)
            self._common.discard((path, name))
            self._recoded()

        self._submit(drop, commands)

    def unhook(self, path: str, hooks: list[tuple[str, int]], commands: int) -> None:
        """Remove hooks of a module, each by its table and number."""

        def drop() -> None:
            tables = vars(self._root.get_submodule(path))
            for name, number in hooks:
                tables[name].pop(number, None)
            self._recoded()

        self._submit(drop, commands)

    def kept(self, sequences: list[int], commands: int) -> list[tuple[int, str]]:
        """See ``KeptMemory.kept``."""
        return self._submit(lambda: self._memory.kept(sequences), commands)

    # -- trying

    def probe(
        self, path: str, mode: int, devices: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], commands: int
    ) -> tuple[Any, bool, list[tuple[int, int, bool]]] | bytes:
        """Run a copy of a part, under these flags, on real inputs (which come in host memory, each for its device): what it
        gives, as ``encode`` has it, with a ``TensorSpec`` for every tensor, without its device; and whether it has drawn from
        torch's generators; and its ``aliases``; or what it raises, a ``WorkerError``. The part, its buffers, globals and the
        generators stay as they are, unless it raises: then the part itself has done what it does before that."""

        def spec(leaf: Any) -> Any:
            return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

        def moved() -> tuple[Any, Any]:
            left = iter(devices)
            # They are no leaves of autograd's then.
            return map_tensors(lambda tensor: tensor.to(find(next(left)), copy=True), (args, kwargs))

        runs: list[nn.Module] = []

        def fail() -> None:
            given, more = moved()
            with contextlib.suppress(Exception):
                self._root.get_submodule(path)(*given, **more)

        def run() -> tuple[Any, bool, list[tuple[int, int, bool]]]:
            self._use_mode(mode)
            part = _copied(path, self._root.get_submodule(path))
            known = Globals(part)
            with forked_generators(self._gpu), torch.enable_grad():
                given, more = moved()
                before, mark = Before(given, more), torch_mark(self._gpu)
                registered = Registered(part)
                with untouched(part):
                    runs.append(part)
                    result = part(*given, **more)
                    runs.clear()
                    registered.check(f"part {path!r}")
                drew = torch_mark(self._gpu) != mark
            if label := known.changed():
                raise changes_there(f"part {path!r}", label)
            if any(leaf._version for leaf in leaves_of((given, more)) if isinstance(leaf, torch.Tensor)):
                raise writes_input(path)
            if before.changed():
                raise changes_argument(path, before.names(part.forward))
            check_result(f"part {path!r}", result)
            for kind in (sparse(leaf) for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)):
                if kind:
                    raise cannot_cross(f"part {path!r} gives", kind)
            return encode(result, spec), drew, aliases(leaves_of((given, more)), leaves_of(result), part)

        try:
            return self._submit(run, commands)
        except RdmaError:
            raise
        except Exception as error:
            if runs:
                self._submit(fail, commands)
            return WorkerError.of(error, "", f"part {path!r}").dump(REPORT_BYTES)


def _copied(path: str, part: nn.Module) -> nn.Module:
    try:
        return deepcopy(part)
    except RuntimeError as error:
        if "graph leaves" not in str(error):
            raise
        said = f"part {path!r} keeps a tensor with its graph, and has to be tried on a copy that cannot have it"
        raise NotSupported(said, hint=KEPT_HINT) from None
