"""The page and the example of Optuna run."""

from __future__ import annotations

from pathlib import Path

from docs_kit import page_test, pages_of, run_example, run_page

test_python_blocks_run = page_test("optuna")

_AGAIN = """
```python
trial = optuna.trial.FixedTrial({"rate": 0.1})
values = [objective(trial) for life in range(2)]
assert values[0] == values[1] is not None
```
"""


def test_a_trial_killed_behind_its_last_step(tmp_path: Path) -> None:
    """The objective of the page, which finds all its steps made, gives the value that it would have given."""
    (page,) = (page for page in pages_of("optuna") if page.name == "optuna.md")
    again = tmp_path / "again.md"
    again.write_text(page.read_text().replace("<!-- tests: frameworks/optuna -->", "") + _AGAIN)
    run_page(again, tmp_path)


def test_example(tmp_path: Path) -> None:
    """The example is killed in a trial, which goes on, and the search ends with the same values."""
    said = run_example("optuna_resume.py", tmp_path, "--folder", str(tmp_path))
    assert "killed: exit status -9" in said
    assert "trial 4 goes on in epoch 3" in said
    assert "the killed search has found the same values" in said
