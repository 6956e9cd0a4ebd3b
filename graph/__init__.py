"""What moves between workers. Imports ``transport`` only.

``fragments`` has what was posted to workers as a data-flow graph, ``show`` prints and draws what crosses.
"""
