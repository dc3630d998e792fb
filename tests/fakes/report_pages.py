"""What a page must be, read as a browser reads it: whole, of itself alone, and with all that its report holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "br", "link", "img", "hr"}
LOADS = {"src", "href", "data", "action", "poster", "srcset", "background", "formaction"}


class Page(HTMLParser):
    """Elements, text and outside references of a page. Raises AssertionError where tags do not match."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name.split(":")[-1] in LOADS]
        self.references += [found for _, value in attrs for found in re.findall(r"url\(([^)]*)\)", value or "")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._open and self._open[-1] == "style":
            self.references += re.findall(r"@import.*|url\(([^)]*)\)", data)

    @property
    def text(self) -> str:
        """What is to be read, its space as a browser shows it."""
        return " ".join(" ".join(self.words).split())


def check_alone(page: Page) -> None:
    """Nothing on it comes from elsewhere, and nothing runs."""
    assert [found for found in page.references if not found.strip("\"'").startswith("#")] == []
    assert not {"script", "link", "iframe", "img", "object", "embed"} & set(page.tags)


def check_page(path: Path, content: Mapping[str, Any]) -> None:
    """The page shows what its report, as read from its file, holds."""
    page = Page(path)
    check_alone(page)
    assert content["title"] in page.text and content["command"] in page.text
    for name in ("cpu", "date", "revision"):
        assert str(content["machine"][name] or "unknown") in page.text
    assert page.tags.count("svg") == len(content["figures"]) > 0
    assert page.tags.count("table") == len(content["tables"]) > 0
    for shown in (*content["tables"], *content["figures"]):
        assert shown["title"] in page.text
    for table in content["tables"]:
        assert all(heading["text"] in page.text for heading in table["headings"])
    assert "nan" not in page.text.lower().split()
