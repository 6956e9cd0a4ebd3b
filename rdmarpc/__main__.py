"""``python -m rdmarpc``: the ``rdmarpc`` command."""

from .cli import main

main()
