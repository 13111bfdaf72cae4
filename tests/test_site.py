"""The hook that makes a site of the documents; `make docs` checks the links of what it makes."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("site_hook", ROOT / "docs/site_hook.py")
site_hook = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site_hook)


def test_documents_at_the_root_are_on_the_site_which_begins_with_the_readme():
    assert {path.name for path in ROOT.glob("*.md")} <= set(site_hook.ELSEWHERE)
    assert site_hook.page_of("README.md") == "index.md"
    assert not (ROOT / "docs/README.md").exists(), "it would be the first page too"


@pytest.mark.parametrize(
    ("text", "link", "page", "found"),
    [
        ("here", "#below", "README.md", "[here](#below)"),
        ("it", "https://pytorch.org", "README.md", "[it](https://pytorch.org)"),
        ("why", "../PROFILING.md#output", "docs/cost.md", "[why](profiling.md#output)"),
        ("pic", "docs/a.png", "README.md", "[pic](a.png)"),
        ("x", "../../README.md", "docs/api/ddp.md", "[x](../index.md)"),
        ("f", "../ddp/base.py", "docs/cost.md", "[f](source/ddp/base.py.md)"),
        ("r", "../results/a-2xh200", "docs/cost.md", "[r](results/a-2xh200/report.html)"),
        ("r", "../results/a-2xh200/b.jsonl", "docs/cost.md", "[r](results/a-2xh200/b.jsonl)"),
        ("docs/glossary.md", "docs/glossary.md", "README.md", "[Glossary](glossary.md)"),
        ("cost", "../docs/cost.md", "notebooks/private_digits.ipynb", "[cost](../cost.md)"),
    ],
)
def test_links_lead_from_page_to_page(text, link, page, found):
    assert site_hook.site_link(text, link, page) == found


def test_links_in_code_stay_and_a_picture_leads_to_itself():
    page = "see [a](x)\n\n```python\na[0](y)\n```\n\n[b](z)"
    parts = list(site_hook.parts_of(page))
    assert "".join(text for text, _ in parts) == page
    assert [text for text, is_code in parts if is_code] == ["```python\na[0](y)\n```"]
    html = '<p><img alt="a" src="a.png" /></p>'
    linked = '<p><a href="a.png"><img alt="a" src="a.png" /></a></p>'
    assert site_hook.link_pictures(html) == linked


def test_the_first_use_of_a_term_of_the_glossary_is_linked():
    html = "<h2>Rank</h2><p>Each <code>rank</code>, all ranks and one rank; frank.</p>"
    linked = site_hook.link_terms(html, "g.html", {"rank": "rank"})
    assert linked == html.replace("all ranks", 'all <a class="term" href="g.html#rank">ranks</a>')
    terms = site_hook.terms()
    assert terms["fsdp"] == "fsdp"
    assert terms["differential privacy"] == "differential-privacy-ε-and-δ"
    assert site_hook.EVERYDAY.isdisjoint(terms)


def test_a_notebook_is_a_page_with_its_outputs():
    pictures = []
    page = site_hook.notebook_page(site_hook.ROOT / "notebooks/private_digits.ipynb", pictures)
    ((name, picture),) = pictures
    assert f"![output]({name})" in page
    assert picture.startswith(b"\x89PNG")
    assert page.startswith("# Private digits")
    assert "```text\n(epsilon, delta) = " in page
