"""Builds the site from the repository's documents: a hook of MkDocs (`make docs`).

The site begins with the README. It has the pages of docs/, the documents beside it (`ELSEWHERE`),
the notebooks, and a page for each source file that one of them names. Links between them are
rewritten, since a page of the site may lie elsewhere than its file. The first use of each term of
the glossary on a page links to it.
"""

import base64
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "PROFILING.md": "profiling.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "ddp_by_hand/exercises/README.md": "exercises.md",
    "ddp_by_hand/examples/README.md": "examples.md",
}
SOURCE = "source/"
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
FILE_NAME = re.compile(r"[\w/]+(?:\.md|/)")
PATH = re.compile(r"(?:[\w-]+/)+\w+\.py\b")
RESULT = re.compile(r"results/[\w/-]+\.jsonl?\b")
REPORTS = "results/*/report.html"
PICTURE = re.compile(r'<img [^>]*src="([^"]+)"[^>]*>')
TAG = re.compile(r"(<[^>]*>)")
# Everyday words, which mean what they say in most sentences.
EVERYDAY = {"sample", "waiting", "floor", "exact", "contention", "overhead"}


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Adds the documents outside of docs/, source files and results that are named, and reports."""
    from mkdocs.structure.files import File

    for name, uri in ELSEWHERE.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text()))
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        uri, pictures = page_of(f"notebooks/{path.name}"), []
        files.append(File.generated(config, uri, content=notebook_page(path, pictures)))
        for name, picture in pictures:
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    texts = [file.content_string for file in files.documentation_pages()]
    for path in sorted({path for text in texts for path in PATH.findall(text)}):
        if (ROOT / path).is_file():
            files.append(File.generated(config, page_of(path), content=source_page(path)))
    named = {path for text in texts for path in RESULT.findall(text) if (ROOT / path).is_file()}
    for path in sorted({str(p.relative_to(ROOT)) for p in ROOT.glob(REPORTS)} | named):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: "Page", **_: Any) -> str:
    """Rewrites links between files of the repository into links between pages of the site."""
    uri = page.file.src_uri
    if uri.startswith(SOURCE):
        return markdown
    name = next((n for n, u in ELSEWHERE.items() if u == uri), f"docs/{uri}")
    if uri.startswith("notebooks/"):
        name = uri.removesuffix("md") + "ipynb"
    return "".join(
        part if is_code else LINK.sub(lambda link: site_link(link[1], link[2], name), part)
        for part, is_code in parts_of(markdown)
    )


def on_page_content(html: str, page: "Page", files: "Files", **_: Any) -> str:
    """Links names of source files, pictures, and the first use of each term of the glossary."""
    from mkdocs.utils import get_relative_url

    uri = page.file.src_uri
    if uri.startswith(SOURCE):
        return html

    def source_link(code: re.Match) -> str:
        target = files.get_file_from_path(page_of(code[1]))
        url = target and get_relative_url(target.url, page.url)
        return f'<a class="term" href="{url}">{code[0]}</a>' if url else code[0]

    html = re.sub(rf"<code>({PATH.pattern})(?:::\w+)?</code>(?!</a>)", source_link, html)
    html = link_pictures(html)
    if uri == "glossary.md" or uri.startswith("api/"):
        return html
    return link_terms(html, get_relative_url("glossary.html", page.url), terms())


def link_pictures(html: str) -> str:
    """Makes each picture a link to itself: a phone shows it too small to read."""
    return PICTURE.sub(r'<a href="\1">\g<0></a>', html)


def parts_of(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yields the text in order, each part with whether it is a fenced block of code."""
    end = 0
    for fence in FENCE.finditer(markdown):
        yield markdown[end : fence.start()], False
        yield fence[0], True
        end = fence.end()
    yield markdown[end:], False


def site_link(text: str, link: str, name: str) -> str:
    """A link of the document `name` as the site needs it.

    Where the text is the name of a document, its title takes the name's place.
    """
    path, hash_sign, anchor = link.partition("#")
    if not path or ":" in path:
        return f"[{text}]({link})"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
    if target.endswith(".md") and FILE_NAME.fullmatch(text):
        text = (ROOT / target).read_text().partition("\n")[0].removeprefix("# ")
    folder = posixpath.dirname(page_of(name)) or "."
    return f"[{text}]({posixpath.relpath(page_of(target), folder)}{hash_sign}{anchor})"


def page_of(path: str) -> str:
    """The page or picture of the site that shows a file of the repository."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path.startswith("results/"):
        return path if RESULT.fullmatch(path) else f"{path}/report.html"
    if path.endswith(".ipynb"):
        return path.removesuffix("ipynb") + "md"
    return f"{SOURCE}{path}.md" if path.endswith(".py") else path.removeprefix("docs/")


def source_page(path: str) -> str:
    """A source file as a page, which the search leaves out."""
    code = (ROOT / path).read_text()
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n`````python\n{code}`````\n"


def notebook_page(path: Path, pictures: list[tuple[str, bytes]]) -> str:
    """A notebook with its outputs as a page; appends the pictures, by name."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                name = f"{path.stem}_{len(pictures)}.png"
                pictures.append((name, base64.b64decode(output["data"]["image/png"])))
                parts.append(f"![output]({name})")
            else:
                text = output.get("text") or output["data"]["text/plain"]
                parts.append(f"```text\n{''.join(text)}\n```")
    return "\n\n".join(parts) + "\n"


def slug(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def terms() -> dict[str, str]:
    """Each term of the glossary, in small letters, with the anchor of its section."""
    headings = re.findall(r"^### (.+)$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    every = {
        term.strip().lower(): slug(heading)
        for heading in headings
        for term in re.split(r", | and ", re.sub(r"[`\[\]%\d]", "", heading))
    }
    return {t: anchor for t, anchor in every.items() if len(t) > 2 and t not in EVERYDAY}


def link_terms(html: str, glossary: str, anchors: dict[str, str]) -> str:
    """Links the first use of each term in prose: not in headings, code or other links."""
    left = dict(anchors)
    longest_first = "|".join(sorted(map(re.escape, left), key=len, reverse=True))
    term = re.compile(rf"(?<![\w-])({longest_first})(s?)(?![\w-])", re.IGNORECASE)

    def link(use: re.Match) -> str:
        anchor = left.pop(use[1].lower(), None)
        return f'<a class="term" href="{glossary}#{anchor}">{use[0]}</a>' if anchor else use[0]

    pieces, depth = [], 0
    for piece in TAG.split(html):
        if tag := re.match(r"<(/?)(?:a|code|pre|h\d|th)\b", piece):
            depth += -1 if tag[1] else 1
        pieces.append(piece if depth or piece.startswith("<") else term.sub(link, piece))
    return "".join(pieces)
