"""The shapes of PyTorch's own RPC benchmarks, as programs for either library: the module ``rpc`` is the only difference.

``parameters``  trainers, parameter servers, DDP whose buckets go to the servers, an embedding table with sparse gradients
``observers``   one agent, observers that ask it for actions, one by one or in batches
``worker``      a process of such a program
``runs``        all turns, the comparison of their results, the table and the picture
"""
