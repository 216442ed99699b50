"""`holdfast verify-resume` of scripts without Holdfast: wrong resumes are named, and no right one is called wrong."""

from __future__ import annotations

import pytest
from resume_scripts import HEALTHY, WRONG, forked

from holdfast.verify.report import Report
from holdfast.verify.scripts import verify_script


def verified(tmp_path, text: str, **options) -> Report:
    (tmp_path / "train.py").write_text(text)
    return verify_script(["python", "train.py"], cwd=tmp_path, timeout_s=60, starter=forked, **options)


QUICK = ("does not look for its checkpoint", "optimizer is not saved", "epoch begins again in its middle")


@pytest.mark.parametrize("name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in WRONG])
def test_a_wrong_resume_is_named(tmp_path, name):
    """Verdict and first cause are those of the fault that the script has."""
    text, verdict, kind = WRONG[name]
    report = verified(tmp_path, text)
    said = "\n".join(report.lines())
    assert report.verdict == verdict, said
    assert report.kinds[0] == kind, said
    assert report.causes[0].without, said
    assert report.causes[0].with_holdfast, said
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["train.py"], "it ran in copies"


@pytest.mark.parametrize(
    "name", [one if one == "base" else pytest.param(one, marks=pytest.mark.slow) for one in HEALTHY]
)
def test_a_right_resume_is_exact(tmp_path, name):
    """No false verdict."""
    report = verified(tmp_path, HEALTHY[name])
    assert report.exact, "\n".join(report.lines())
    assert any(life.killed_before is not None for life in report.lives)
