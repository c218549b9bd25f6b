# SPDX-License-Identifier: Apache-2.0
"""Reads a page of a report, and refuses one that a browser would have to mend."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "br", "link", "img", "input", "hr"}


@dataclass
class Page(HTMLParser):
    """Texts of a page by what they are in."""

    cells: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    refs: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    """Open ones."""
    seen: set[str] = field(default_factory=set)

    def __post_init__(self):
        super().__init__()
        self._into = {
            "td": self.cells,
            "th": self.cells,
            "p": self.notes,
            "h2": self.titles,
            "script": self.scripts,
        }

    def handle_starttag(self, tag, attrs):
        self._attributes(tag, attrs)
        if tag not in _VOID:
            self.tags.append(tag)
            if tag in self._into:
                self._into[tag].append("")

    def handle_startendtag(self, tag, attrs):
        assert "svg" in self.tags, f"<{tag}/> closes nothing outside a picture"
        self._attributes(tag, attrs)

    def handle_endtag(self, tag):
        assert self.tags, f"</{tag}> closes nothing"
        assert self.tags.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        for tag, into in self._into.items():
            if tag in self.tags:
                into[-1] += data

    def _attributes(self, tag, attrs):
        self.seen.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} runs {name}"
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "srcset", "data", "action"):
                self.refs.append(value)


def read(text: str) -> Page:
    """A page that is balanced and loads nothing."""
    page = Page()
    page.feed(text)
    page.close()
    assert not page.tags, f"left open: {page.tags}"
    assert len(set(page.ids)) == len(page.ids)
    assert all(ref.startswith("#") and ref[1:] in page.ids for ref in page.refs)
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    return page
