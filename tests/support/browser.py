"""Looks at an HTML page with Chromium, if it is installed, and parses pages without it.

The page is shown in a frame as wide as a phone. The parent document moves the pointer, measures,
and writes what it found as JSON into its own document, which Chromium prints.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.limits import HANG_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
VOID = {"meta", "link", "input", "br"}
WRAPPER = """<!doctype html><meta charset="utf-8"><body>
<iframe style="border:0;width:%(width)dpx;height:900px"
srcdoc="%(page)s"></iframe><pre id="found"></pre><script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const wide = [...page.querySelectorAll("*")].filter(
    (item) => item.getBoundingClientRect().right > %(width)d + 0.5
      && (!item.closest(".scroll") || item.tagName === "CAPTION"));
  const found = { width: page.documentElement.scrollWidth, answer: (%(script)s)(page) };
  found.wide = wide.map((item) => item.outerHTML.slice(0, 200));
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script></body>"""


class Look(NamedTuple):
    """What Chromium found.

    width: the width that the content needs, in CSS pixels. wide: the elements that stick out,
        except the cells of tables that scroll in their own box.
    console: the messages of the console. answer: what the test's script returned.
    """

    width: int
    wide: list[str]
    console: list[str]
    answer: Any


def look(page: str, folder: Path, *, width: int = 375, script: str = "() => null") -> Look:
    """Shows the page in a frame of this width. script: a JavaScript function of its document."""
    assert CHROMIUM is not None
    wrapper = folder / "wrapper.html"
    values = {"width": width, "page": html.escape(page), "script": script}
    wrapper.write_text(WRAPPER % values)
    run = subprocess.run(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=1280,1000",
            f"--user-data-dir={folder / 'profile'}",
            "--enable-logging=stderr",
            "--dump-dom",
            wrapper.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    found = re.search(r'<pre id="found">(.+?)</pre>', run.stdout, re.DOTALL)
    assert found is not None, run.stderr
    values = json.loads(html.unescape(found[1]))
    console = [line for line in run.stderr.splitlines() if ":CONSOLE" in line]
    return Look(values["width"], values["wide"], console, values["answer"])


class Parsed(HTMLParser):
    """An HTML page as its elements.

    faults: end tags without a beginning, elements without an end, and tables whose rows differ in
        their number of cells.
    scripts: the text of each script that a browser runs.
    data: the JSON of each other script, by its id.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.faults: list[str] = []
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.data: dict[str, Any] = {}
        self._open: list[str] = []
        self._row, self._columns = 0, 0
        self.feed(page)
        self.close()
        self.faults += [f"<{tag}> has no end" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self._columns = 0
        if tag == "tr":
            self._row = 0
        self._row += tag in ("th", "td")

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.faults.append(f"</{tag}> ends no element")
        if tag == "tr":
            self._columns = self._columns or self._row
            if self._row != self._columns:
                self.faults.append(f"a row of {self._row} cells below {self._columns} titles")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            attributes = self.tags[-1][1]
            if attributes.get("type") == "application/json":
                try:
                    self.data[str(attributes["id"])] = json.loads(data)
                except ValueError as error:
                    self.faults.append(f"the script {attributes['id']}: {error}")
            else:
                self.scripts.append(data)
        elif not self._open or self._open[-1] != "style":
            self.text += data
