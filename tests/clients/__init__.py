"""Programs and libraries that import torch's RPC themselves, run as they are: once plainly, once by ``python -m rdmarpc run``.

``programs/``    one program a file, ``python PROGRAM RESULTS``: it starts its own workers and leaves tensors in RESULTS
``several``      some of them, one after the other in one tree of processes: the form of the test-suite
``both``         runs one, or several, in both ways and compares what they left, bit for bit
``client_tour``  all of them, as a table (``make clients``)
"""
