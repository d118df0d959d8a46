"""Test node ids, `file.py::name`, looked up in the source without importing it."""

import ast
import functools
from pathlib import Path

TESTS = Path(__file__).parent


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """Functions and classes at the top of a test file; none where there is no such file."""
    path = TESTS / file
    if not path.is_file():
        return frozenset()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return frozenset(node.name for node in body if isinstance(node, kinds))


def exists(node_id: str) -> bool:
    """Whether the file has that test (or state machine)."""
    file, _, name = node_id.partition("::")
    return name in names_in(file)
