"""Builds HTML text in which every value from outside is escaped.

`Html` marks text that is markup already. `element` escapes everything else, so a caller cannot
forget it. A page carries a Content-Security-Policy with the hashes of its own scripts. A browser
therefore runs no other script and makes no request, even if a text were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

LONGEST_TEXT = 400
VOID = ("meta", "link", "input", "br")  # elements without an end tag


class Html(str):
    """Text that is markup: `element` does not escape it."""


def escaped(text: object) -> Html:
    """Returns the text as markup, without characters that cannot be printed."""
    shown = "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}"
        for character in str(text)
    )
    return Html(html.escape(shown))


def shortened(text: str, length: int = LONGEST_TEXT) -> str:
    """Returns the text, or its beginning and "..." if it has more characters than `length`."""
    return text if len(text) <= length else text[: length - 3] + "..."


def joined(parts: Iterable[str]) -> Html:
    """Returns the parts as one piece of markup. Parts that are no Html are escaped."""
    return Html("".join(part if isinstance(part, Html) else escaped(part) for part in parts))


def element(name: str, /, *children: str, **attributes: object) -> Html:
    """Returns an HTML or SVG element.

    children: markup (Html), or text, which is escaped.
    attributes: a trailing underscore is dropped (class_), other underscores become hyphens. None
        and False leave the attribute out; True writes its name alone.
    """
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key if key == "viewBox" else key.rstrip("_").replace("_", "-")
        written.append(f" {key}" if value is True else f' {key}="{escaped(value)}"')
    opening = f"<{name}{''.join(written)}>"
    if name in VOID and not children:
        return Html(opening)
    return Html(f"{opening}{joined(children)}</{name}>")


def json_element(values: Any, identifier: str) -> Html:
    """Returns a script element that holds data. No text of it can end the element.

    Raises ValueError for NaN and infinity, which are no JSON.
    """
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return element("script", Html(text), type="application/json", id=identifier)


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, class_: str | None = None
) -> Html:
    """Returns a table that scrolls inside its own box if the window is narrow.

    The first cell of each row is the row's header.
    """
    body = [
        element(
            "tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])
        )
        for row in rows
    ]
    titles = element("tr", *(element("th", name, scope="col") for name in head))
    whole = element(
        "table",
        element("caption", caption),
        element("thead", titles),
        element("tbody", *body),
        class_=class_,
    )
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def card(name: str, value: str, note: str = "") -> Html:
    """Returns a list item with a figure, its name above it and a note below it."""
    shown = value if isinstance(value, Html) else element("b", value)
    return element("li", element("span", name), shown, element("small", note) if note else "")


def page(title: str, *sections: Html, scripts: Sequence[str]) -> str:
    """Returns a whole HTML document.

    scripts: the names of script files of this folder, in the order in which they run.
    """
    codes = [resource(name) for name in scripts]
    hashes = " ".join(f"'sha256-{_sha256(code)}'" for code in codes) or "'none'"
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("link", rel="icon", href="data:,"),
        element("title", shortened(title, 120)),
        element("style", Html(resource("page.css"))),
    )
    body = element(
        "body", element("main", *sections), *(element("script", Html(code)) for code in codes)
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def resource(name: str) -> str:
    """Returns the text of a style or script file of this folder."""
    return (files("megatron_lite.pages") / name).read_text(encoding="utf-8")


def _sha256(code: str) -> str:
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
