"""Whether gradients are summed in the order of one process, in a graph that was cut (see ``sums``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from .graph import Shared, TransferGraph, Value
from .readers import Key
from .sums import Reads, Where, apart, carried, exact, fold, in_order


def put_in_order(graph: TransferGraph, reads: Mapping[Key, Reads]) -> None:
    """Say of each value which segments give a gradient of it, and in which order these are added."""
    giving = [segment.number for segment in graph.segments if segment.backward]
    for value in graph.values.values():
        if not value.spec.requires_grad:
            continue
        value.order = [number for number in reversed(value.consumers) if number in giving]
        if value.name in graph.inputs and value.name in reads:
            given = reads[value.name].terms((graph.segments[at].worker, graph.segments[at].level) for at in value.order)
            value.several = sum(len(terms) for at, terms in given.items() if at[0] != graph.caller or value.carried) > 1
        if not value.carried and value.name in reads:
            where = {number: (graph.segments[number].worker, graph.segments[number].level) for number in value.order}
            terms = reads[value.name].terms(where.values())
            last = {number: terms[at][0] if at in terms else 1 << 60 for number, at in where.items()}
            value.order.sort(key=last.__getitem__)


class Order:
    """``reads`` of all values and parameters, ``home`` of all values, ``known``: the parameters that are values, by ``id``;
    ``names``: of each tensor."""

    def __init__(
        self,
        graph: TransferGraph,
        reads: Mapping[Key, Reads],
        home: Mapping[str, Where],
        known: Mapping[int, str],
        names: Collection[Sequence[str]],
    ) -> None:
        self.graph, self.reads, self.home, self.known, self.names = graph, reads, home, known, names
        self.number = {(s.worker, s.level): s.number for s in graph.segments}
        self.backward = {(s.worker, s.level) for s in graph.segments if s.backward}

    def unordered(self, parameters: Mapping[int, str], through: Set[Key]) -> set[Key]:
        """What is summed in another order than in one process. What is ``through`` is carried, and stands in the graph's
        ``reordered`` where that does not help. Also fills ``shared``. ``parameters``: paths by ``id``."""
        found: set[Key] = set()
        attributes = set(self.known.values())
        for name, value in self.graph.values.items():
            if value.order and name in self.reads and name not in attributes and not self._is_exact(value):
                self._note(name, name, through, found)
        self._mixed()
        for key, path in parameters.items():
            if key in self.reads:
                crossing = self.graph.values.get(self.known.get(key, ""))
                if not self._parameter(key, path, crossing):
                    self._note(key if crossing is None else crossing.name, path, through, found)
        return found

    def _mixed(self) -> None:
        """Tensors with several names: what workers give by one of them comes as a sum, and must come first."""
        for name, others in self._others():
            value, home = self.graph.values.get(name), self.home[name][0]
            if value is None or name not in self.reads:
                continue
            given = [r for r in self.reads[name].reads if r.where in self.backward and (value.carried or r.where[0] != home)]
            here = [other for other in others if other in self.reads and self.home[other][0] == home]
            last = max((read.position for other in here for read in self.reads[other].reads), default=-1)
            if sum(read.terms for read in given) > 1 and last > min(read.position for read in given):
                self.graph.reordered.append(name)

    def _others(self) -> Iterator[tuple[str, list[str]]]:
        for names in self.names:
            yield from ((name, [other for other in names if other != name]) for name in (names if len(names) > 1 else ()))

    def _note(self, key: Key, name: str, through: Set[Key], found: set[Key]) -> None:
        found.add(key)
        if key in through:
            self.graph.reordered.append(name)

    def _is_exact(self, value: Value) -> bool:
        terms = self.reads[value.name].terms(self.backward)
        home = self.home[value.name]
        return self._in_order(self._carried(value, terms), terms) if value.carried else exact(terms, home, self.graph.caller)

    def _carried(self, value: Value, terms: dict[Where, list[int]]) -> object:
        where = [(self.graph.segments[at].worker, self.graph.segments[at].level) for at in value.order]
        return carried(terms, [*where, self.home[value.name]])

    @staticmethod
    def _in_order(total: object, terms: dict[Where, list[int]]) -> bool:
        return in_order(total, sum(map(len, terms.values())))

    def _parameter(self, key: int, path: str, value: Value | None) -> bool:
        """``value``: the parameter, where it crosses. Its own worker's segments each add to the sum of those before; that of
        the others comes to the one that it belongs to."""
        terms = self.reads[key].terms(self.backward)
        if not terms:
            return True
        home = max(terms, key=lambda where: -self.number[where]) if value is None else self.home[value.name]
        local = sorted((at for at in terms if at[0] == home[0]), key=self.number.__getitem__, reverse=True)
        if value is None:
            self._share(home[0], path, local)
            return self._in_order(carried(terms, local), terms)
        if value.carried:
            reads = self.reads[value.name].terms(self.backward)
            return self._in_order(self._carried(value, terms), terms) and sum(map(len, reads.values())) == sum(
                map(len, terms.values())
            )
        # Where nobody gives a gradient of what crosses, the segment that it is from has no backward.
        self._share(home[0], path, [*local, home] if value.order and home not in local else local)
        away = {at: found for at, found in terms.items() if at[0] != home[0]}
        before = [term for at in local if at != home for term in terms[at]]
        total = fold([apart(away, home, ""), fold(before), *terms.get(home, [])])
        return self._in_order(total, terms)

    def _share(self, worker: str, path: str, order: list[Where]) -> None:
        if len(order) > 1:
            numbers = sorted((self.number[at] for at in order), reverse=True)
            self.graph.shared.append(Shared(worker, path, numbers))
