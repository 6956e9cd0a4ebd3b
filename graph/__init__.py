"""What moves between workers. Imports ``transport`` only.

``fragments`` has what was posted to workers as a data-flow graph, ``show`` prints and draws what crosses. ``servers`` has
parameter servers, and the workers that train with them; its protocol is in docs/protocols.md.
"""
