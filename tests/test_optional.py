"""The command for a package that is missing fits the way in which Holdfast was installed."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from holdfast import _optional
from holdfast._optional import install_command, upgrade_command

ROOT = Path(__file__).parents[1]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that makes this an installation with such a direct_url.json (PEP 610), None for an index."""
    monkeypatch.setattr(_optional, "_ROOT", str(tmp_path / "site-packages"))
    kind = type(metadata.distribution("holdfast"))
    usual = kind.read_text

    def install(found: object, *, text: str | None = None) -> None:
        text = text if text is not None or found is None else json.dumps(found)
        monkeypatch.setattr(
            kind, "read_text", lambda self, name: text if name == "direct_url.json" else usual(self, name)
        )

    return install


def test_code_that_runs_from_a_checkout() -> None:
    """As these tests do: the checkout is named by its path, from whatever folder the command is run."""
    assert install_command("s3") == f"pip install -e '{ROOT}[s3]'"
    assert upgrade_command("0.2") == f"holdfast>=0.2 is needed: update the checkout {ROOT} (git pull)"


def test_a_checkout_that_was_installed(installed, tmp_path: Path) -> None:
    """`pip install .`: again from there, while it is there; afterwards the packages of the extra, by their names."""
    checkout = tmp_path / "my checkout"
    checkout.mkdir()
    (checkout / "pyproject.toml").write_text('[project]\nname = "holdfast"\n')
    installed({"url": checkout.as_uri(), "dir_info": {}})
    assert install_command("pandas") == f"pip install '{checkout}[pandas]'"
    assert f"pip install '{checkout}'" in upgrade_command()
    (checkout / "pyproject.toml").unlink()
    assert install_command("pandas") == "pip install 'pandas>=1.5'"
    assert install_command("megatron") == "pip install 'megatron-core>=0.12' psutil"
    assert upgrade_command("2.0") == "holdfast>=2.0 is needed: install it from where this Holdfast came from"


def test_an_archive_a_repository_and_an_index(installed, tmp_path: Path) -> None:
    """An address is named again, without the password in it and at the same commit; an index knows the name."""
    wheel = tmp_path / "holdfast-0.1.0-py3-none-any.whl"
    wheel.touch()
    installed({"url": wheel.as_uri(), "archive_info": {}})
    assert install_command("s3") == f"pip install 'holdfast[s3] @ {wheel.as_uri()}'"
    installed({"url": "https://me:secret@host/holdfast", "vcs_info": {"vcs": "git", "commit_id": "abc1234"}})
    assert install_command("s3") == "pip install 'holdfast[s3] @ git+https://***@host/holdfast@abc1234'"
    installed(None)
    assert install_command("s3") == "pip install 'holdfast[s3]'"
    assert upgrade_command("0.2") == "pip install --upgrade 'holdfast>=0.2'"


@pytest.mark.parametrize("broken", ["", "[]", "7", '{"url": 3}', "{}", '{"url": "file:///x", "vcs_info": 3}'])
def test_metadata_that_nobody_can_read(broken: str, installed) -> None:
    """A message about a missing package never dies of another error."""
    installed(None, text=broken)
    assert install_command("s3").startswith("pip install ")
    assert "holdfast" in upgrade_command()


def test_the_docs_install_from_a_checkout() -> None:
    """Every `pip install` of an extra in README, docs and examples works in a checkout: '.[extra]', one that exists."""
    project = (ROOT / "pyproject.toml").read_text()
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py")]
    found = {(page.name, name) for page in pages for name in re.findall(r"pip install '([^']*)'", page.read_text())}
    assert len(found) > 10
    for page, name in sorted(found):
        extra = re.fullmatch(r"\.\[([\w-]+)\]", name)
        assert extra is not None, f"{page}: {name}"
        assert f"\n{extra[1]} = [" in project, f"{page}: {name}"
