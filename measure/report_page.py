"""One HTML file that needs no other: elements, tables, pictures, and how they look.

Everything is built as a tree and written by the standard library, which escapes all text: what
comes from results cannot become markup. There is no script, and nothing is fetched: pictures are
data URIs, and the page's own policy forbids the rest.
"""

import base64
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from measure.picture import Picture
from measure.table import Column, table_cells

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_TOKEN = "HF_TOKEN"  # of the environment: the one secret that programs here are given
_LIKE_A_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BLOCKS = {"tr", "p", "li", "h1", "h2", "h3", "figure", "section", "thead", "tbody"}

# Okabe and Ito's colour-blind safe palette, as in the pictures; lighter and darker for text
STYLE = """
:root { color-scheme: light dark;
  --paper: #fff; --ink: #222; --faint: #5c5c5c; --line: #d5d5d5; --band: #f3f5f7;
  --accent: #005f96; --bad: #a83f00; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #16181b; --ink: #e4e4e4; --faint: #a5a5a5; --line: #3a3e44; --band: #20242a;
  --accent: #7cc4ec; --bad: #ff9d5c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 120rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .4rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .3rem; }
p, li { max-width: 64rem; overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; }
nav { display: flex; flex-wrap: wrap; gap: .2rem .9rem; }
nav a { color: var(--accent); }
.faint, figcaption, .note { color: var(--faint); }
figcaption, .note { font-size: .9rem; }
.bad { color: var(--bad); font-weight: 600; }
.scroll { overflow-x: auto; margin: .4rem 0; }
.scroll:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .55rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; border-bottom: 2px solid var(--faint); }
tbody tr:nth-child(even) > * { background: var(--band); }
td.number, th.number { text-align: right; white-space: nowrap; }
tbody th { position: sticky; left: 0; background: var(--paper); font-weight: 600; }
table.facts td { overflow-wrap: anywhere; }
table.facts th, td.words { font-weight: normal; }
td.words { min-width: 16rem; }
figure { margin: 1.2rem 0 1.8rem; break-inside: avoid; }
figure img { display: block; width: 100%; max-width: 80rem; height: auto; background: #fff;
  border: 1px solid var(--line); border-radius: 4px; }
figcaption { max-width: 64rem; margin-top: .4rem; }
pre { overflow-x: auto; padding: .6rem .8rem; background: var(--band); font-size: .85rem;
  line-height: 1.4; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--accent); }
@media (max-width: 40rem) { body { padding: .6rem .7rem 2rem; } h1 { font-size: 1.35rem; }
  th, td { padding: .25rem .45rem; }
  .scroll tbody th { max-width: 50vw; overflow-wrap: break-word; } }
@media print {
  :root { color-scheme: light; --paper: #fff; --ink: #000; --faint: #444; --line: #bbb;
    --band: #fff; --accent: #000; --bad: #000; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; } h2, h3 { break-after: avoid; } tr, pre { break-inside: avoid; }
  .scroll { overflow: visible; } table { font-size: 8pt; } th, td { padding: .15rem .35rem; }
  td.number, th.number { white-space: normal; }
  pre { white-space: pre-wrap; font-size: 6.5pt; }
  details::details-content { content-visibility: visible; }
}
"""


def element(tag: str, *content: "ET.Element | str", **attributes: str) -> ET.Element:
    """An element with its children in order; `class_` and the like lose their underscore."""
    made = ET.Element(tag, {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items()})
    last = None
    for child in content:
        if isinstance(child, ET.Element):
            made.append(child)
            last = child
        elif last is None:
            made.text = (made.text or "") + printable(child)
        else:
            last.tail = (last.tail or "") + printable(child)
    return made


def printable(text: object) -> str:
    """Without control characters and terminal colours, and without the token."""
    shown = _UNPRINTABLE.sub("", str(text))
    token = os.environ.get(_TOKEN)
    if token:
        shown = shown.replace(token, "***")
    return _LIKE_A_TOKEN.sub("***", shown)


def page(title: str, subtitle: str, sections: Sequence[tuple[str, Sequence[ET.Element]]]) -> str:
    """The whole file. A section is a heading with what stands below it."""
    names = [re.sub(r"\W+", "-", heading.lower()) for heading, _ in sections]
    links = [
        element("a", heading, href=f"#{name}")
        for name, (heading, _) in zip(names, sections, strict=True)
    ]
    body = [
        element("header", element("h1", title), element("p", subtitle, class_="faint")),
        element("nav", *links, aria_label="Sections"),
        element("main", *(
            element("section", element("h2", heading, id=name), *content)
            for name, (heading, content) in zip(names, sections, strict=True)
        )),
    ]  # fmt: skip
    head = element(
        "head",
        ET.Element("meta", {"charset": "utf-8"}),
        ET.Element("meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY}),
        ET.Element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("title", title),
        element("style", STYLE),
    )
    root = element("html", head, element("body", *body), lang="en")
    for node in root.iter():
        if node.tag in _BLOCKS:
            node.tail = (node.tail or "") + "\n"
    return "<!DOCTYPE html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def table(columns: Sequence[Column], rows: Sequence[dict], label: str) -> ET.Element:
    """Rows as `measure.table` formats them; a failed one says why in place of its numbers.

    What is wider than the screen scrolls by itself, also by keyboard; `label` is for the ear.
    """
    headings, body, right = table_cells(columns, rows)
    kinds = ["number" if is_right else "text" for is_right in right]
    head = [element("th", h, scope="col", class_=k) for h, k in zip(headings, kinds, strict=True)]
    lines = []
    for row, cells in zip(rows, body, strict=True):
        line = [element("th", cells[0], scope="row")]
        line += [element("td", c, class_=k) for c, k in zip(cells[1:], kinds[1:], strict=False)]
        if len(cells) < len(headings):  # the last one runs on to the right
            line[-1].set("colspan", str(len(headings) - len(cells) + 1))
            line[-1].set("class", "bad" if row.get("status") != "unavailable" else "faint")
        lines.append(element("tr", *line))
    made = element("table", element("thead", element("tr", *head)), element("tbody", *lines))
    return element("div", made, class_="scroll", role="region", aria_label=label, tabindex="0")


def facts(rows: Sequence[tuple[str, str]]) -> ET.Element:
    """A table of names and values, which wraps instead of scrolling."""
    lines = [
        element("tr", element("th", name, scope="row"), element("td", value))
        for name, value in rows
    ]
    return element("table", element("tbody", *lines), class_="facts")


def note(text: str) -> ET.Element:
    return element("p", text, class_="note")


def figure(picture: Picture, name: str) -> ET.Element:
    source = "data:image/png;base64," + base64.b64encode(picture.data).decode()
    sentence = picture.description or "This picture does not say what to read off it."
    image = ET.Element("img", {
        "src": source, "width": str(picture.width), "height": str(picture.height),
        "alt": printable(picture.description or name),
    })  # fmt: skip
    return element("figure", image, element("figcaption", element("b", f"{name}. "), sentence))


def details(title: str, text: str) -> ET.Element:
    """Preformatted text behind its title."""
    return element("details", element("summary", title), element("pre", text))
