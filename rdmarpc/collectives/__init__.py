"""The backend ``rdmarpc`` of ``torch.distributed``: a process group whose collectives are exchanges between its ``ranks``.

Sums are made in the order of the ranks. ``queue`` (calls in order, by the caller or by a thread) -> ``calls`` (the operations
as exchanges), ``pairs`` (send and receive) -> ``backend`` (the process group that torch uses)."""
