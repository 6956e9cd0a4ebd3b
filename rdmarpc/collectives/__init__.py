"""The backend ``rdmarpc`` of ``torch.distributed``: a process group whose collectives are exchanges between its ranks.

Sums are made in the order of the ranks. ``meeting`` (the device of this process, the ranks of a group, and their lanes) ->
``engine`` (one exchange after another), with ``signature`` (what a call is) -> ``queue`` (calls in order: who makes one, and
behind what; by the caller or by a thread) -> ``calls`` (the operations as exchanges), ``pairs`` (send and receive) ->
``backend`` (the process group that torch uses)."""
