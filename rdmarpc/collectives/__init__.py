"""The backend ``rdmarpc`` of ``torch.distributed``: a process group whose collectives are streams of one-sided writes.

Each two members of a group have a lane (``transport/exchange``): slots in memory of the one that the other alone may write,
both ways. Every collective is one or more *exchanges*: spans of memory to each of some ranks, and from each of some ranks,
where what arrives is copied to its place or added up. A call is a number in the group's sequence; number, operation, type and
sizes stand in front of every piece, so ranks that call different things find out with the first piece. Sums are made in the
order of the ranks.

``domain`` (the device of this process, and its channels) -> ``meeting`` (the members of a group, and their lanes) -> ``engine``
(one exchange after another, and what ends them) -> ``queue`` (calls in order, by the caller or by a thread) -> ``calls`` (the
operations as exchanges), ``pairs`` (send and receive) -> ``backend`` (the process group that torch uses)."""
