"""The ranks of a process group of ``torch.distributed``, and what they exchange.

Each two members have a lane (``transport/exchange``): slots in memory of the one that the other alone may write, both ways. An
*exchange* is spans of memory to each of some ranks, and from each of some ranks, where what arrives is copied to its place or
added up. A call is a number in the group's sequence; number, operation, type and sizes stand in front of every piece, so ranks
that call different things find out with the first piece.

``domain`` (the device of this process, and its channels) -> ``meeting`` (the ranks of a group, and their lanes) -> ``engine``
(one exchange after another, and what ends them), with ``signature`` (what a call is) and ``order`` (who makes it, and behind
what)."""
