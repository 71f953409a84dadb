"""Parses an HTML page, and finds what a page must not have."""

import base64
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = {"meta", "link", "input", "br", "img"}
IMAGE = "data:image/svg+xml;base64,"


class ParsedPage(HTMLParser):
    """An HTML page as its elements.

    faults: scripts, handlers of events, addresses of other files, and pictures that are no
        well-formed XML or have a script.
    rows: the cells of each row of the tables, those of the heads included.
    """

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.faults = []
        self.text = ""
        self.rows = [[]]  # of cells before the first row
        self.tags = []
        self._open = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        for name, value in attrs:
            if name.startswith("on"):
                self.faults.append(f"a handler: {name}")
            if name in ("src", "href"):
                self._address(str(value))
        if tag in ("script", "iframe", "object", "form"):
            self.faults.append(f"<{tag}>")
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        if self._open and self._open[-1] in ("th", "td") and self.rows[-1]:
            self.rows[-1][-1] += data
        if not self._open or self._open[-1] != "style":
            self.text += data

    def _address(self, address):
        if not address.startswith("data:"):
            self.faults.append(f"another file: {address}")
        if address.startswith(IMAGE):
            picture = ElementTree.fromstring(base64.b64decode(address.removeprefix(IMAGE)))
            self.faults += [f"a picture with <{one.tag}>" for one in picture.iter("script")]
