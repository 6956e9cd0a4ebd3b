"""Operations that act: they write in place, change buffers or draw random numbers. What a captured graph may do of that."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...transport import NotSupported
from ..guards.content import foreign, held
from .values import leaves_of, tensors_of


def finish(graph: fx.Graph, model: nn.Module) -> list[fx.Node]:
    """Drop what does nothing; the effects that are kept though nothing uses them."""

    def impure(node: fx.Node) -> bool:
        if node.op == "call_module":
            return node.meta.get("compared", False) or _has_effects(model.get_submodule(str(node.target)))
        if is_function(node.target):
            return True  # it may write into what it is given
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else str(node.target)
        if node.op in ("call_function", "call_method") and any(word in name for word in _ACTING):
            return True
        return node.op in ("placeholder", "output") or node.meta.get("acts", False) or _writes(node)

    graph.eliminate_dead_code(is_impure_node=impure)
    return [node for node in graph.nodes if node.op not in ("placeholder", "output") and not node.users]


def draws(operation: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this operation of ATen takes random numbers from a generator when it is given these."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    given = {argument.name: argument.default_value for argument in operation._schema.arguments}
    given |= {**dict(zip(given, args)), **kwargs}
    switches = ("train", "training")  # of dropout, of recurrent layers and of rrelu
    chances = ("dropout_p", "dropout", *(("p",) if "dropout" in operation.name() else ()))
    return all(given.get(name, True) is not False for name in switches) and all(given.get(name, 1) != 0 for name in chances)


def _has_effects(module: nn.Module) -> bool:
    def acts(part: nn.Module) -> bool:
        if not foreign(type(part).__module__) or part._forward_hooks or part._forward_pre_hooks:
            return True  # it may set attributes
        chances = (getattr(part, "p", 0), getattr(part, "dropout", 0))
        return part.training and bool(part._buffers or any(isinstance(chance, float) and chance for chance in chances))

    return any(map(acts, module.modules()))


def check_writes(graph: fx.Graph, values: dict[fx.Node, Any], writing: Set[fx.Node]) -> None:
    """Refuse writes in place that somebody else could see, or miss: what is sent, is sent as it was. Allowed are those into a
    tensor, or a view of it, that was used for nothing else before, and whose result is what is used afterwards; and into
    buffers, under the same condition. ``writing``: the operations that wrote into a tensor when they ran.

    An augmented assignment is an operation of its own here, which makes a new tensor, so it must not write into an input or a
    buffer either."""
    aliases: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        storages = {storage_of(leaf) for leaf in pytree.tree_leaves(values.get(node)) if isinstance(leaf, torch.Tensor)}
        augmented = node.meta.get("augmented", False)
        function = node.op == "call_function" and is_function(node.target) and node in writing
        for target in _written(node) if augmented or _writes(node) else node.all_input_nodes if function else ():
            tensor = values.get(target) if isinstance(target, fx.Node) else None
            before = aliases.get(storage_of(tensor), []) if isinstance(tensor, torch.Tensor) else []
            if isinstance(tensor, list):
                before = [target]
            lost = not node.users and not (before and before[0].op == "get_attr")
            lost = lost or (augmented and bool(before) and before[0].op in ("get_attr", "placeholder"))
            if "out" in node.kwargs or lost or any(len(other.users) > 1 for other in before):
                raise NotSupported(
                    f"the forward writes into a tensor that is used again: {operation_name(node)}",
                    hint="use the operation that makes a new tensor (x = x + y, not x += y or x.add_(y))",
                )
        for storage in storages:
            aliases.setdefault(storage, []).append(node)


Place = tuple[str, int]
"""Where an operation runs: worker and level of its segment."""


@dataclass(frozen=True, slots=True)
class Write:
    """An operation that writes into a storage (``storage_of``) in place. ``modules``: calls of whole modules that have a tensor
    there themselves, if it is not such a call that writes. ``keepers``: calls of other whole modules that have kept it in an
    attribute."""

    node: fx.Node
    storage: int
    modules: tuple[fx.Node, ...] = ()
    keepers: tuple[fx.Node, ...] = ()


def with_modules(writes: Sequence[Write], graph: fx.Graph, model: nn.Module) -> list[Write]:
    """These writes with their ``modules`` and ``keepers``."""
    written = {write.storage for write in writes}
    calls: dict[int, list[fx.Node]] = {}
    keepers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes if written else ():
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            registered = {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
            for storage in written & registered:
                calls.setdefault(storage, []).append(node)
            for storage in written.intersection(map(storage_of, held(module))) - registered:
                keepers.setdefault(storage, []).append(node)
    return [
        replace(
            write,
            modules=() if write.node.op == "call_module" else tuple(calls.get(write.storage, ())),
            keepers=tuple(node for node in keepers.get(write.storage, ()) if node.target != write.node.target),
        )
        for write in writes
    ]


@contextlib.contextmanager
def writes_of(
    node: fx.Node, values: Mapping[fx.Node, Any], found: list[Write], part: nn.Module | None = None
) -> Iterator[None]:
    """Note what the operation that runs meanwhile writes into, of the values that it is given, and of the buffers of the
    ``part`` that it calls."""
    given = [
        (leaf, leaf._version)
        for other in node.all_input_nodes
        for leaf in leaves_of(values[other])
        if isinstance(leaf, torch.Tensor)
    ]
    statistics: list[torch.Tensor] = []
    if node.op == "call_function" and _updates_statistics(node):
        inputs = [other for other in node.all_input_nodes if other.op == "get_attr"]
        statistics += [values[other] for other in inputs if not values[other].requires_grad]
    for module in () if part is None else part.modules():
        buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
        given += [(buffer, buffer._version) for buffer in buffers]
        if module.training and isinstance(module, nn.modules.batchnorm._NormBase):
            statistics += buffers  # it writes into them behind the version counter
    yield
    changed = [*statistics, *(tensor for tensor, version in given if tensor._version != version)]
    found += [Write(node, number) for number in dict.fromkeys(map(storage_of, changed))]


def _updates_statistics(node: fx.Node) -> bool:
    """Whether a function of a batch or an instance norm writes into the statistics that it is given."""
    target: Any = node.target
    if not any(word in str(target) for word in ("batch_norm", "instance_norm")):
        return False
    schema = getattr(target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else list(inspect.signature(target).parameters)
    given = {**dict(zip(names, node.args)), **node.kwargs}
    return bool(given.get("use_input_stats", True) if "use_input_stats" in names else given.get("training", False))


def check_seen(
    graph: fx.Graph, values: Mapping[fx.Node, Any], writes: Sequence[Write], where: Mapping[fx.Node, Place], caller: str
) -> None:
    """Refuse writes in place that somebody would see too early, or never. The operations of one segment run in their order
    on the same memory, as in one process; what another segment reads was sent, or is read at another time."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    aliases: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for storage in {storage_of(leaf) for leaf in leaves_of(values.get(node)) if isinstance(leaf, torch.Tensor)}:
            aliases.setdefault(storage, []).append(node)
    for write in writes:
        node, here = write.node, where.get(write.node)
        seen = [other for other in aliases.get(write.storage, ()) if other in where]
        before = [other for other in seen if order[other] < order[node]]
        if here is None:
            continue
        for call in (call for call in write.modules if call in where):
            if where[call] != here and not _in_order(order[call] < order[node], where[call], here):
                raise _used_again(node, call)
        if not seen:
            continue
        if before and before[0].op == "placeholder" and here[0] != caller:
            raise NotSupported(
                f"{operation_name(node)} writes into an input of the model, and worker {here[0]!r} has a copy of it",
                hint="use the operation that makes a new tensor there, for example ReLU(inplace=False)",
            )
        entering = [v for v in before if where[v] != here and any(where.get(user) == here for user in v.users)]
        for value in (other for other in seen if other.op == "get_attr" or other in before):
            users = {user: order[user] < order[node] for user in value.users if user is not node and user in where}
            for user in users:
                if not _unseen(value, user, here, where, users, entering):
                    raise _used_again(node, user)


class Registered:
    """What a part registers or switches when it is called: its parameters and buffers by name, and its flags."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._tables = [(vars(m)[name], dict(vars(m)[name])) for m in part.modules() for name in _TABLES]
        self._flags = [(module, module.training) for module in part.modules()]
        self._names = _tensors_of(part)

    def check(self, what: str) -> None:
        """Raise ``NotSupported`` if something has come, gone or been switched, and put it back: the model that has the stand-in
        of the part would not have it."""
        names = sorted(self._names ^ _tensors_of(self._part))
        switched = [module for module, training in self._flags if module.training != training]
        if not names and not switched:
            return
        for table, before in self._tables:
            table.clear()
            table.update(before)
        for module, training in self._flags:
            module.training = training
        if names:
            raise NotSupported(f"{what} registers or drops {names[0]!r} when it is called", hint="call it once before wrap()")
        raise NotSupported(f"{what} switches between train() and eval() when it is called", hint="do so before the forward")


_TABLES = ("_parameters", "_buffers", "_modules")


def _tensors_of(part: nn.Module) -> set[str]:
    found = set()
    for path, module in part.named_modules():
        found |= {f"{path}.{name}" if path else name for table in _TABLES[:2] for name in vars(module)[table]}
    return found


OWN = -1
"""In ``aliases``: the part has that memory itself, in a parameter, a buffer or an attribute."""


def aliases(given: Sequence[Any], result: Sequence[Any], part: nn.Module) -> list[tuple[int, int, bool]]:
    """Of the leaves of a call's result those that have the memory of a tensor which it was given, or which the part keeps, as
    (number of the leaf, number of that tensor among ``tensors_of`` what was given or ``OWN``, whether they are one object)."""
    tensors = tensors_of(given)
    own = set(map(storage_of, held(part)))
    found = []
    for at, leaf in enumerate(result):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            same = next((n for n, tensor in enumerate(tensors) if tensor is leaf), None)
            shared = next((n for n, tensor in enumerate(tensors) if storage_of(tensor) == storage_of(leaf)), None)
            if shared is not None:
                found.append((at, shared if same is None else same, same is not None))
            elif storage_of(leaf) in own:
                found.append((at, OWN, False))
    return found


def calls_itself(part: nn.Module) -> bool:
    """Whether a class of the user's has a ``__call__`` of its own around that of ``nn.Module``."""
    return any("__call__" in vars(kind) and not foreign(kind.__module__) for kind in type(part).__mro__)


def scattered(graph: fx.Graph, values: Mapping[fx.Node, Any], writes: Sequence[Write], where: Mapping[fx.Node, Place]) -> str:
    """An operation that writes into a tensor of the model which several segments use, as a norm that is called twice does with
    its statistics; empty: there is none."""
    found: dict[int, set[Place]] = {}
    for write in writes:
        found.setdefault(write.storage, set()).update(where[node] for node in (write.node, *write.modules) if node in where)
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(values.get(node), torch.Tensor) and storage_of(values[node]) in found:
            found[storage_of(values[node])].update(where[user] for user in node.users if user in where)
    return next((operation_name(write.node) for write in writes if len(found[write.storage]) > 1), "")


KEEP_A_COPY = "write into a copy (x.clone()), or let the part keep one"


def check_kept(writes: Sequence[Write], where: Mapping[fx.Node, Place]) -> None:
    """Refuse a write into what a part at another worker keeps: it would keep it as it was."""
    for write in writes:
        for keeper in write.keepers:
            if write.node in where and keeper in where and where[write.node][0] != where[keeper][0]:
                raise NotSupported(
                    f"{operation_name(write.node)} writes into memory that {operation_name(keeper)} keeps at another worker",
                    hint=KEEP_A_COPY,
                )


def _used_again(write: fx.Node, reader: fx.Node) -> NotSupported:
    return NotSupported(
        f"{operation_name(write)} writes into a tensor that is used again by {operation_name(reader)}",
        hint="use what makes a new tensor (x = x + y, not x += y or x.add_(y); ReLU(inplace=False))",
    )


def _in_order(earlier: bool, reader: Place, write: Place) -> bool:
    """Whether a segment reads what lies at its worker before another one there writes it if it is ``earlier`` in the program,
    and afterwards if not."""
    return reader[0] == write[0] and earlier == (reader[1] < write[1])


def _unseen(
    value: fx.Node,
    user: fx.Node,
    here: Place,
    where: Mapping[fx.Node, Place],
    users: Mapping[fx.Node, bool],
    entering: list[fx.Node],
) -> bool:
    """Whether a user of a value sees of a write ``here`` what it would see in one process. ``users``: whether they come
    before the write."""
    home, there, earlier = where[value], where[user], users[user]
    if value.op == "get_attr":  # no copy of it at its worker; it is read once where it lies for all others
        at = there if there[0] == home[0] else home
        if at != here:
            return _in_order(earlier, at, here)
        return there == here or len({before for other, before in users.items() if where[other][0] != home[0]}) == 1
    if there == here:
        return home == here or entering == [value]
    if not earlier:
        return False
    if home[0] != here[0]:
        return there[0] != here[0]
    sent = any(where[other][0] != home[0] for other in value.users if other in where)
    return there == home and home[1] < here[1] and not sent


def operation_name(node: fx.Node) -> str:
    """What a user is told of an operation."""
    if node.op == "call_module":
        return f"part {str(node.target)!r}"
    if is_function(node.target):  # where ``apply`` is in C, fx finds no module of it
        return f"{node.target.__self__.__name__}.apply"  # type: ignore[union-attr]
    return node.format_node() or node.name


def is_function(target: Any) -> bool:
    """Whether an operation is ``apply`` of an autograd function of the user's."""
    kind = getattr(target, "__self__", None)
    return isinstance(kind, type) and issubclass(kind, torch.autograd.Function)


def _augmented(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def assign(proxy: fx.Proxy, other: Any) -> fx.Proxy:
        made = proxy.tracer.create_proxy("call_function", getattr(operator, name), (proxy, other), {})
        made.node.meta |= {"augmented": True, "acts": True}
        return made

    return assign


class Augmented:
    """Mixed into proxies, which know no ``x += y``: Python would make ``x = x + y`` of it, and other names of the tensor would
    keep what it was. The operation is marked (``check_writes``)."""

    __iadd__, __isub__, __imul__, __imatmul__ = map(_augmented, ("add", "sub", "mul", "matmul"))
    __itruediv__, __ifloordiv__, __imod__, __ipow__ = map(_augmented, ("truediv", "floordiv", "mod", "pow"))
    __iand__, __ior__, __ixor__ = map(_augmented, ("and_", "or_", "xor"))
    __ilshift__, __irshift__ = map(_augmented, ("lshift", "rshift"))

    def __hash__(self) -> int:
        raise NotSupported("a tensor, or a number that is asked of one, is a key: it is another one in a trace")


class NoAssignments(TorchFunctionMode):
    """Refuses assignments such as ``parameter.data = ...``, and methods that do the like, in a symbolic trace."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__set__":
            raise sets_on_tensor(f"an assignment of {func.__self__.__name__!r}")
        if name in UNSEEN and args and isinstance(args[0], nn.Parameter):
            raise sets_on_tensor(name)
        return func(*args, **kwargs or {})


UNSEEN = frozenset(
    [
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "requires_grad_",
        "backward",
        "set_",
        "share_memory_",
    ]
)
"""Methods that do something to a tensor object, which the tensor of a later step is not."""


def sets_on_tensor(name: str) -> NotSupported:
    return NotSupported(
        f"the forward does {name} to a tensor, which a graph of operations does not have",
        hint="what joins the parts must be the same for all tensors of one shape; decide on values outside of the model",
    )


class NoWrites(TorchDispatchMode):
    """Refuses writes in a symbolic trace into tensors that it has not made. What is no proxy comes from the model or from
    elsewhere, and no graph would have the write: a momentum encoder that follows in the forward, or a count, for example."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {storage_of(tensor): name for name, tensor in named}
        self._made: dict[int, torch.Tensor] = {}
        """By storage; they stay alive, so that no other storage gets the same number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in mutated(func, args, kwargs):
            if isinstance(tensor, torch.Tensor) and storage_of(tensor) not in self._made:
                name = self._names.get(storage_of(tensor))
                what = repr(name) if name else "a tensor that it has not made"
                raise NotSupported(f"the forward writes into {what} itself, not by an operation on an input")
        result = func(*args, **kwargs)
        given = {storage_of(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and storage_of(leaf) not in given:
                self._made[storage_of(leaf)] = leaf
        return result


def writes_beyond() -> NotSupported:
    return NotSupported("the forward writes into a tensor that is neither its own nor its model's, a global for example")


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -id(tensor)


def _written(node: fx.Node) -> list[Any]:
    """What an operation that writes writes into."""
    if _schemas(node.target):
        return mutated(node.target, node.args, node.kwargs)
    return [node.kwargs.get("out", node.args[0] if node.args else None)]


def mutated(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What an operation of ``torch.ops``, also one of the user's, is given to write into."""
    found = []
    for schema in _schemas(operation):
        given = {**dict(zip((argument.name for argument in schema.arguments), args)), **kwargs}
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        found += [leaf for name in written for leaf in pytree.tree_leaves(given.get(name)) if leaf is not None]
    return found


def _schemas(operation: Any) -> list[Any]:
    if isinstance(operation, torch._ops.OpOverloadPacket):
        return [getattr(operation, name)._schema for name in operation.overloads()]
    return [operation._schema] if isinstance(operation, torch._ops.OpOverload) else []


def _writes(node: fx.Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name.strip("_") in _IN_PLACE
    if _schemas(node.target):
        return bool(mutated(node.target, node.args, node.kwargs))
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        inplace = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        return inplace or bool(node.kwargs.get("inplace")) or "out" in node.kwargs
    return False


_ACTING = ("batch_norm", "instance_norm", "dropout", "rand", "normal", "bernoulli", "multinomial", "poisson", "binomial")
"""Functions that change buffers or draw random numbers: they run though nothing uses their result."""
_IN_PLACE = frozenset(
    [
        "set_item",
        "setitem",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "iand",
        "ior",
        "ixor",
        "ilshift",
        "irshift",
        "imatmul",
    ]
)
