"""Every interleaving of a few threads that run kernels over shared words, by the memory order that ``transport.words.atomics``
promises and no stronger one. A stress test waits for a bad moment; this makes them all.

Kernels are Python functions over integers, so their own source is run: as generators, which stop at each operation of the
machine. The threads of a case are written as kernels are.

What one state can become next: one thread does its next operation, or one store leaves a thread's store buffer and is visible
to all. The order is C11's, and that of x86-64 and aarch64 where theirs is stronger for both:

* A load sees the latest store of its own thread, else what is visible. Loads of a thread happen in its order.
* A release store becomes visible after all that its thread has stored before. A plain one (``memcpy``) may become visible
  before what was stored elsewhere before it; one that goes past the caches (``stream``) even after release stores that follow.
* ``fetch_add``, ``compare_exchange`` and the system call come after all that their thread has stored before is visible, but for
  what goes past the caches; what follows a ``fence`` comes after that, too.
* Nothing wakes a thread that sleeps for a second or longer but ``futex_wake``: where threads sleep, and none can go on, a
  wake-up is lost. A shorter sleep is over at once.
* A thread at ``pause`` or ``sched_yield`` that has done nothing but look since the last one goes on when a word that it has
  seen has changed. The clock stands still, so what spins for a time does so once.

States that were seen are not visited again. What a thread can do next is a function of its variables, so a state is the shared
words, the store buffers, and where each thread is with which variables.
"""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Callable, Generator, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from rdmarpc.transport.words import symbols

RELEASE, PLAIN, STREAM = range(3)
_HALF, _SECOND_NS = 0xFFFFFFFF, 1_000_000_000
LONG = 1 << 60
"""Nanoseconds: a wait that is not over before it is woken."""
Thread = Generator[tuple[Any, ...], Any, Any]


class Violation(AssertionError):
    """What went wrong, and the operations that led there."""


# -- the operations of the machine


def _load(address: int) -> Thread:
    return (yield "load", address)


def _store(address: int, value: int) -> Thread:
    yield "store", address, value, RELEASE


def _fetch_add(address: int, value: int) -> Thread:
    return (yield "fetch_add", address, value)


def _compare_exchange(address: int, expected: int, desired: int) -> Thread:
    return (yield "compare_exchange", address, expected, desired)


def _fence() -> Thread:
    yield ("fence",)


def _futex(address: int, operation: int, value: int, timeout_ns: int) -> Thread:
    return (yield "futex_wake" if operation else "futex_wait", address, value, timeout_ns)


def _rest() -> Thread:
    yield ("rest",)


def _now() -> Thread:
    return 0
    yield


def _copy(target: int, source: int, nbytes: int, how: int = PLAIN) -> Thread:
    assert nbytes % 8 == 0, "words only"
    at = 0
    while at < nbytes:
        value = yield "load", source + at
        yield "store", target + at, value, how
        at += 8


def _stream(target: int, source: int) -> Thread:
    yield from _copy(target, source, 8, STREAM)


def no_fence() -> None:
    """In place of ``fence``, for a case that needs it."""


def _unknown(*operands: int) -> Thread:
    raise NotImplementedError("an operation that has no meaning here yet")
    yield


_OPERATIONS = {
    "load_acquire": _load,
    "store_release": _store,
    "fetch_add": _fetch_add,
    "compare_exchange": _compare_exchange,
    "fence": _fence,
    "futex": _futex,
    "pause": _rest,
    "sched_yield": _rest,
    "now": _now,
    "memcpy": _copy,
    "stream": _stream,
}


# -- functions as generators, whose variables are all that they know


def _function(of: Any) -> Any:
    of = getattr(of, "__self__", of)
    return of.function if isinstance(of, symbols.Kernel) else of


class Translation:
    """``constants``: globals that all functions have instead of their own."""

    def __init__(self, constants: dict[str, Any]) -> None:
        self._constants = constants
        self._known: dict[FunctionType, Callable[..., Thread]] = {}

    def __call__(self, function: FunctionType) -> Callable[..., Thread]:
        if function not in self._known:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            (definition,) = tree.body
            assert isinstance(definition, ast.FunctionDef)
            definition.decorator_list, definition.returns = [], None
            for argument in definition.args.args:
                argument.annotation = None
            names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals, **self._constants}
            definition.body = [*_Body(self, names).block(definition.body), *ast.parse("if False: yield").body]
            exec(compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec"), names)
            self._known[function] = names[function.__name__]
        return self._known[function]

    def called(self, meaning: Any) -> Callable[..., Thread] | None:
        """What runs a call of it step by step; ``None`` for Python's own functions."""
        if isinstance(meaning, symbols.Operation | symbols.CFunction):
            return _OPERATIONS.get(meaning.name, _unknown)
        function = _function(meaning)
        return self(function) if isinstance(function, FunctionType) else None


class _Body:
    """Rewrites a function so that each call that takes steps stands alone in a statement: Python's stack is empty then."""

    def __init__(self, translation: Translation, names: dict[str, Any]) -> None:
        self._translation, self._names, self._made = translation, names, 0

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        return [each for statement in statements for each in self._statement(statement)]

    def _statement(self, node: Any) -> list[ast.stmt]:
        if isinstance(node, ast.While):
            before, test = self._value(node.test)
            assert not node.orelse
            leave = ast.If(ast.UnaryOp(ast.Not(), test), [ast.Break()], [])
            return [ast.While(ast.Constant(True), [*before, leave, *self.block(node.body)], [])]
        if isinstance(node, ast.For):
            return self._counted(node)
        before = []
        for field in ("value", "test"):
            if getattr(node, field, None) is not None:
                before, value = self._value(getattr(node, field))
                setattr(node, field, value)
        for field in ("body", "orelse"):
            if getattr(node, field, None):
                setattr(node, field, self.block(getattr(node, field)))
        return [*before, node]

    def _counted(self, node: ast.For) -> list[ast.stmt]:
        """A loop over a range, whose place would be on Python's stack."""
        before, bounds = self._value(node.iter)
        assert isinstance(bounds, ast.Call) and isinstance(bounds.func, ast.Name) and bounds.func.id == "range"
        *begin, end = bounds.args
        at, limit = self._new(), self._new()
        count = ast.AugAssign(ast.Name(at.id, ast.Store()), ast.Add(), ast.Constant(1))
        body = [ast.Assign([node.target], at), count, *self.block(node.body)]
        loop = ast.While(ast.Compare(at, [ast.Lt()], [limit]), body, self.block(node.orelse))
        return [*before, _set(limit, end), _set(at, *(begin or [ast.Constant(0)])), loop]

    def _value(self, node: Any) -> tuple[list[ast.stmt], Any]:
        """The statements that come before, and an expression without steps."""
        if isinstance(node, ast.BoolOp):
            before, value = self._value(node.values[0])
            for each in node.values[1:]:
                made = self._new()
                more, other = self._value(each)
                test = value if isinstance(node.op, ast.And) else ast.UnaryOp(ast.Not(), value)
                before += [_set(made, value), ast.If(test, [*more, _set(made, other)], [])]
                value = made
            return before, value
        if isinstance(node, ast.IfExp):
            before, test = self._value(node.test)
            made = self._new()
            parts = [[*some, _set(made, value)] for some, value in (self._value(node.body), self._value(node.orelse))]
            return [*before, ast.If(test, *parts)], made
        before = []
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                some, value = self._value(value)
                before += some
                setattr(node, field, value)
            elif isinstance(value, list) and value and isinstance(value[0], ast.expr):
                pairs = [self._value(each) for each in value]
                before += [each for some, _ in pairs for each in some]
                setattr(node, field, [each for _, each in pairs])
        called = self._translation.called(self._names.get(node.func.id)) if isinstance(node, ast.Call) else None
        if called is None:
            return before, node
        self._names[f"{node.func.id}_in_steps"] = called
        node.func.id = f"{node.func.id}_in_steps"
        made = self._new()
        return [*before, _set(made, ast.YieldFrom(node))], made

    def _new(self) -> ast.Name:
        self._made += 1
        return ast.Name(f"value_{self._made}", ast.Load())


def _set(name: ast.Name, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name.id, ast.Store())], value)


# -- the words


class Words:
    """What the threads share, in blocks that begin at an address."""

    def __init__(self) -> None:
        self.values: dict[int, int] = {}
        self.kinds: dict[int, str] = {}

    def _block(self, values: Sequence[int], kind: str) -> int:
        base = 4096 + 64 * len(self.values)
        for number, value in enumerate(values):
            self.values[base + 8 * number], self.kinds[base + 8 * number] = value, kind
        return base

    def shared(self, *values: int) -> int:
        return self._block(values, "shared")

    def constant(self, *values: int) -> int:
        """Nobody stores to these."""
        return self._block(values, "constant")

    def own(self, *values: int) -> int:
        """One thread reads and writes these. (Where several do, each has its own.)"""
        return self._block(values, "own")

    def mark_own(self, *addresses: int) -> None:
        self.kinds.update(dict.fromkeys(addresses, "own"))


class _Moment:
    """Where a thread is: what it does next, and ``variables``, by which it is known."""

    __slots__ = ("after", "before", "observed", "operation", "read", "result", "running", "thread")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.operation: tuple[Any, ...] | None = None
        """``None``: it has ended, with ``result``."""
        self.result: Any = None
        self.read: tuple[tuple[int, int], ...] | None = ()
        """What it has seen since it last rested; ``None`` if it has done more than to look."""
        self.after: dict[Any, _Moment] = {}
        self.before: _Moment | None = None
        self.observed: Any = None
        self.running: _Running | None = None


@cache
def _live(code: CodeType) -> dict[int, list[str]]:
    """The variables whose values matter behind the instruction at each offset: where others differ, a thread goes on alike."""
    instructions = list(dis.get_instructions(code))
    offsets = [each.offset for each in instructions]
    before: dict[int, set[str]] = {offset: set() for offset in offsets}
    behind: dict[int, set[str]] = {}
    changed = True
    while changed:
        changed = False
        for number, each in reversed(list(enumerate(instructions))):
            after: set[str] = set()
            if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
                after |= before[each.argval]
            goes_on = not each.opname.startswith(("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD"))
            if goes_on and number + 1 < len(instructions):
                after |= before[offsets[number + 1]]
            behind[each.offset] = set(after)
            if "_FAST" in each.opname:
                names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
                stores = each.opname.startswith("STORE") and not each.opname.endswith("LOAD_FAST")
                after = after - set(names) if stores else after | set(names)
            if after != before[each.offset]:
                before[each.offset], changed = after, True
    return {offset: sorted(names) for offset, names in behind.items()}


class _Running:
    """A generator, and the words of its thread alone."""

    def __init__(self, program: Thread, own: dict[int, int]) -> None:
        self.program, self.own = program, own

    def variables(self) -> tuple[Any, ...]:
        found: list[Any] = list(self.own.values())
        program: Any = self.program
        while program is not None and program.gi_frame is not None:
            code, at, variables = program.gi_code, program.gi_frame.f_lasti, program.gi_frame.f_locals
            found += (code, at, *[variables.get(name) for name in _live(code)[at]])
            program = program.gi_yieldfrom
        return tuple(found)


State = tuple[tuple[int, ...], tuple[_Moment, ...], tuple[tuple[tuple[int, int, int], ...], ...], int]
"""The shared words, where each thread is, what it has stored and nobody sees, and (bits) who sleeps."""


class Explorer:
    """One case: its words, and its threads."""

    def __init__(self, words: Words, threads: dict[str, FunctionType], **constants: Any) -> None:
        """``threads``: by name, functions as kernels are, that may call kernels. ``constants``: globals that they all have
        instead of their own (a time to spin, say)."""
        translation = Translation({"STREAM_BYTES": 8, "STREAM_ALIGN": 8, "_PAUSES": 1, **constants})
        self._words, self._names, self._programs = words, list(threads), [translation(each) for each in threads.values()]
        self._places = {address: at for at, address in enumerate(a for a, kind in words.kinds.items() if kind == "shared")}
        self._addresses = list(self._places)
        self._own = {address: words.values[address] for address, kind in words.kinds.items() if kind == "own"}
        self._moments: dict[tuple[Any, ...], _Moment] = {}

    def run(self, end: Callable[[Callable[[int], int], list[Any]], None] | None = None, most: int = 1_000_000) -> int:
        """Visit all states; how many there are. ``end``: is given, of each state in which all threads have ended, what words
        hold, and the results of the threads. Raises ``Violation``."""
        words = tuple(self._words.values[address] for address in self._addresses)
        count = len(self._programs)
        first: State = words, tuple(self._begin(thread) for thread in range(count)), ((),) * count, 0
        came: dict[State, tuple[State, Any] | None] = {first: None}
        before: dict[State, list[State]] = {}
        over: list[State] = []
        stack = [first]
        while stack:
            state = stack.pop()
            try:
                following = self._following(state)
                if not following:
                    self._at_end(state, end)
                    over.append(state)
            except AssertionError as error:
                raise Violation(f"{error}\n{self._history(came, state)}") from error
            for label, after in following:
                before.setdefault(after, []).append(state)
                if after not in came:
                    came[after] = state, label
                    stack.append(after)
            if len(came) > most:
                raise RuntimeError(f"more than {most} states: make the case smaller")
        ends = set(over)
        while over:
            fresh = set(before.get(over.pop(), ())) - ends
            ends |= fresh
            over += fresh
        for state in came:
            if state not in ends:
                raise Violation(f"from here there is no end\n{self._history(came, state)}")
        return len(came)

    def _at_end(self, state: State, end: Callable[[Callable[[int], int], list[Any]], None] | None) -> None:
        words, moments, _, _ = state
        stuck = [f"{name} at {m.operation}" for name, m in zip(self._names, moments) if m.operation is not None]
        assert not stuck, f"none goes on: {', '.join(stuck)}"
        if end is not None:
            end(lambda address: words[self._places[address]], [moment.result for moment in moments])

    def _history(self, came: dict[State, tuple[State, Any] | None], state: State) -> str:
        lines: list[str] = []
        while (before := came[state]) is not None:
            state, (thread, what) = before
            lines.append(f"{self._names[thread]}: {what}")
        return "\n".join(reversed(lines))

    # -- threads

    def _begin(self, thread: int) -> _Moment:
        return self._advance(thread, _Running(self._programs[thread](), dict(self._own)), None, ())

    def _observe(self, moment: _Moment, observed: Any) -> _Moment:
        """Where a thread is when its operation has given this."""
        found = moment.after.get(observed)
        if found is not None:
            return found
        assert moment.operation is not None
        name, *operands = moment.operation
        read: tuple[tuple[int, int], ...] | None = None
        if name == "rest":
            read = ()
        elif (name == "load" or (name == "compare_exchange" and not observed)) and moment.read is not None:
            seen = observed if name == "load" else None  # what it held instead is not known, and of no use
            read = (*(each for each in moment.read if each[0] != operands[0]), (operands[0], seen))
        running, moment.running = moment.running, None
        found = moment.after[observed] = self._advance(moment.thread, running or self._again(moment), observed, read)
        if found.before is None:
            found.before, found.observed = moment, observed
        return found

    def _again(self, moment: _Moment) -> _Running:
        """A thread that has come to this moment once more."""
        path = []
        at: _Moment | None = moment
        while at is not None and at.before is not None:
            path.append(at.observed)
            at = at.before
        running = _Running(self._programs[moment.thread](), dict(self._own))
        self._next(running, None)
        for observed in reversed(path):
            self._next(running, observed)
        return running

    def _advance(self, thread: int, running: _Running, observed: Any, read: Any) -> _Moment:
        result = None
        try:
            operation: Any = self._next(running, observed)
        except StopIteration as stop:
            operation, result = None, stop.value
        key = thread, operation, result, read, running.variables()
        found = self._moments.get(key)
        if found is None:
            found = self._moments[key] = _Moment(thread)
            found.operation, found.result, found.read = operation, result, read
        if found.running is None:
            found.running = running
        return found

    def _next(self, running: _Running, observed: Any) -> tuple[Any, ...]:
        """Go on to the next operation that others see, or that sees what they do."""
        while True:
            operation = running.program.send(observed)
            if operation[0] in ("fence", "rest"):
                return operation
            kind = self._words.kinds.get(operation[1])
            assert kind is not None, f"{operation}: there is no such word"
            if kind == "shared":
                return operation
            observed = self._alone(operation, kind, running.own)

    def _alone(self, operation: tuple[Any, ...], kind: str, own: dict[int, int]) -> int | None:
        name, address, *rest = operation
        if kind == "constant":
            assert name == "load", f"{operation}: a constant"
            return self._words.values[address]
        before = own[address]
        assert name in ("load", "store", "fetch_add"), f"{operation}: a word that nobody else sees"
        if name != "load":
            own[address] = rest[0] if name == "store" else before + rest[0]
        return before

    # -- what can happen next

    def _following(self, state: State) -> list[tuple[tuple[int, Any], State]]:
        words, moments, buffers, sleep = state
        found: list[tuple[tuple[int, Any], State]] = []
        for thread, moment in enumerate(moments):
            buffer = buffers[thread]
            for at in range(len(buffer)):
                if self._may_leave(buffer, at):
                    place, value, _ = buffer[at]
                    seen = words[:place] + (value,) + words[place + 1 :]
                    left = _with(buffers, thread, buffer[:at] + buffer[at + 1 :])
                    found.append(((thread, ("seen", self._addresses[place], value)), (seen, moments, left, sleep)))
            if moment.operation is not None and not sleep >> thread & 1:
                after = self._step(state, thread, moment)
                if after is not None:
                    found.append(((thread, moment.operation), after))
        return found

    @staticmethod
    def _may_leave(buffer: tuple[tuple[int, int, int], ...], at: int) -> bool:
        place, _, how = buffer[at]
        return all(before != place and (how != RELEASE or kind == STREAM) for before, _, kind in buffer[:at])

    def _step(self, state: State, thread: int, moment: _Moment) -> State | None:
        """The state after a thread's operation; ``None`` if it cannot happen now."""
        words, moments, buffers, sleep = state
        buffer = buffers[thread]
        assert moment.operation is not None
        name, *operands = moment.operation
        if name == "store":
            place, value, how = self._places[operands[0]], operands[1], operands[2]
            moments = self._to(moments, thread, None)
            after = moments[thread].operation
            if not buffer and how != STREAM and (after is None or after[0] not in ("load", "store", "rest")):
                # It does nothing before this has to be seen: that this is seen later means that it stores later.
                return words[:place] + (value,) + words[place + 1 :], moments, buffers, sleep
            return words, moments, _with(buffers, thread, (*buffer, (place, value, how))), sleep
        if name == "load":
            return words, self._to(moments, thread, self._see(words, buffer, operands[0])), buffers, sleep
        if name == "rest":
            # What has seen nothing yet, or done more than to look, would not find the same again.
            if moment.read and all(self._see(words, buffer, address) == value for address, value in moment.read):
                return None
            return words, self._to(moments, thread, None), buffers, sleep
        if any(how != STREAM or name == "fence" for _, _, how in buffer):
            return None
        if name == "fence":
            return words, self._to(moments, thread, None), buffers, sleep
        place = self._places[operands[0]]
        value = words[place]
        if name == "fetch_add":
            changed = words[:place] + (value + operands[1],) + words[place + 1 :]
            return changed, self._to(moments, thread, value), buffers, sleep
        if name == "compare_exchange":
            if value != operands[1]:
                return words, self._to(moments, thread, 0), buffers, sleep
            changed = words[:place] + (operands[2],) + words[place + 1 :]
            return changed, self._to(moments, thread, 1), buffers, sleep
        if name == "futex_wait":
            if value & _HALF != operands[1] & _HALF or operands[2] < _SECOND_NS:
                return words, self._to(moments, thread, -1), buffers, sleep
            return words, moments, buffers, sleep | 1 << thread
        assert name == "futex_wake", moment.operation
        woken = [
            other
            for other, each in enumerate(moments)
            if sleep >> other & 1 and each.operation is not None and each.operation[1] == operands[0]
        ]
        return self._woken(state, thread, operands[1], woken)

    def _woken(self, state: State, thread: int, most: int, sleepers: list[int]) -> State:
        words, moments, buffers, sleep = state
        assert most > 1 or len(sleepers) < 2, "which one is woken is not explored"
        for other in sleepers:
            sleep &= ~(1 << other)
            moments = self._to(moments, other, 0)
        return words, self._to(moments, thread, len(sleepers)), buffers, sleep

    def _to(self, moments: tuple[_Moment, ...], thread: int, observed: int | None) -> tuple[_Moment, ...]:
        return _with(moments, thread, self._observe(moments[thread], observed))

    def _see(self, words: tuple[int, ...], buffer: tuple[tuple[int, int, int], ...], address: int) -> int:
        place = self._places[address]
        return next((value for at, value, _ in reversed(buffer) if at == place), words[place])


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return values[:at] + (value,) + values[at + 1 :]
