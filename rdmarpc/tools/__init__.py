"""Around programs: the state of a worker and timelines (``debug``, ``events``), ``rdmarpc doctor``, and this package under
torch's names, in this process and in those that it starts (``hook``, ``run``)."""
