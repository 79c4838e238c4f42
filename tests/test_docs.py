"""Every Python block of README and docs runs, in order, one namespace a page; rule ids are those of the verifier."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import types

import pytest

import ortgraph.manager  # noqa: F401 - registers further rules
from ortgraph.graph import verify

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")  # why a module: torch.compile imports the one that a function says it is of
    monkeypatch.setitem(sys.modules, "page", module)
    namespace = vars(module)
    for number, block in enumerate(BLOCK.findall(page.read_text())):
        exec(compile(block, f"{page.name}, block {number + 1}", "exec"), namespace)


def test_invariants_page_lists_every_rule():
    page = (ROOT / "docs" / "invariants.md").read_text()
    listed = set(re.findall(r"^\| ([\w-]+) \| (?:structure|signature|types|runtime) \|", page, re.MULTILINE))
    assert listed == {rule.id for rule in verify.RULES}
    for rule in verify.RULES:
        assert f"| {rule.id} | {rule.level} |" in page


def test_passes_page_is_what_the_passes_say():
    made = subprocess.run([sys.executable, "-m", "ortgraph", "passes", "--markdown"], capture_output=True, text=True)
    assert (ROOT / "docs" / "passes.md").read_text() == made.stdout, (
        "write it anew: python -m ortgraph passes --markdown > docs/passes.md"
    )


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
