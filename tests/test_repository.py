"""Checks the files that the hosting reads: the workflow, and the forms for reports."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((GITHUB / "workflows/check.yml").read_text())
FORMS = [p for p in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if p.name != "config.yml"]


def commands(job: str) -> str:
    return "\n".join(step.get("run", "") for step in WORKFLOW["jobs"][job]["steps"])


def test_the_workflow_lints_builds_and_tests_on_three_versions():
    assert set(WORKFLOW["jobs"]) == {"lint", "test", "wheel"}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake ([\w-]+)", commands("lint"))) <= set(targets)
    extras = re.search(r"-e '\.\[([\w,]+)\]'", commands("test"))[1].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    assert "-m build" in commands("wheel")
    cells = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert {cell["torch"] for cell in cells} == {"2.11.0", "2.13.0", "2.15.0"}
    assert len({cell["python"] for cell in cells}) == 3
    known = SpecifierSet(PROJECT["requires-python"])
    assert all(f"{cell['python']}.0" in known for cell in cells)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_of_a_report_can_be_shown(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_a_report_asks_for_what_is_needed_and_a_hole_has_a_private_way():
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE/wrong.yml").read_text())
    text = {field.get("id"): field["attributes"].get("description", "") for field in form["body"]}
    assert set(text) >= {"program", "versions", "verifier"}
    assert "torch.utils.collect_env" in text["versions"]
    assert "experiments.verify_correctness" in text["verifier"]
    assert "engine.check" in text["verifier"]
    (link,) = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE/config.yml").read_text())["contact_links"]
    assert link["url"].endswith("/security/advisories/new")
    assert "Report a vulnerability" in (ROOT / "SECURITY.md").read_text()
