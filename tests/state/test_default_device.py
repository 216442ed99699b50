"""A script that calls ``torch.set_default_device("cuda")`` changes nothing of what Holdfast makes for itself."""

from __future__ import annotations

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

import holdfast

SOURCE = Path(holdfast.__file__).parent


def test_each_tensor_that_is_made_says_where() -> None:
    """Whoever leaves it out would be given the device of the script."""
    makers = {maker.__name__ for maker in _device_constructors()}
    assert {"empty", "zeros", "tensor", "randperm"} <= makers
    without = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers):
                continue
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and not {"device", None} & {keyword.arg for keyword in node.keywords}:
                without.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}")
    assert without == []
