"""Writes the reference page anew: ``python docs/reference.py``. ``tests/test_reference.py`` compares the page with the code.

Names and signatures come from the code: what ``__all__`` of a module names, and ``SHOWN`` of modules without one. Introductions
and sentences stay as they are in the page, where they are edited; a new name gets the first sentence of its docstring. Of a
class that is new on the page all public members are shown; delete the lines of those not for users, and they stay away.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).with_name("api.md")
WIDTH = 118
MODULES = ["rdmarpc"]
for _name in ("autograd", "optim", "nn", "functions", "internal", "profiling", "timeline", "transfers", "transport", "graph"):
    MODULES.append(f"rdmarpc.{_name}")
SHOWN = {
    "rdmarpc.autograd": ["is_available", "context", "backward", "get_gradients"],
    "rdmarpc.functions": ["async_execution"],
    "rdmarpc.internal": ["serialize", "deserialize", "PythonUDF"],
    "rdmarpc.profiling": ["all_threads"],
    "rdmarpc.timeline": ["record"],
}
"""Public names of modules without ``__all__``."""
OPENED = {"rdmarpc": {"WrappedModel": ["wrap"], "ServedModel": ["serve"]}}
"""Classes that nobody imports, each with the function, or the method of what a function returns, that returns it."""
NOT_MADE = ["Expectation", "Poller", "Region", "RemoteTensor", "Work"]
"""Classes whose constructors are not for users."""
CLOSED = ["AutoDevice", "ShmDevice", "TcpDevice"]
"""Classes that do what a base class on the page says."""


# -- what the code says


def shown(module: str) -> dict[str, Any]:
    """The public names of a module and what they stand for: functions, classes, constants, errors."""
    home = importlib.import_module(module)
    found = {name: getattr(home, name) for name in getattr(home, "__all__", SHOWN.get(module, []))}
    for name, (function, *methods) in OPENED.get(module, {}).items():
        found[name] = returned(getattr(home, function))
        for method in methods:
            found[name] = returned(getattr(found[name], method))
    return dict(sorted(found.items(), key=lambda item: (group(item[1]), item[0].lower())))


def group(value: Any) -> int:
    if inspect.isclass(value):
        return 3 if issubclass(value, BaseException) else 1
    return 0 if callable(value) else 2


def returned(function: Any) -> Any:
    """The class that ``function`` is annotated to return."""
    text = inspect.signature(function).return_annotation
    return eval(text, vars(inspect.getmodule(function))) if isinstance(text, str) else text


def signature(function: Any, *, bound: bool = False) -> str:
    """As ``inspect.signature`` has it, on one line, with annotations as they are written. ``bound``: without the first."""
    found = inspect.signature(function)
    texts, star = [], False
    for parameter in list(found.parameters.values())[bound:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            texts.append("*")
        star = star or parameter.kind in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY)
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {default(parameter.default)}"
        texts.append(text)
    has_result = not inspect.isclass(function) and found.return_annotation is not found.empty
    return f"({', '.join(texts)})" + (f" -> {annotation(found.return_annotation)}" if has_result else "")


def annotation(given: Any) -> str:
    given = getattr(given, "__forward_arg__", given)
    if isinstance(given, str):
        return given
    return given.__name__ if isinstance(given, type) else str(given).replace("typing.", "")


def default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, str):
        return json.dumps(value)
    return repr(value) if value is None or isinstance(value, bool | int | float | bytes | tuple) else "..."


def members_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the class defines itself, in the order of the source."""
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function) and function.__qualname__ == f"{cls.__name__}.{name}":
            yield name, member


# -- the page


def kept(page: str) -> tuple[dict[str, str], dict[str, str]]:
    """What people wrote on a page: introductions by module (``""``: of the page), sentences by path of every name on it."""
    introductions: dict[str, str] = {}
    sentences: dict[str, str] = {}
    module = name = member = ""
    code = False
    for line in page.splitlines():
        if line.startswith("```"):
            code = not code
        elif line.startswith("## "):
            module = line[3:]
        elif not code:
            introductions[module] = f"{introductions.get(module, '')}{line}\n"
        elif found := re.match(r"(?:class )?(\w+)", line):
            name, member = found[1], ""
            sentences[f"{module}.{name}"] = ""
        elif found := re.match(r"    (\w+)", line):
            member = "." + found[1]
            sentences[f"{module}.{name}{member}"] = ""
        elif found := re.match(r"(    )?    # (.*)", line):
            path = f"{module}.{name}{member if found[1] else ''}"
            sentences[path] = f"{sentences.get(path, '')} {found[2]}".strip()
    return {module: text.strip() for module, text in introductions.items()}, sentences


def lines_of(path: str, name: str, value: Any, opened: bool) -> Iterator[tuple[str, str, Any, str]]:
    """Path, text, object and indent of each line that one public name has."""
    if not inspect.isclass(value):
        yield path, name + signature(value) if callable(value) else f"{name}: {type(value).__name__}", value, ""
    elif value.__name__ != name:
        yield path, f"{name} = {value.__name__}", value, ""
    elif issubclass(value, BaseException | enum.Enum):
        yield path, f"class {name}({value.__bases__[0].__name__})", value, ""
    else:
        made = not opened and name not in NOT_MADE and not inspect.isabstract(value)
        yield path, f"class {name}{signature(value) if made else ''}", value, ""
        for member, found in members_of(value) if name not in CLOSED else ():
            if isinstance(found, property):
                text = f"{member}: {signature(found.fget).partition(' -> ')[2]}"
            else:
                text = member + signature(getattr(found, "__func__", found), bound=not isinstance(found, staticmethod))
            yield f"{path}.{member}", text, found, "    "


def broken(text: str, indent: str) -> Iterator[str]:
    """Lines of at most ``WIDTH``, broken between parameters only."""
    line, depth, start = indent, 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if (depth == 1 and text[at - 1 : at + 1] == ", ") or at == len(text) - 1:
            word, start = text[start : at + 1], at + 1
            if len(line + word) > WIDTH:
                yield line.rstrip()
                line = indent + " " * 8
            line += word
    yield line


def first_sentence(value: Any) -> str:
    text = " ".join((inspect.getdoc(value) or "").replace("``", "`").split("\n\n")[0].split())
    found = re.match(r".*?[.](?=\s|$)", text)
    return found[0] if found else text


def page(before: str) -> str:
    """The page as it should be, with what people wrote in the one that was before."""
    introductions, sentences = kept(before)
    lines = [introductions.get("", "# Reference"), ""]
    for module in MODULES:
        lines += [f"## {module}", "", introductions.get(module, ""), ""]
        names = shown(module)
        if not names:
            continue
        lines.append("```python")
        private = [name for name in names if name.startswith("_")]
        modules = [name for name, value in names.items() if isinstance(value, ModuleType)]
        for name in [name for name in names if name not in private + modules]:
            opened = name in OPENED.get(module, {})
            known = f"{module}.{name}" in sentences
            for path, text, value, indent in lines_of(f"{module}.{name}", name, names[name], opened):
                if known and path not in sentences:
                    continue
                lines += broken(text, indent)
                mark = indent + "    # "
                sentence = sentences.get(path) or first_sentence(value)
                lines += textwrap.wrap(sentence, WIDTH, initial_indent=mark, subsequent_indent=mark)
        for what, those in (("Modules", modules), ("As in torch, for programs that use them", private)):
            if those:
                lines += textwrap.wrap(f"# {what}: {', '.join(those)}", WIDTH, subsequent_indent="# ")
        lines += ["```", ""]
    return "\n".join(lines[:-1]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
