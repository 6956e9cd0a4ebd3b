"""Lines and tokens of a program, without comments, docstrings and empty lines."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Size:
    lines: int
    tokens: int


def size_of(source: str) -> Size:
    """A line counts if a token that counts begins, goes on or ends on it. A string is one token."""
    docstrings = _docstrings(source)
    tokens, lines = 0, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in SKIPPED or (token.type == tokenize.STRING and token.start in docstrings):
            continue
        tokens += 1
        lines |= set(range(token.start[0], token.end[0] + 1))
    return Size(len(lines), tokens)


def size_of_file(path: Path) -> Size:
    return size_of(path.read_text(encoding="utf-8"))


def _docstrings(source: str) -> set[tuple[int, int]]:
    """Where they begin: line, column."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            found.add((node.body[0].lineno, node.body[0].col_offset))
    return found
