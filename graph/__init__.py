"""What moves between workers in a training step, decided before the step: capture -> analyze -> place -> execute.

``capture`` traces the forward, ``analyze`` cuts it at worker boundaries, ``place`` gives every crossing tensor its slots;
``caller`` (one process) and ``executor`` (every other) run it. Imports transport only; protocol: docs/protocols.md.
"""
