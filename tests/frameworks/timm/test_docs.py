"""What the page of model directories says of timm's own loader runs."""

from __future__ import annotations

from docs_kit import page_test

test_python_blocks_run = page_test("timm", timeout_s=280)
