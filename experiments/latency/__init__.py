"""What a call, a copy or a step of one size takes: the rows of ``bench``; ``shapes_*``, PyTorch's own RPC benchmarks as
programs for either library; ``grid_*``, many calls under way; ``sizes_*``, one tensor a step in five ways; ``gpu_*``, GPU
memory between processes of one host; ``rdma_*``, the ``verbs`` device beside perftest."""
