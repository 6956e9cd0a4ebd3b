"""Programs that import ``torch.distributed.rpc`` find this package there: in this process and in those that it starts."""
