"""The thread that runs one model's parts at one worker. What lands in its slots drives it.

Invariants:
1. Only this thread runs the parts, applies commands, and touches the worker's edges. Others reach it through ``submit``.
2. Commands are applied in the order of their numbers. A task or job that says ``commands=k`` starts when k are applied.
3. A forward whose part failed, or that the caller discarded, is dropped: what still arrives for it is freed on arrival.
4. ``tasks.Agenda`` picks the next task. The executor takes in everything that has landed before it asks.
5. The thread ends when the model is closed, or when a peer that it shares an edge with is lost; every wait looks for that. Only
   the caller has time limits, because only it knows what it waits for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from ...transport import ArenaFull, PeerLost, RdmaError, bare
from ...transport.gpu.driver import driver
from ..edges.slot import Inlet, Slot, shared, take
from ..edges.station import Arrived, Station
from ..outlets.outlet import Outlet
from ..plan.place import ACTIVATION, COMMAND, GRADIENT, REPORT_BYTES, Edge, report_bytes
from ..plan.program import Machine
from ..wire.header import NONE, Header, MicroBatch
from .command import DISCARD, NOTHING, ZERO, Command, WorkerError, unpadded
from .flow import Flow
from .run import Run
from .tasks import SECOND, Agenda, Batch, Task

T = TypeVar("T")
_REMEMBERED = 4096


class Executor(threading.Thread):
    """``set_mode(number)`` puts the parts under the flags of a mode; ``apply(command)`` carries out optimizer commands.
    ``gpu``: the accelerator that is current while parts run."""

    def __init__(
        self,
        station: Station,
        machine: Machine,
        set_mode: Callable[[int], None],
        apply: Callable[[Command], None],
        gpu: torch.device | None = None,
    ) -> None:
        super().__init__(name=f"rdmarpc-executor-{station.name}", daemon=True)
        self.station, self.machine = station, machine
        self.report: Outlet | None = None
        self.commands = 0
        self.error: BaseException | None = None
        self._set_mode, self._apply = set_mode, apply
        self._mode = 0
        self._flows: dict[int, Flow] = {}  # edge number -> its plan
        self._runs: dict[int, Run] = {}
        self._batches: dict[int, Batch] = {}  # sequence of the first micro-batch -> the batch
        self._agenda = Agenda()
        self._jobs: deque[tuple[int, Callable[[], Any], Future[Any]]] = deque()
        self._commands: dict[int, tuple[Command, int]] = {}
        self._dropped: OrderedDict[int, None] = OrderedDict()
        self._backwards: OrderedDict[int, None] = OrderedDict()
        self._closing, self._gpu = False, gpu
        self._present = bytes(len(machine.parameters))

    # -- from other threads

    def add(self, flow: Flow) -> None:
        for number in (*flow.fittings.inlets, *flow.fittings.outlets):
            self._flows[number] = flow

    def remove(self, flow: Flow) -> None:
        for number in (*flow.fittings.inlets, *flow.fittings.outlets):
            self._flows.pop(number, None)

    def submit(self, job: Callable[[], T], commands: int = 0) -> Future[T]:
        """Run it on this thread, once so many commands have been applied."""
        future: Future[T] = Future()
        self._jobs.append((commands, job, future))
        if self.error is not None or not self.is_alive():
            self._cancel_jobs()
        else:
            self.station.poller.kick()
        return future

    def finish(self, timeout: float = 5.0) -> bool:
        """End the thread and free everything; whether it has ended. Idempotent."""
        self._closing = True
        if self.is_alive() and threading.current_thread() is not self:
            self.station.poller.kick()
            self.join(timeout)
        return not self.is_alive()

    def arrived(self, edge: Edge) -> Arrived:
        """Who takes what lands in this edge."""
        return {ACTIVATION: self._activation, GRADIENT: self._gradient, COMMAND: self._command}[edge.kind]

    # -- the thread

    def run(self) -> None:
        # A new thread has OpenMP's own idea of how many threads there are until it first asks torch; results depend on it.
        torch.get_num_threads()
        if self._gpu is not None:
            torch.accelerator.set_device_index(self._gpu)
            driver().relax()
        try:
            self._serve()
            self.error = RdmaError("the model was closed")
        except BaseException as error:
            self.error = error
            self._send_error(0, error, fatal=True)
            bare(error)  # its frames hold runs, and these graphs, which Python's collector cannot see through
        finally:
            for run in self._runs.values():
                run.drop()
            self._runs.clear()
            self._agenda.clear()
            self._cancel_jobs()
            self.station.close()

    def _serve(self) -> None:
        try:
            while not self._closing:
                if self._work():
                    self.station.look()
                else:
                    self.station.poll(1.0)
        except PeerLost as error:
            self.station.blame(error)
            raise

    def _work(self) -> bool:
        """Do one thing, if there is one to do."""
        if self._commands and self._apply_next_command():
            return True
        if self._jobs and self._run_next_job():
            return True
        task = self._agenda.next(self.commands)
        if task is None:
            return False
        self._start(task)
        return True

    def _apply_next_command(self) -> bool:
        found = self._commands.pop(self.commands + 1, None)
        if found is None:
            return False
        command, backward = found
        if backward and backward not in self._backwards:
            raise RdmaError(f"command {self.commands + 1} belongs after backward {backward}, which has not finished here")
        self.commands += 1
        if command.kind == DISCARD:
            self._drop(command.argument)
        else:
            try:
                self._apply(command)
            except Exception as error:
                self._send_error(0, error)
        return True

    def _run_next_job(self) -> bool:
        for at, (commands, job, future) in enumerate(self._jobs):
            if commands <= self.commands:
                del self._jobs[at]
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(job())
                    except BaseException as error:
                        future.set_exception(error)
                return True
        return False

    def use_mode(self, number: int) -> None:
        """Put the parts under these flags. On this thread."""
        if number != self._mode:
            self._set_mode(number)
            self._mode = number

    def _start(self, task: Task) -> None:
        run = task.run
        assert isinstance(run, Run)
        try:
            self.use_mode(run.mode)
            if task.backward and run.zero_due:
                run.zero_due = False
                self._apply(Command(ZERO))
            task.start()
        except PeerLost:
            raise
        except Exception as error:
            self._fail(run.sequence, error, str(task))
            return
        if run.batch is not None:
            run.batch.ran(task)
        if run.finished:
            self._finish(run)
        if run.batch is not None and not run.micro.last and run.flow.sink and run.returned and task.half != SECOND:
            # Another micro-batch may begin where backwards end, whatever second halves are left.
            self.tell(Header.done(run.sequence))

    def _finish(self, run: Run) -> None:
        del self._runs[run.sequence]
        run.drop()
        last = run.batch is None or run.micro.last
        if run.batch is not None and last:
            del self._batches[run.batch.first]
        if run.grad and run.flow.backwards:
            self._remember(self._backwards, run.sequence)
            if last:
                self._tell_done(run.sequence)

    # -- what lands

    def _activation(self, inlet: Inlet, slot: Slot, header: Header) -> None:
        if header.sequence in self._dropped:
            slot.close()
            return
        run = self._runs.get(header.sequence)
        if run is None:
            flow = self._flows[inlet.edge.number]
            batch = self._batch(header, flow) if header.place else None
            run = self._runs[header.sequence] = Run(flow, header, self.machine, self._agenda, batch)
        elif run.flow is not self._flows[inlet.edge.number]:
            raise RdmaError(f"forward {header.sequence} comes in two plans", peer=inlet.edge.source)
        try:
            tensor = take(slot, header)
        except ArenaFull as error:
            self._fail(header.sequence, error)
            return
        run.arrived(inlet.edge.value, tensor, header.commands, shared(slot, header))

    def _batch(self, header: Header, flow: Flow) -> Batch:
        micro = MicroBatch.unpack(header.place)
        first = header.sequence - micro.number
        if first not in self._batches:
            rounds = flow.rounds if micro.interleaved else None
            self._batches[first] = Batch(
                first, micro.total, micro.window, len(flow.duties), rounds, micro.split, self.station.counts
            )
        return self._batches[first]

    def _gradient(self, inlet: Inlet, slot: Slot, header: Header) -> None:
        run = self._runs.get(header.sequence)
        if run is None:
            slot.close()
            if header.sequence not in self._dropped:
                raise RdmaError(f"a gradient for forward {header.sequence}, which is not under way", peer=inlet.edge.source)
            return
        try:
            tensor = take(slot, header)
        except ArenaFull as error:
            self._fail(header.sequence, error)
            return
        run.landed_gradient(inlet.edge.value, run.flow.edges[inlet.edge.number], header, tensor)

    def _command(self, inlet: Inlet, slot: Slot, header: Header) -> None:
        payload = b"" if header.flags & NONE else unpadded(slot.payload)
        command = Command(header.kind, header.argument, payload)
        slot.close()
        if header.sequence <= self.commands or header.sequence in self._commands:
            raise RdmaError(f"command {header.sequence} came twice", peer=inlet.edge.source)
        self._commands[header.sequence] = (command, header.backward)

    # -- the ends

    def _fail(self, sequence: int, error: Exception, task: str = "") -> None:
        self._drop(sequence)
        self._send_error(sequence, error, task=task)

    def _drop(self, sequence: int) -> None:
        # The rest of its batch never starts, and is dropped too. So are lower ones: the caller may have seen their end, and
        # discards them no more, where second halves of their backwards are left. One that failed here took its batch along, so
        # it is by the runs that a batch is known.
        self._batches = {first: b for first, b in self._batches.items() if sequence not in b}
        lower = [run.sequence for run in self._runs.values() if run.batch and sequence in run.batch and run.sequence < sequence]
        for number in (*lower, sequence):
            self._remember(self._dropped, number)
            run = self._runs.pop(number, None)
            if run is not None:
                run.drop()
                self._agenda.forget(run)
                for outlet in run.flow.fittings.outlets.values():
                    outlet.forget(number)

    @staticmethod
    def _remember(seen: OrderedDict[int, None], sequence: int) -> None:
        seen[sequence] = None
        if len(seen) > _REMEMBERED:
            seen.popitem(last=False)

    def tell(self, header: Header, payload: torch.Tensor | None = None) -> None:
        """Report to the caller. On this thread."""
        if self.report is not None:
            self.report.send(header, payload)

    def _tell_done(self, sequence: int) -> None:
        """With a byte for each parameter, whether it has a gradient now, if that is news."""
        present = bytes([parameter.grad is not None for parameter in self.machine.parameters])
        if present == self._present:
            self.tell(Header.done(sequence))
            return
        self._present = present
        self.tell(Header.done(sequence), Command(NOTHING, payload=present).padded(report_bytes(len(present))))

    def _send_error(self, sequence: int, error: BaseException, fatal: bool = False, task: str = "") -> None:
        """Forward 0 stands for all, ``fatal`` for all to come."""
        blob = WorkerError.of(error, self.station.name, task).dump(REPORT_BYTES - 8)
        payload = Command(NOTHING, payload=blob).padded(report_bytes(len(self.machine.parameters)))
        try:
            self.tell(Header.error(sequence, fatal), payload)
        except RdmaError:
            pass  # the caller is gone too: nobody is left to be told

    def _cancel_jobs(self) -> None:
        while self._jobs:
            _, _, future = self._jobs.popleft()
            if not future.done():
                # Whoever was lost is what the caller is told, by type and name.
                why = self.error if isinstance(self.error, RdmaError) else RdmaError("")
                future.set_exception(type(why)(f"the executor has ended: {self.error}", peer=why.peer))
