"""The program of a worker: its segments and their instructions, as plain, picklable data without any weights."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ...transport import NotSupported
from ..trace.values import After, Before, Built, changes_argument, described, flatten, key
from ..trace.writes import storage_of


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in an argument for the tensor of that name."""

    name: str


@dataclass(slots=True)
class Instruction:
    """One step of the traced forward.

    ``kind`` is ``module``, ``function``, ``method`` or ``attribute``; ``target`` a dotted path (``module:name`` for functions).
    ``results`` names the tensors among the leaves of the result, and the numbers that are only known in the step
    (``numbers``); ``None``: another leaf. ``last`` names those that nobody in this segment uses afterwards. ``grad``:
    whether autograd may see it; it may not where the forward says ``torch.no_grad()``. ``tree`` (``described``) and
    ``constants``: what a structured result was like in the capture (a ``Ref``: that argument itself). ``open``: among the
    arguments of a module is something that it could put more into; ``after``: it does, and gives ``After``. Pairs of what
    a module is given and gives: ``same`` are one tensor, ``own`` are two; ``unshared`` have not one memory (``memory``);
    whether ``summed`` are one tensor changes the order in which gradients of it are summed.
    """

    kind: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[str | None, ...]
    structured: bool
    last: tuple[str, ...] = ()
    grad: bool = True
    numbers: frozenset[str] = frozenset()
    tree: str = ""
    constants: tuple[Any, ...] = ()
    open: bool = False
    after: bool = False
    same: tuple[tuple[str, str], ...] = ()
    summed: tuple[tuple[str, str, bool], ...] = ()
    unshared: tuple[tuple[str, str], ...] = ()
    own: tuple[tuple[str, str], ...] = ()
    label: str = ""
    """What it is called in the model."""

    def __str__(self) -> str:
        """For people: a module or attribute by its path, a function or method as ``relu()``."""
        return self.label or (f"{self.target}()" if self.kind == "method" else self.target.rpartition(":")[2])


@dataclass(slots=True)
class Segment:
    """Instructions that one worker runs in one go. ``level`` grows strictly along every edge between workers."""

    number: int
    worker: str
    level: int
    instructions: list[Instruction] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    """Tensors that another segment uses."""
    backward: bool = False
    """Whether gradients come to it."""
    first: int = 0
    last: int = 0
    """Where its operations stand in the forward."""
    draws: bool = False
    """Whether an operation of it was seen to draw random numbers."""

    def take(self, step: Instruction, place: int, draws: bool) -> None:
        """Its next operation."""
        self.first, self.last = self.first if self.instructions else place, place
        self.draws |= draws
        self.instructions.append(step)

    def __str__(self) -> str:
        steps = ", ".join(dict.fromkeys(map(str, self.instructions))) or "(nothing)"
        return f"{self.worker} level {self.level}: {steps}"


def function_path(function: Callable[..., Any]) -> str:
    """Where every worker can import this function from. ``NotSupported`` for lambdas and closures."""
    if isinstance(function, torch._ops.OpOverload):
        return f"torch:ops.{function!s}"
    for name in (getattr(function, "__qualname__", ""), getattr(function, "__name__", "")):
        module = getattr(function, "__module__", None)
        if module and name and _look_up(module, name) is function:
            return f"{module}:{name}"
    try:
        # Builtins of torch know their home only through pickle.
        blob = pickle.dumps(function)
        if pickle.loads(blob) == function:  # bound methods (``Function.apply``) are made anew by every look
            return "pickle:" + blob.hex()
    except (pickle.PicklingError, AttributeError, TypeError):
        pass
    raise NotSupported(f"{function!r} cannot be sent to another worker", hint="use a function that can be imported by its name")


def find_function(path: str) -> Callable[..., Any]:
    """The inverse of ``function_path``; for the traced programs of an authenticated peer."""
    module, _, name = path.partition(":")
    if module == "pickle":
        return pickle.loads(bytes.fromhex(name))
    found = _look_up(module, name)
    if found is None:
        raise NotSupported(f"there is no function {name} in module {module} here", hint="install the same code everywhere")
    return found


def _look_up(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found
    except (ImportError, AttributeError):
        return None


def fill(arguments: Any, env: Mapping[str, Any]) -> Any:
    """``arguments`` with every ``Ref`` replaced; lists and dicts are new, and the receiver's to change."""
    kind = type(arguments)
    if kind is Ref:
        return env[arguments.name]
    if kind is tuple:
        return tuple([env[item.name] if type(item) is Ref else fill(item, env) for item in arguments])
    if kind in _PLAIN:
        return arguments
    if kind is dict:
        return {name: fill(item, env) for name, item in arguments.items()}
    if kind is list:
        return [fill(item, env) for item in arguments]
    if kind is Built:
        return arguments.kind.make([fill(item, env) for item in arguments.items])
    if kind is slice:
        return slice(fill(arguments.start, env), fill(arguments.stop, env), fill(arguments.step, env))
    return arguments


def plainly(arguments: Any) -> Any:
    """The same in lists and dicts of Python's, where they are those of fx."""
    if isinstance(arguments, dict):
        return {name: plainly(item) for name, item in arguments.items()}
    if isinstance(arguments, list):
        return [plainly(item) for item in arguments]
    if type(arguments) is Built:
        return Built(arguments.kind, tuple(map(plainly, arguments.items)))
    if type(arguments) is tuple:
        return tuple(map(plainly, arguments))
    if isinstance(arguments, slice):
        return slice(plainly(arguments.start), plainly(arguments.stop), plainly(arguments.step))
    return arguments


_PLAIN = frozenset([int, float, bool, str, type(None), torch.dtype, torch.Tensor])
"""Types of arguments that hold nothing else."""


def names_in(arguments: Any) -> list[str]:
    """The names of all ``Ref`` among the arguments."""
    names: list[str] = []
    map_aggregate(arguments, lambda leaf: names.append(leaf.name) if isinstance(leaf, Ref) else None)
    return names


def to_tensor(number: float) -> torch.Tensor:
    """How a size, or what was computed from sizes, crosses to another segment: without dimensions, int64, float64 or bool."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)


def to_number(tensor: torch.Tensor) -> float:
    """The inverse of ``to_tensor``."""
    return tensor.item()


def _structured(step: Instruction, result: Any, env: Mapping[str, Any], seen: dict[str, Any]) -> list[Any]:
    """The leaves of a result. ``NotSupported`` where anything but tensors and numbers that vary is not what it was."""
    leaves, tree = flatten(result)
    if tree != seen.get(step.tree) and described(tree) != step.tree:
        raise NotSupported(
            f"{step} gave other objects than when it was captured: {_described(result)}",
            hint="what joins the parts must be made of the same objects in every step",
        )
    seen[step.tree] = tree

    def known(name: str) -> Any:
        return leaves[step.results.index(name)] if name in step.results else env[name]

    for name, leaf, then in zip(step.results, leaves, step.constants):
        if name is None and (leaf is not known(then.name) if isinstance(then, Ref) else key(leaf) != then):
            raise NotSupported(
                f"{step} gave {leaf!r}, and {then!r} when it was captured",
                hint="let it give a tensor",
            )
    return leaves


def _check_given_back(step: Instruction, env: Mapping[str, Any]) -> None:
    """Raise ``NotSupported`` if a module gives what it is given, or gives it no more, and the capture does not allow for it."""
    hint = 'wrap(..., capture="eager") looks at what a part gives in every step'
    one = {(given, name): env[given] is env[name] for given, name, _ in step.summed}
    sums = {one[given, name] for given, name, then in step.summed if one[given, name] != then and env[name].requires_grad}
    sums = sums if torch.is_grad_enabled() else set()
    why = "gradients of it would be summed in another order"
    if any(env[given] is not env[name] for given, name in step.same) or False in sums:
        what = f"{step} gives a tensor of its own, and gave back what it was given when it was captured"
        raise NotSupported(f"{what}: {why if sums else 'the forward uses both'}", hint=hint)
    written = any(storage_of(env[given]) == storage_of(env[name]) for given, name in step.unshared)
    asked = any(env[given] is env[name] for given, name in step.own)
    if written or sums or asked:
        what = f"{step} gives back what it is given, and gave a tensor of its own when it was captured"
        why = "the forward writes into one of them" if written else why if sums else "the forward asks whether they are one"
        raise NotSupported(f"{what}: {why}", hint=hint)


def _described(result: Any) -> str:
    return ", ".join(type(part).__name__ for part in result) if isinstance(result, (tuple, list)) else type(result).__name__


def _followed(step: Instruction, module: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a module that may put something into its arguments, which are copies here."""
    before = Before(args, kwargs, step.after)
    result = module(*args, **kwargs)
    if step.after and not before.moved():
        return After(result, args, kwargs)
    if before.changed():
        raise changes_argument(step.target, before.names(getattr(module, "forward", module)))
    return result


class Machine:
    """Runs instructions against the modules and attributes of one worker, which has these ``parameters``. ``note`` is told of
    the tensors of a forward that the caller has too, by name; ``keeps``: whether a module here has kept the memory of one."""

    def __init__(
        self,
        module: Callable[[str], Callable[..., Any]],
        attribute: Callable[[str], Any],
        parameters: Sequence[torch.Tensor] = (),
        note: Callable[[int, Iterable[tuple[str, torch.Tensor]]], None] = lambda sequence, tensors: None,
        keeps: Callable[[torch.Tensor], bool] = lambda tensor: False,
    ) -> None:
        self._module, self.attribute, self.parameters, self.note, self.keeps = module, attribute, parameters, note, keeps
        self._functions: dict[str, Callable[..., Any]] = {}
        self._trees: dict[str, Any] = {}

    def run(
        self,
        instructions: list[Instruction],
        env: dict[str, Any],
        produced: Callable[[str, torch.Tensor], None],
        around: Callable[[int], AbstractContextManager[Any] | None] | None = None,
    ) -> None:
        """Run them in order; tensors go into ``env`` (and leave it after their last use), ``produced(name, tensor)`` is
        called for each as soon as it exists. ``around(at)`` gives what instruction ``at`` has to run in, if anything."""
        for at, step in enumerate(instructions):
            context = None if around is None else around(at)
            if context is None and step.grad:
                result = self._step(step, env)
            else:
                with context or nullcontext(), torch.set_grad_enabled(step.grad and torch.is_grad_enabled()):
                    result = self._step(step, env)
            leaves = _structured(step, result, env, self._trees) if step.structured else [result]
            for name, leaf in zip(step.results, leaves):
                if name is None:
                    continue
                env[name] = leaf
                if isinstance(leaf, torch.Tensor):
                    produced(name, leaf)
                elif name not in step.numbers:
                    raise NotSupported(f"{step} gave {type(leaf).__name__} where a tensor was captured")
            if step.same or step.own or step.summed or step.unshared:
                _check_given_back(step, env)
            for name in step.last:
                env.pop(name, None)

    def _step(self, step: Instruction, env: dict[str, Any]) -> Any:
        if step.kind == "attribute":
            return self.attribute(step.target)
        args, kwargs = fill(step.args, env), fill(step.kwargs, env)
        if step.kind == "module":
            module = self._module(step.target)
            return _followed(step, module, args, kwargs) if step.open else module(*args, **kwargs)
        if step.kind == "method":
            return getattr(args[0], step.target)(*args[1:], **kwargs)
        if step.target not in self._functions:
            self._functions[step.target] = find_function(step.target)
        return self._functions[step.target](*args, **kwargs)
