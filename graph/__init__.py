"""The plan of a training step: it decides, before the step, what moves between workers. Imports
``transport`` only; its protocol is in docs/protocols.md.

The rooms follow the life of a plan: ``trace`` captures the forward as operations, ``plan`` cuts it at worker boundaries and
gives every crossing tensor (an edge) its slots, ``edges`` writes tensors into these slots. ``work`` runs the parts at their
workers, ``caller`` the process that called ``wrap``, ``servers`` parameter servers. ``wire`` has the bytes in a slot, ``show``
prints and draws a plan.
"""
