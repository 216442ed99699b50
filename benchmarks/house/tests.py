"""How much of the tests knows the inside of a package that it does not test."""

from __future__ import annotations

import ast
from pathlib import Path

__all__ = ["share_of_insiders"]


def share_of_insiders(tree: Path) -> float:
    """Return the share of tests, in %, in files that import private modules of a package they do not test.

    A folder of ``tests`` tests the package of its name, and none if there is no such package. Public are the package
    itself, the modules and packages at its top, unless their names begin with "_", and what a test finds in a kit: a
    kit is one place to change. A test with parameters counts once.

    Args:
        tree: the checkout.
    """
    package, tests = tree / "src" / "holdfast", tree / "tests"
    counts = [0, 0]
    for file in sorted(tests.rglob("test_*.py")):
        if "node_modules" in file.parts:
            continue
        module = ast.parse(file.read_text(encoding="utf-8"))
        nodes = list(ast.walk(module))
        number = sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in nodes)
        own = file.relative_to(tests).parts[0]
        is_inside = any(_private_package(package, name) not in (None, own) for node in nodes for name in _names(node))
        counts[is_inside] += number
    return round(100 * counts[True] / sum(counts), 1)


def _names(node: ast.AST) -> list[str]:
    """Return what a statement imports, as dotted names; what is no module is one more name at the end."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _private_package(package: Path, name: str) -> str | None:
    """Return the package, or module of the top, whose inside a name stands for; None if it is public, or of others."""
    parts = name.split(".")
    if parts[0] != package.name or len(parts) == 1:
        return None
    if parts[1].startswith("_"):
        return parts[1]
    if len(parts) == 2 or not (package / parts[1]).is_dir():
        return None
    inside = package / parts[1] / parts[2]
    is_module = inside.is_dir() or inside.with_suffix(".py").is_file()
    is_public = len(parts) == 3 and parts[2] in _exported(package / parts[1])  # `resolve` is a function and its module
    return parts[1] if is_module and not is_public else None


def _exported(package: Path) -> list[str]:
    init = package / "__init__.py"
    body = ast.parse(init.read_text(encoding="utf-8")).body if init.is_file() else []
    lists = [node.value for node in body if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)]
    return [one.value for found in lists for one in found.elts if isinstance(one, ast.Constant)]
