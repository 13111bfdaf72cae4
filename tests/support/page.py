"""Reads a report as a strict browser would: what is open is closed, in order, and what is there."""

import base64
import io
import re
from html.parser import HTMLParser

from PIL import Image

VOID = {"meta", "img", "br", "hr", "link", "input"}
REFERENCES = ("href", "src", "srcset", "action", "data", "poster", "background")


class Page(HTMLParser):
    """Tables by the heading of their section, texts, pictures and references of a page."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.links, self.references = [], [], [], []
        self.tables: dict[str, list[list[list[str]]]] = {}
        self.pictures, self.captions, self.tags, self.text = [], [], [], ""
        self._texts: list[str] = []
        self.heading = ""
        assert text.startswith("<!DOCTYPE html>")
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"
        assert len(set(self.ids)) == len(self.ids)
        assert set(self.links) <= {f"#{name}" for name in self.ids}
        style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
        assert not re.search(r"url\(|@import|//", style)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        given = dict(attributes)
        assert len(given) == len(attributes), f"an attribute twice: {tag} {attributes}"
        assert not any(name.startswith("on") for name in given)
        self.ids += [given["id"]] if "id" in given else []
        for name in REFERENCES:
            if name in given:
                (self.links if given[name].startswith("#") else self.references).append(given[name])
        if tag == "img":
            head, _, data = given["src"].partition(",")
            assert head == "data:image/png;base64"
            image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
            image.load()
            assert image.format == "PNG"
            assert (given["width"], given["height"]) == tuple(map(str, image.size))
            assert given["alt"]
            self.pictures.append(image)
        if tag == "table":
            self.tables.setdefault(self.heading, []).append([])
        if tag == "tr":
            self.tables[self.heading][-1].append([])
        if tag not in VOID:
            self.open.append(tag)
            self._texts.append("")

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag
        text = self._texts.pop()
        if tag == "h2":
            self.heading = text
        if tag == "figcaption":
            self.captions.append(text)
        if tag in ("th", "td"):
            self.tables[self.heading][-1][-1].append(text.replace("\xa0", " "))
        if self._texts:
            self._texts[-1] += text

    def handle_data(self, data):
        self.text += data
        if self._texts:
            self._texts[-1] += data

    def rows(self, heading: str, number: int = 0) -> dict[str, dict[str, str]]:
        """First cell -> heading of the column -> cell, of a section's table."""
        head, *body = self.tables[heading][number]
        return {line[0]: dict(zip(head, line, strict=False)) for line in body}
