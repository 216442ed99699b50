"""What can be counted without running anything: lines, modules, headers, importers, functions."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Rooms"]

_SMALL = 200  # lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    name: str
    is_package: bool
    lines: int
    tree: ast.Module
    text: list[str]


class Rooms:
    """The modules of a package on the disk.

    Args:
        root: folder of the package.
    """

    def __init__(self, root: Path) -> None:
        self._modules: dict[str, _Module] = {}
        for file in sorted(root.rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            parts = [root.name, *file.relative_to(root).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            lines = text.splitlines()
            module = _Module(name=name, is_package=is_package, lines=len(lines), tree=ast.parse(text), text=lines)
            self._modules[name] = module

    def figures(self) -> dict[str, float]:
        """Return the figures by name."""
        modules = self._modules.values()
        lines = sum(module.lines for module in modules)
        functions = [node for module in modules for node in ast.walk(module.tree) if isinstance(node, _FUNCTION)]
        importers = self._importers()
        lonely = [name for name, module in self._modules.items() if importers[name] == 1 and module.lines < _SMALL]
        docstrings, comments, blank = (sum(map(count, modules)) for count in (_docstrings, _comments, _blank))
        return {
            "lines of src": lines,
            "  code": lines - docstrings - comments - blank,
            "  docstrings": docstrings,
            "  comments": comments,
            "modules": len(self._modules),
            "headers, % of lines": round(100 * sum(map(_header, modules)) / lines, 1),
            "modules with one importer": sum(importers[name] == 1 for name in self._modules),
            "modules under 200 lines with one importer": len(lonely),
            "functions": len(functions),
            "  mean lines": round(sum(_size(one) for one in functions) / len(functions), 1),
            "  of one statement": sum(len(_body(one)) == 1 for one in functions),
        }

    def packages(self) -> dict[str, tuple[int, int]]:
        """Return lines and modules of each package, the modules of the top as one."""
        found: dict[str, tuple[int, int]] = {}
        for module in self._modules.values():
            parts = module.name.split(".")[1:]
            package = parts[0] if len(parts) > 1 or (module.is_package and parts) else "(top)"
            lines, count = found.get(package, (0, 0))
            found[package] = lines + module.lines, count + 1
        return dict(sorted(found.items()))

    def _importers(self) -> Counter[str]:
        """Count by how many other modules each one is imported, late imports and those for types included."""
        counts: Counter[str] = Counter()
        for module in self._modules.values():
            wanted = {target for node in ast.walk(module.tree) for target in self._targets(module, node)}
            counts.update(wanted - {module.name})
        return counts

    def _targets(self, module: _Module, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names if alias.name in self._modules]
        if not isinstance(node, ast.ImportFrom):
            return []
        base = node.module or ""
        if node.level:
            parts = module.name.split(".")
            above = parts[: len(parts) - node.level + module.is_package]
            base = ".".join([*above, *filter(None, [base])])
        below = [f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in self._modules]
        return below or ([base] if base in self._modules else [])


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTION)


def _docstring(node: ast.AST) -> ast.stmt | None:
    body = getattr(node, "body", None)
    first = body[0] if body else None
    text = getattr(getattr(first, "value", None), "value", None)
    return first if isinstance(first, ast.Expr) and isinstance(text, str) else None


def _docstrings(module: _Module) -> int:
    found = (_docstring(node) for node in ast.walk(module.tree) if isinstance(node, _DOCUMENTED))
    return sum(_size(one) for one in found if one is not None)


def _comments(module: _Module) -> int:
    return sum(line.lstrip().startswith("#") for line in module.text)


def _blank(module: _Module) -> int:
    return sum(not line.strip() for line in module.text)


def _header(module: _Module) -> int:
    """Count the lines of a module before its first statement that is no docstring, import or ``__all__``."""
    for node in module.tree.body:
        is_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        is_names = isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "__all__" for one in node.targets)
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (is_types or is_names or is_text or isinstance(node, (ast.Import, ast.ImportFrom))):
            decorators = getattr(node, "decorator_list", [])
            return min([node.lineno, *(one.lineno for one in decorators)]) - 1
    return module.lines


def _size(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    return node.body[1:] if _docstring(node) is not None else node.body
