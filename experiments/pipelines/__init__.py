"""Orders of micro-batches, ours and those of torch.distributed.pipelining (``schedules``)."""
