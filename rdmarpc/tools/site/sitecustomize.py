"""Python imports this when it starts, because this folder is on ``PYTHONPATH`` (``tools/hook``)."""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_next() -> None:
    """The ``sitecustomize`` that this one hides."""
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _stand_in() -> None:
    try:
        from rdmarpc.tools import hook
    except ModuleNotFoundError as error:
        if error.name != "rdmarpc":
            raise
        return  # another interpreter, which has its own packages
    hook.register()


if os.environ.get("RDMARPC_STANDING_IN"):
    _stand_in()
_run_next()
