"""``python -m rdmarpc``: the ``rdmarpc`` command."""

from .cli import main

if __name__ == "__main__":
    main()
