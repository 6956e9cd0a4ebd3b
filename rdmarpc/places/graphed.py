"""``graphed``: the commands of a step are posted again, without Python, as a CUDA graph is launched again.

The first calls run the step and capture it (``capture.py``). When two calls that followed each other did the same, what they
posted becomes programs at the workers. A call is some words then: which programs, the first name of what they make, where
arguments lie. What ran here is run here again, operator by operator.

What a call returns has new names. What it leaves elsewhere (gradients, say) takes the place of what the call before has left,
by RENAME behind all that reads that.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ..transport import NotSupported
from . import observing, ring
from .capture import Brought, Capture, Crossed, Event, Fetched, Plain, Posted, Ran, Ref, Result, alive, difference, plains
from .flags import flags_of_gpus, run_plain
from .geometry import at_bytes, geometry, room
from .recording import end_first_steps
from .stream import Region, Storage, Stream, crossing, names, state_words
from .tensor import RemoteTensor, address_of, gradients_of, is_parameter, storage_of, wrapper
from .worker import HEAD_BYTES

_log = logging.getLogger("rdmarpc")
_WORDS = 1 << 13
"""A program has not many more."""
_FORMS, _TRIES = 16, 8
_saving = torch._C._autograd._top_saved_tensors_default_hooks
_CONSTANTS = (int, float, bool, str, complex, type(None), torch.dtype, torch.layout, torch.memory_format)
_HELD = 1 << 20
"""A program counts as so many bytes: its worker is told soon when it is not needed any more."""
Word = int | tuple[Any, ...]


class Graphed:
    """A step (``graphed``). ``replays``: calls that ran no Python of the step; ``runs``: the others. ``why``: the last reason
    for which a call could not be posted again, "" if there was none."""

    def __init__(self, step: Callable[..., Any], check: int) -> None:
        self.step, self.check = step, check
        self.replays = self.runs = 0
        self.why = ""
        self._lock = threading.RLock()
        self._forms: OrderedDict[Any, _Form] = OrderedDict()
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._gradients: Gradients = {}
        self._strange = 0
        """Forms in a row that were new."""
        observing.graphs.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            leaves, tree = list(args), ""
            if kwargs or not all(isinstance(each, torch.Tensor) for each in args):
                leaves, spec = tree_flatten((args, kwargs))
                tree = repr(spec)
            tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
            form = self._form((_arguments(leaves), tree, self._around()))
            replayable = form.replayable
            modes = torch._C._len_torch_dispatch_stack()  # the user's, or another step that is captured around this one
            checks = self.check > 0 and (self.replays + self.runs) % self.check == self.check - 1
            if observing.observers and replayable is not None:
                end_first_steps()  # they would see nothing of a replay
            watched = any(each.thread == threading.get_ident() for each in observing.observers)
            if replayable is not None and not checks and not modes and not watched and replayable.holds():
                self.replays += 1
                self._strange = form.tries = 0
                return replayable.replay(tensors)
            self.runs += 1
            again, form.again = form.again, True
            if form.tries >= _TRIES or not again or modes or not observing.capturing.acquire(blocking=False):
                return self._without_graph(self.step(*args, **kwargs))
            try:
                return self._captured(form, tensors, args, kwargs, checks)
            finally:
                observing.capturing.release()

    def _without_graph(self, out: Any) -> Any:
        """Results of Python. A gradient among them is copied: the next call may write it."""
        parameters = chain(*(module._parameters.values() for module in alive(self._modules.values())))
        held = gradients_of(chain(alive(self._leaves.values()), (each for each in parameters if each is not None)))

        def new(each: torch.Tensor) -> torch.Tensor:
            return each.detach().clone() if storage_of(each) in held else each.detach()

        return tree_map_only(torch.Tensor, new, out)

    def forget(self) -> None:
        """Drop what was captured: the next calls run Python."""
        with self._lock:
            for form in self._forms.values():
                form.last = form.replayable = None

    def __repr__(self) -> str:
        why = f"; the last reason to run Python: {self.why}" if self.why else ""
        return f"<graphed {self.step!r}: Python ran in {self.runs} calls, not in {self.replays}{why}>"

    def _around(self) -> tuple[Any, ...]:
        """What a step depends on besides its arguments, as far as it is looked at: flags of torch, what modules have and the
        numbers of it (whether they train, say), those and states of optimizers, which gradients there are and are wanted, and
        the hooks of them all."""
        converts = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        saves = [id(getattr(each, "__code__", each)) for each in _saving(False) or ()]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), converts, *saves
        found = alive(self._modules.values())
        had = [chain(each._parameters.values(), each._buffers.values(), each._modules.values()) for each in found]
        modules = tuple((*_numbers_of(module), *_hooks_of(module), *map(id, values)) for module, values in zip(found, had))
        numbers = tuple(map(_options, alive(self._optimizers.values())))
        leaves = alive(self._leaves.values())
        hooks = [(*(leaf._backward_hooks or ()), *(leaf._post_accumulate_grad_hooks or ())) for leaf in leaves]
        wanted = tuple((leaf.grad is None, leaf.requires_grad, hooked) for leaf, hooked in zip(leaves, hooks))
        return flags_of_gpus(), modes, modules, numbers, wanted

    def _form(self, key: Any) -> _Form:
        found = self._forms.get(key)
        if found is None:
            found = self._forms[key] = _Form()
            self._strange += 1
            found.again = self._strange <= _FORMS
            if self._strange == _FORMS:
                self.why = f"{_FORMS} forms in a row were new (shapes and constants of arguments, numbers of an optimizer)"
                _log.warning("a graphed step runs as Python until a form comes again: %s", self.why)
            if len(self._forms) > _FORMS:
                self._forms.popitem(last=False)
        self._forms.move_to_end(key)
        return found

    def _captured(self, form: _Form, tensors: list[torch.Tensor], args: Any, kwargs: Any, checks: bool) -> Any:
        """Run the step, and see whether it did what it did in the call before."""
        before, replayable = form.last, form.replayable
        if replayable is not None:
            replayable.refresh()
            if not replayable.holds():
                self._refused(form, "tensors of the step were replaced since (a gradient, by another step's zero_grad())")
                checks = False  # there is nothing to compare with
        form.last = form.replayable = None
        if form.tries >= _TRIES:  # a capture costs more than Python
            return self._without_graph(self.step(*args, **kwargs))
        capture = Capture(tensors, before)
        with capture:
            out = capture.apart(self.step(*args, **kwargs))
        results = capture.returned(out)
        del out
        grads: Any = self._gradients.values()
        capture.settle({each._handle.name if type(each) is RemoteTensor else each.untyped_storage()._cdata for each in grads})
        self._leaves.update((id(leaf), ref) for ref in capture.leaves if (leaf := ref()) is not None)
        self._modules.update(capture.modules)
        self._optimizers.update(capture.optimizers)
        form.last = capture
        why = capture.why if before is None else difference(before, capture)
        if before is not None and not why:
            try:
                form.replayable = Replayable(capture, self._gradients)
            except NotSupported as error:
                why = error.message
        if why:
            self._refused(form, why)
            if checks and replayable is not None and not capture.grows:  # nobody knows who keeps that
                raise RuntimeError(f"a graphed step does something else than what was captured: {why}")
        return results

    def _refused(self, form: _Form, why: str) -> None:
        self.why = why
        form.tries += 1
        if form.tries == _TRIES:
            form.last = None
            _log.warning("a graphed step runs as Python in every call: %s", why)


Gradients = dict[Any, torch.Tensor]
"""The gradients that graphs write, by their leaf and how they lie: one for all forms of a step."""


def _gradient(leaf: weakref.ref[torch.Tensor]) -> Any:
    tensor = leaf()
    return None if tensor is None else tensor.grad


class _Form:
    """Calls with arguments of one form: the last capture, and what was made of two that were alike."""

    last: Capture | None = None
    replayable: Replayable | None = None
    tries = 0
    again = False
    """Whether its next call is captured: at first sight only as long as forms come again."""


def graphed(step: Callable[..., Any], *, check: int = 0) -> Graphed:
    """``step`` as a graph: after some calls it is not run any more, but what it posted is posted again, as it was.

    It is for steps whose operations do not change. As with CUDA graphs, that Python would do the same again is the caller's
    promise. Every call is a step, the first ones too: they run Python, until two in a row have done the same. Calls with
    arguments of other shapes or constants, in other modes of torch, with modules that train or not, and with other numbers of
    an optimizer are captured by themselves (16 such forms are kept). ``check=n`` runs Python in every n-th call and compares:
    ``RuntimeError`` if it did something else.

    * Results are new tensors, without a graph: a backward belongs into the step.
    * What a call leaves elsewhere than in its results (``p.grad``, a buffer that is replaced) is *overwritten* by the next one.
    * Arguments are tensors that do not require grad, and constants. Lists, counters and prints of the step stay as they are.
    * Random numbers are drawn anew in each call, in the same order.
    * Python runs where the step's tensors were replaced since (``p.grad = None``, an optimizer's ``load_state_dict``,
      ``model.replace``), and while something records (``recording``). ``runs``, ``replays`` and ``why`` of what is returned
      tell how often, and why. A step that asks for a value (``item``, a branch, AdamW without ``fused=True``), or has another
      number in every call, runs as Python always; a warning is logged.

    One call runs at a time. ``NotSupported``: an argument of another class.
    """
    return Graphed(step, check)


def _arguments(leaves: list[Any]) -> tuple[Any, ...]:
    """The form of arguments: how tensors lie, also over each other's memory, which are parameters, by which places are
    chosen, and constants."""
    found: list[Any] = []
    seen: dict[Any, tuple[int, int]] = {}
    for index, each in enumerate(leaves):
        if not isinstance(each, torch.Tensor):
            if type(each) not in _CONSTANTS:
                raise NotSupported(f"a graphed step takes tensors and constants, got {type(each).__name__}")
            found.append((type(each), repr(each)))
            continue
        if each.requires_grad:
            why = "an argument of a graphed step must not require grad"
            raise NotSupported(why, hint="detach() it, or make it in the step")
        if each.layout is not torch.strided:
            raise NotSupported(f"a graphed step takes no tensor of layout {each.layout}", hint="give to_dense() of it")
        remote, each = type(each) is RemoteTensor, cast(Any, each)
        offset = int(each.storage_offset())
        first, begin = seen.setdefault(storage_of(each), (index, offset))
        where = (each._handle.stream, each._meta, each._at == -1) if remote else (str(each.device), geometry(each))
        parameter = each._handle.anchor if remote else is_parameter(each)
        found.append((where, parameter, first, offset - begin if first != index else 0))
    return tuple(found)


_OF_STATES = (torch.Tensor, int, float)
_NUMBERS = frozenset((bool, int, float, str))


def _numbers_of(thing: Any) -> list[Any]:
    """Attributes that are numbers or texts."""
    return [each for each in thing.__dict__.values() if each.__class__ in _NUMBERS]


def _hooks_of(module: Any) -> Iterator[int]:
    """The numbers of its hooks."""
    return chain(module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)


def _options(optimizer: Any) -> tuple[Any, ...]:
    """Its numbers, those of its groups and states, and the tensors that it has."""
    groups = (
        value if isinstance(value, int | float | str | tuple) else tuple(value) if isinstance(value, list) else id(value)
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params"
    )
    found = (each for state in optimizer.state.values() for each in state.values() if isinstance(each, _OF_STATES))
    states = (id(each) if isinstance(each, torch.Tensor) else each for each in found)
    return (
        *_numbers_of(optimizer),
        *optimizer._optimizer_step_pre_hooks,
        *optimizer._optimizer_step_post_hooks,
        *groups,
        *(id(each) for group in optimizer.param_groups for each in group["params"]),
        *states,
    )


# -- programs


class Messages:
    """Messages for one worker. ``inside`` and ``given``: as of ``programs.Program``; ``values`` says what is given. ``freed``:
    numbers of what has crossed, whose places are free behind them."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.inside: list[tuple[int, int]] = []
        self.given: list[tuple[int, int]] = []
        self.values: dict[tuple[Any, ...], int] = {}
        self.freed: list[int] = []
        self.operations = 0

    def put(self, kind: int, words: Sequence[Word]) -> None:
        """A message. A word that is a tuple is found when it is run: ("made", number), or what is given."""
        self.words.append(kind | (len(words) + 1) << 8)
        for word in words:
            if isinstance(word, int):
                self.words.append(word)
                continue
            if word[0] == "made":
                self.inside.append((len(self.words), word[1]))
            else:
                self.given.append((len(self.words), self.values.setdefault(word, len(self.values))))
            self.words.append(0)

    def told(self, name: int) -> list[int]:
        """The message that tells a worker the program."""
        pairs = [number for pair in (*self.inside, *self.given) for number in pair]
        return [ring.PROGRAM, name, len(self.inside), len(self.given), *pairs, *self.words]


class Run(NamedTuple):
    """Programs that are posted together, one a worker, and what crosses in them."""

    programs: list[tuple[Stream, Storage, Messages]]
    crossings: list[Crossed]


class Call:
    """A call that is under way: what is given, and what was made so far."""

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments, self.base = arguments, next(names) << 20
        self.locals: dict[int, torch.Tensor] = {}
        self.brought: dict[int, Storage] = {}
        self.places: dict[int, tuple[Region, int, int]] = {}
        self.shifts: dict[int, int] = {}
        self.freed: set[int] = set()

    def given(self, value: tuple[Any, ...]) -> int:
        kind, which, *ahead = value
        if kind == "argument":
            return self.arguments[which]._handle.name
        if kind == "at":
            return self.arguments[which]._offset + ahead[0]
        if kind == "brought":
            return self.brought[which].name
        if kind == "shift":
            return self.shifts[which]
        region, offset, _ = self.places[which]
        return region.number if kind == "region" else offset

    def places_of(self, numbers: list[int]) -> list[tuple[Region, int, int]]:
        """The places of what crossed, of those numbers, that no program has freed."""
        return [self.places[number] for number in numbers if number in self.places and number not in self.freed]


class Replayable:
    """A step that can be posted again: what is to be done in a call, in order. ``NotSupported``: it cannot."""

    def __init__(self, capture: Capture, gradients: Gradients) -> None:
        self._capture = capture
        self._static = {number: capture.names[number] for number in capture.left}
        """The names of what the step leaves at workers."""
        self._replaced: list[tuple[weakref.ref[Any], Plain]] = []
        """Plain tensors that lie over something new behind a call."""
        self._read: list[tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = []
        """Leaves, and what has to be their gradient before a call: the step reads it, or adds to it."""
        self._place_gradients(gradients)
        self._kept: dict[int, Storage] = {}
        self._states: dict[Stream, tuple[Any, ...]] = {}
        self._ends: dict[Stream, tuple[Any, ...]] = {}
        self._steps: list[Run | Ran | Brought | Fetched] = []
        self._parts: defaultdict[Stream, Messages] = defaultdict(Messages)
        self._crossings: list[Crossed] = []
        self._watch()
        events = _needed(capture)
        self._homes = _homes(events)
        self._brought = {event.made for event in events if isinstance(event, Brought)}
        ends = self._last_uses(events)
        self._free([("left", number) for number in self._static if ("left", number) not in ends])
        dying = defaultdict(list)
        for key, index in ends.items():
            dying[index].append(key)
        for index, event in enumerate(events):
            self._put(event)
            self._free(dying[index])
            if any(len(part.words) > _WORDS for part in self._parts.values()):
                self._flush()
        for number, name in self._static.items():
            self._parts[self._homes[number]].put(ring.RENAME, [("made", number), name])
        self._flush()
        if not self._states:
            raise NotSupported("nothing was posted")
        self._results = [self._kept_alive(each) for each in capture.results]
        self._forgotten = {stream: stream.forgotten for stream in self._states}
        self._ends_of_locals()

    def _place_gradients(self, gradients: Gradients) -> None:
        """Choose the tensors that are gradients behind a call."""
        capture = self._capture
        self._placed: defaultdict[int, list[tuple[weakref.ref[torch.Tensor], Any]]] = defaultdict(list)
        self._placed_here: defaultdict[int, list[tuple[weakref.ref[torch.Tensor], Any]]] = defaultdict(list)
        for number, ref in capture.gradients:
            grad: Any = _gradient(ref)
            lies = grad._handle.stream, grad._meta, grad._offset, grad._at, grad._handle.nbytes
            kept: Any = gradients.setdefault((id(ref()), lies), grad)
            if number in self._placed and self._static[number] != kept._handle.name:
                raise NotSupported("gradients lie over each other's memory, and did not in another form of the step")
            self._static[number] = kept._handle.name
            self._placed[number].append((ref, kept))
        for key, ref in capture.gradients_here:
            grad = _gradient(ref)
            kept = gradients.setdefault((id(ref()), geometry(grad)), grad)
            self._placed_here[key].append((ref, kept))
            self._replaced.append((weakref.ref(kept), capture.plain(grad)))
        made = {id(ref()) for _, ref in (*capture.gradients, *capture.gradients_here)}
        self._gradients = [each for placed in (self._placed, self._placed_here) for found in placed.values() for each in found]
        for ref in capture.leaves:
            if id(ref()) not in made:
                grad = _gradient(ref)
                if grad is None:
                    self._gradients.append((ref, grad))
                else:
                    self._reads([(ref, grad)])

    def _reads(self, gradients: Sequence[tuple[weakref.ref[torch.Tensor], torch.Tensor]]) -> None:
        """Note gradients of leaves that the step reads. The program may have let go of them by then."""
        self._read += [(leaf, weakref.ref(grad)) for leaf, grad in gradients]

    def _watch(self) -> None:
        """Note the tensors by which the program could see that it is out of date, and those that it writes or replaces."""
        capture = self._capture
        self._remote: list[tuple[weakref.ref[Any], int]] = []
        self._plain: list[tuple[weakref.ref[Any], int]] = []
        self._written: list[weakref.ref[Any]] = []
        self._left = [capture.storages[name] for number, name in self._static.items() if number not in self._placed]
        found = set(self._placed_here)
        for ref in capture.objects.values():
            tensor = ref()
            if tensor is None or any(tensor is given() for given in capture.given):
                continue
            if type(tensor) is RemoteTensor:
                name = tensor._handle.name
                if capture.made.get(name) in self._placed:
                    continue
                if name in capture.remote_arguments:
                    raise NotSupported("it has a tensor that shares memory with an argument")
                self._remote.append((ref, name))
                written = name in capture.written
            else:
                known = capture.find(tensor)
                if known is None:
                    continue
                local = capture.locals[known]
                if local.argument is not None:
                    raise NotSupported("it has a tensor that shares memory with an argument")
                if local.made and known not in self._placed_here:
                    found.add(known)
                    self._replaced.append((ref, capture.plain(tensor)))
                elif local.made:
                    continue
                else:
                    self._plain.append((ref, local.cdata))
                written = known in capture.written_here
            if written and not tensor.is_inference():
                self._written.append(ref)
        if capture.left_here - found:
            raise NotSupported("it leaves a plain tensor that no program sees")

    def holds(self) -> bool:
        """Whether the tensors of the step are those that were captured."""
        return (
            all(type(tensor := ref()) is RemoteTensor and tensor._handle.name == name for ref, name in self._remote)
            and all((tensor := ref()) is not None and tensor.untyped_storage()._cdata == cdata for ref, cdata in self._plain)
            and all(ref() is not None for ref in self._left)
            and all(ref() is not None for ref, _ in self._gradients)
            and all((grad := _gradient(ref)) is not None and grad is read() for ref, read in self._read)
            and all(ref() is not None for ref, _ in self._replaced)
            and all(stream.closed is None and stream.forgotten == count for stream, count in self._forgotten.items())
        )

    # -- made of a capture

    def _last_uses(self, events: list[Event]) -> dict[tuple[str, int], int]:
        """The index of the event after which nobody needs a tensor at a worker: ("made", number), or ("left", number)."""
        capture, found = self._capture, {}
        for index, event in enumerate(events):
            for number in _numbers_made(event):
                found["made", number] = index
            for ref in _refs(event):  # an argument may be what the call before has left
                if ref.name in capture.made:
                    found["made", capture.made[ref.name]] = index
                elif ref.name in capture.made_before:
                    found["left", capture.made_before[ref.name]] = index
        returned = [capture.made.get(each.ref.name) for each in capture.results if isinstance(each, Result)]
        for kept in (*returned, *capture.left):
            found.pop(("made", kept), None)  # type: ignore[arg-type]
        return found

    def _put(self, event: Event) -> None:
        if isinstance(event, Posted):
            stream, part = event.stream, self._parts[event.stream]
            self._states.setdefault(stream, event.state)
            if self._ends.get(stream, event.state) != event.state:
                kind, *told = state_words(event.state)
                part.put(kind, told)
            self._ends[stream] = event.state
            operands = [word for each in event.operands for word in ([each] if isinstance(each, int) else self._ref(each))]
            part.put(ring.OPERATION, [event.signature, ("made", event.first) if event.first >= 0 else 0, *operands])
            part.operations += 1
        elif isinstance(event, Crossed):
            where: list[Word] = [event.meta.name, ("region", event.made), ("offset", event.made), ("shift", event.made)]
            self._parts[event.source].put(ring.SEND, [*self._ref(event.ref), *where])
            self._parts[event.stream].put(ring.LAND, [("made", event.made), *where])
            self._crossings.append(event)
        else:
            self._flush()
            self._steps.append(self._prepared(event))

    def _ref(self, ref: Ref) -> list[Word]:
        """A tensor at a worker, as words."""
        kind, which, at = self._capture.where(ref)
        if kind == "made":
            return [("brought" if which in self._brought else "made", which), at]
        if kind == "argument":
            return [("argument", which), -1 if at == -1 else ("at", which, at)]
        if kind == "left":
            self._reads(self._placed.get(which, ()))
            if which not in self._static:
                raise NotSupported("it reads what the call before has left, and leaves no such thing")
            return [self._static[which], at]
        if which not in self._kept:
            found = self._capture.storages.get(which)
            if found is None or (storage := found()) is None:
                raise NotSupported("it reads a tensor that is gone")
            self._kept[which] = storage
        return [which, at]

    def _free(self, keys: list[tuple[str, int]]) -> None:
        """Free tensors at their workers: nothing later needs them."""
        freed: defaultdict[Stream, list[Word]] = defaultdict(list)
        for kind, number in keys:
            if kind == "left" and number in self._static:
                freed[self._homes[number]].append(self._static[number])
            elif kind == "made" and number not in self._brought:  # that is freed by its storage here
                freed[self._homes[number]].append(("made", number))
        for stream, words in freed.items():
            part = self._parts[stream]
            part.put(ring.FREE, words)
            part.freed += [word[1] for word in words if isinstance(word, tuple) and word[1] in self._capture.moved]

    def _flush(self) -> None:
        programs = []
        for stream, part in self._parts.items():
            name = next(names) << 20
            try:
                stream.post(part.told(name))
            except ValueError as error:
                raise NotSupported(str(error)) from None
            programs.append((stream, Storage(stream, name, _HELD), part))
        if programs:
            self._steps.append(Run(programs, self._crossings))
        self._parts, self._crossings = defaultdict(Messages), []

    def _prepared(self, event: Ran | Brought | Fetched) -> Any:
        if isinstance(event, Fetched):
            words: Any = self._ref(event.ref)
            return event._replace(ref=words)
        if isinstance(event, Brought):
            return event._replace(source=self._kept_alive(event.source))
        return event._replace(args=self._kept_alive(event.args), kwargs=self._kept_alive(event.kwargs))

    def _kept_alive(self, value: Any) -> Any:
        """A value with tensors in the place of kept ones."""
        if isinstance(value, Plain):
            local = self._capture.locals[value.key]
            self._reads(self._placed_here.get(local.left, ()) if local.left is not None else ())
            return value if local.storage is None else at_bytes(local.storage, value.offset, value.geometry)
        if isinstance(value, Result):
            if self._ref(value.ref)[0] in self._static.values():
                raise NotSupported("it returns what the call before has left")
            if self._capture.made.get(value.ref.name) in self._capture.left:
                raise NotSupported("it returns what it leaves elsewhere, and did not in the call before")
            return value
        if isinstance(value, dict):
            return {name: self._kept_alive(each) for name, each in value.items()}
        return [self._kept_alive(each) for each in value] if isinstance(value, list | tuple) else value

    def _ends_of_locals(self) -> None:
        """Find out behind which step nobody needs a plain storage that the step makes."""
        ends: dict[int, int] = {}
        for index, step in enumerate(self._steps):
            for plain in () if isinstance(step, Run) else plains(tuple(step)):
                ends[plain.key] = index
        for plain in (*plains(self._results), *(plain for _, plain in self._replaced)):
            ends.pop(plain.key, None)
        self._dropped: defaultdict[int, list[int]] = defaultdict(list)
        for key, index in ends.items():
            self._dropped[index].append(key)

    # -- a call

    def replay(self, arguments: list[Any]) -> Any:
        """Do what the step does with other arguments of the same form."""
        call = Call(arguments)
        try:
            return self._replayed(call)
        except BaseException:
            made: defaultdict[Stream, list[int]] = defaultdict(list)
            for number, stream in self._homes.items():
                if number not in self._brought:  # that is freed by its storage here
                    made[stream].append(number)
            for stream, numbers in made.items():
                stream.owe([ring.FREE, *(call.base + number for number in numbers)], call.places_of(numbers))
            raise

    def _replayed(self, call: Call) -> Any:
        for stream, state in self._states.items():
            if stream.state != state:
                stream.tell_state(state)
        plainly = torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext()
        with torch._C._AutoDispatchBelowAutograd(), plainly:
            for index, step in enumerate(self._steps):
                if isinstance(step, Run):
                    self._run(step, call)
                elif isinstance(step, Ran):
                    self._here(step, call)
                elif isinstance(step, Brought):
                    call.brought[step.made] = step.stream.bring(self._filled(step.source, call))[0]
                else:
                    name, at = (word if isinstance(word, int) else self._found(word, call) for word in step.ref)
                    call.locals[step.made.key] = step.stream.fetch(name, at, step.meta, step.made.offset)
                for key in self._dropped.get(index, ()):
                    call.locals.pop(key, None)
            for ref, plain in self._replaced:
                found, left = self._value(plain, call), ref()
                assert left is not None  # ``holds``
                left.set_(found.untyped_storage(), found.storage_offset(), found.shape, found.stride())
            results = tree_unflatten(self._returned(call), self._capture.spec)
        for stream, state in self._ends.items():
            stream.state = state if state == self._states[stream] else ()
        self._wrote(call.arguments)
        return results

    def _run(self, run: Run, call: Call) -> None:
        with crossing if run.crossings else contextlib.nullcontext():
            for event in run.crossings:
                nbytes, call.shifts[event.made] = room(event.meta.geometry, self._address(event, call))
                nbytes += HEAD_BYTES
                with event.stream.lock:
                    call.places[event.made] = (*event.stream.place(event.source, nbytes), nbytes)
                event.source.count_move()
            posts = []
            for stream, program, part in run.programs:
                posts.append((stream, program.name, [call.given(each) for each in part.values], part))
            for at, (stream, name, given, part) in enumerate(posts):
                try:
                    stream.replay(name, call.base, given, call.places_of(part.freed), part.operations)
                except BaseException:
                    for late, name, given, part in posts[at:] if at else ():
                        late.owe([ring.REPLAY, name, call.base, *given], call.places_of(part.freed))
                        call.freed.update(part.freed)
                    raise
                call.freed.update(part.freed)

    def _address(self, event: Crossed, call: Call) -> int:
        """Of the tensor that crosses, modulo 64."""
        index = self._capture.remote_arguments.get(event.ref.name)
        return event.shift if index is None else (event.shift + address_of(call.arguments[index])) % 64

    def _found(self, word: tuple[Any, ...], call: Call) -> int:
        return call.base + word[1] if word[0] == "made" else call.given(word)

    def _here(self, event: Ran, call: Call) -> None:
        args, kwargs = self._filled(event.args, call), self._filled(event.kwargs, call)
        out = run_plain(event.op.func, args, kwargs, event.autocast)
        found = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        for plain, tensor in zip(event.results, found):
            if self._capture.locals[plain.key].made:
                call.locals.setdefault(plain.key, tensor)

    def _filled(self, value: Any, call: Call) -> Any:
        """A value with the tensors of this call, besides those that are kept."""
        if isinstance(value, Plain):
            return self._value(value, call)
        if isinstance(value, list):
            return [self._filled(each, call) for each in value]
        if isinstance(value, dict):
            return {name: self._filled(each, call) for name, each in value.items()}
        return value

    def _value(self, plain: Plain, call: Call) -> torch.Tensor:
        local, offset = self._capture.locals[plain.key], plain.offset
        if local.argument is not None:
            base = call.arguments[local.argument]
            offset += int(base.storage_offset()) * base.dtype.itemsize
        elif local.left is not None:
            base = next(kept for ref, each in self._replaced if each.key == local.left and (kept := ref()) is not None)
        else:
            base = call.locals[plain.key]
        lies = base.shape == plain.geometry.shape and base.stride() == plain.geometry.strides
        if lies and base.dtype is plain.geometry.dtype and base.storage_offset() * base.dtype.itemsize == offset:
            return base
        return at_bytes(base.untyped_storage(), offset, plain.geometry)

    def _returned(self, call: Call) -> list[Any]:
        capture, found = self._capture, list[Any]()
        storages: dict[int, Storage] = {}
        for each in self._results:
            if not isinstance(each, Result):
                each = self._filled(each, call)
                found.append(each.detach() if isinstance(each, torch.Tensor) else each)
                continue
            name, offset, at = each.ref.name, each.offset, each.ref.at
            number = capture.made.get(name)
            if number is None and name in capture.remote_arguments:
                index = capture.remote_arguments[name]
                storage = call.arguments[index]._handle
                offset += call.arguments[index]._offset - capture.offsets[index]
                at = at if at == -1 else offset
            elif number is None:
                storage = self._kept[name]
            elif number in self._brought:
                storage = call.brought[number]
            else:
                storage = storages.get(number)
                if storage is None:
                    storage = Storage(each.stream, call.base + number, each.nbytes, call.places.get(number), each.shift)
                    storages[number] = storage
            found.append(wrapper(storage, each.meta, offset, at))
        return found

    def _wrote(self, arguments: list[Any]) -> None:
        """What was written is another thing for autograd, and for copies of it, from now on."""
        capture = self._capture
        for name in capture.written:
            if name in self._kept:
                self._kept[name].copies = None
            elif name in capture.remote_arguments:
                argument = arguments[capture.remote_arguments[name]]
                argument._handle.copies = None
                if not argument.is_inference():
                    torch.autograd.graph.increment_version(argument)
        for ref in self._left:
            if (storage := ref()) is not None:
                storage.copies = None
        for leaf, grad in self._gradients:
            if type(grad) is RemoteTensor:
                grad._handle.copies = None
            if (tensor := leaf()) is not None and tensor.grad is not grad:
                tensor.grad = grad
        torch.autograd.graph.increment_version(alive(self._written))

    def refresh(self) -> None:
        """Tell the capture where what it has left lies now."""
        for ref, plain in self._replaced:
            if (tensor := ref()) is not None:
                self._capture.lies_over(plain.key, tensor.untyped_storage())


def _refs(event: Event) -> list[Ref]:
    if isinstance(event, Posted):
        return [each for each in event.operands if isinstance(each, Ref)]
    return [event.ref] if isinstance(event, Crossed | Fetched) else []


def _numbers_made(event: Event) -> range:
    if isinstance(event, Posted):
        return range(event.first, event.first + event.results) if event.first >= 0 else range(0)
    return range(event.made, event.made + 1) if isinstance(event, Brought | Crossed) else range(0)


def _homes(events: list[Event]) -> dict[int, Stream]:
    """Where what is made at workers lies, by number."""
    return {number: event.stream for event in events if not isinstance(event, Ran) for number in _numbers_made(event)}


def _needed(capture: Capture) -> list[Event]:
    """The events without those whose result nobody needs. ``NotSupported`` for a copy here that nobody needs but Python."""
    needed = {plain.key for plain in plains(capture.results)} | capture.left_here
    used = {ref.name for event in capture.events for ref in _refs(event)}
    used |= {each.ref.name for each in capture.results if isinstance(each, Result)}
    found: list[Event] = []
    for event in reversed(capture.events):
        if isinstance(event, Brought):
            if capture.names[event.made] not in used:
                continue
            needed.add(event.source.key)
        elif isinstance(event, Fetched):
            if event.made.key not in needed:
                raise NotSupported("it asks for the values of a tensor")
        elif isinstance(event, Ran):
            outside = any(not capture.locals[key].made for key in event.written)
            made = {*event.written, *(plain.key for plain in event.results)}
            if not (event.op.random or outside or made & needed):
                continue
            needed |= {plain.key for plain in plains([event.args, event.kwargs])}
        found.append(event)
    return found[::-1]
