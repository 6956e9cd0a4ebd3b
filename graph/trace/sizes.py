"""Sizes of tensors that a trace may take for constants.

A plan is traced once and runs many steps. With ``Sizes()`` its inputs always have the sizes of the trace, and only sizes that
depend on data are free (``nonzero``, masks). With ``varying``, some dimensions of the inputs are symbols. A size that is a
plain number at the end of such a trace is proven not to depend on them, as long as the conditions that the trace met ``hold``.
With ``known=False`` nothing is proven: the trace shows one example, and every size may differ in the next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from ..opaque.scripts import uncounted
from .recurrent import RecurrentShapes

# ``sympy`` and what needs it take half a second to import: where something is traced, not at every worker.
if TYPE_CHECKING:
    import sympy  # type: ignore[import-untyped]

Shapes = Sequence[Sequence[int]]
Number = (torch.SymInt, torch.SymFloat, torch.SymBool)
FREE = -1
"""A dimension that is not known before the step."""
_MAX_CACHE = 16384
"""torch remembers what every operation on fake tensors gave, for as long as the process lives. From so many on it is told to
forget, so that a program with ever new shapes does not grow."""


def plain(number: Any) -> float:
    """A symbolic number that turned out to be a constant."""
    if isinstance(number, torch.SymBool):
        return bool(number)
    return int(number) if isinstance(number, torch.SymInt) else float(number)


def depends_on_data() -> type[Exception]:
    """What is raised inside ``Sizes.under`` where control flow, or whether two shapes fit, depends on data."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


class Sizes:
    """Of one trace: ``varying`` are (input, dimension)."""

    def __init__(self, varying: Collection[tuple[int, int]] = (), known: bool = True) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.varying, self.known = frozenset(varying), known
        # No two sizes are one because they happen to be equal now, and 0 and 1 are sizes like others.
        self._env = ShapeEnv(duck_shape=False, specialize_zero_one=False, allow_dynamic_output_shape_ops=True)
        self._symbols: dict[tuple[int, int], sympy.Symbol] = {}
        self._shapes: Shapes = ()
        self._conditions: list[sympy.Basic] | None = None

    @contextlib.contextmanager
    def under(self, mode: FakeTensorMode) -> Iterator[None]:
        """Fake tensors made and used inside have these sizes."""
        if len(FakeTensorMode.cache) > _MAX_CACHE:
            FakeTensorMode.cache_clear()
        before = mode.shape_env, mode.static_shapes
        mode.shape_env, mode.static_shapes = self._env, False
        try:
            # Some kernels that call others can be traced with symbols only as the dispatcher in Python knows them. Without
            # symbols they are better left as they will run: who allocates what is learnt from them too.
            dispatcher = enable_python_dispatcher() if self.varying else contextlib.nullcontext()
            with mode, dispatcher, RecurrentShapes(self._env), uncounted():
                yield
        finally:
            mode.shape_env, mode.static_shapes = before

    def inputs(self, shapes: Shapes, dtypes: Sequence[torch.dtype], devices: Sequence[torch.device]) -> list[torch.Tensor]:
        """Fake tensors of these shapes, inside ``under``; ``shapes`` are the example that symbols are tried with."""
        self._shapes = [tuple(shape) for shape in shapes]
        return [
            torch.empty([self._size((at, dim), size) for dim, size in enumerate(shape)], dtype=dtype, device=device)
            for at, (shape, dtype, device) in enumerate(zip(shapes, dtypes, devices))
        ]

    def _size(self, where: tuple[int, int], size: int) -> Any:
        if where not in self.varying:
            return size
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(f"size_{where[0]}_{where[1]}")
        symbol = self._symbols[where] = self._env.create_symbol(size, source, DimDynamic.DYNAMIC, None)
        return self._env.create_symintnode(symbol, hint=size, source=source)

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """``FREE`` where it is not proven."""
        return tuple(int(size) if self.known and not self.varies(size) else FREE for size in tensor.shape)

    def varies(self, number: Any) -> bool:
        """Whether this number (not a tensor) may be another one in another step."""
        return isinstance(number, Number) and bool(number.node.expr.free_symbols)

    def hold(self, shapes: Shapes) -> bool:
        """Whether inputs of these shapes may run what was traced: dimensions that do not vary are as they were, and the
        conditions that the trace met are true."""
        if not self.known:
            return True
        for at, (now, then) in enumerate(zip(shapes, self._shapes)):
            if any(a != b and (at, dim) not in self.varying for dim, (a, b) in enumerate(zip(now, then))):
                return False
        if self._conditions is None:
            self._conditions = self._met()
        import sympy

        sizes = {symbol: sympy.Integer(shapes[at][dim]) for (at, dim), symbol in self._symbols.items()}
        return all(condition.xreplace(sizes) == sympy.true for condition in self._conditions)

    def _met(self) -> list[sympy.Basic]:
        import sympy

        ours = set(self._symbols.values())
        found = {guard.expr for guard in self._env.guards}
        found |= {sympy.Eq(symbol, value) for symbol, value in self._env.replacements.items()}
        return [condition for condition in found if condition.free_symbols <= ours]
