"""A campaign against the package: faults in running groups, frames that were tampered with, strangers at every socket.

``python -m tests.campaign`` from the repository root; ``docs/trust.md`` says what is looked for and what was found. ``trial``
draws what happens, ``worker`` and the workloads are the processes it happens to, ``supervisor`` starts and watches them,
``verdict`` judges what they wrote down; ``mutate`` and ``strangers`` are the other two kinds of attack.
"""
