"""One HTML file, made by a jinja2 template beside this file, with pictures by matplotlib.

The template escapes every text. A page has no script, and its Content-Security-Policy lets a
browser run none and request nothing. Its pictures are SVG images inside the file, and a browser
runs no script of an image either. Both packages are optional (the extra `plot`) and imported late.
"""

import base64
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config.invocation import module_of_extra, shell_lines
from megatron_lite.config.units import GIB

LONGEST_TEXT = 4000
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "memory",  # the same file from the same figures
    "text.parse_math": False,  # a name from outside is no formula
    "path.simplify_threshold": 0.5,  # of a pixel: a long curve stays a small file
}


def document(template: str, title: str, notes: Sequence[str] = (), **values: Any) -> str:
    """Returns the page of a template as HTML. Raises InputError if jinja2 is not installed."""
    jinja2 = module_of_extra("jinja2", "plot", needed_by="a page")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: value if hasattr(value, "__html__") else printable(str(value)),
    )
    environment.filters.update(
        gib=lambda num_bytes: f"{num_bytes / GIB:,.2f}", number=number, shell=shell_lines
    )
    return environment.get_template(template).render(title=title, notes=notes, **values)


def picture(draw: Callable[..., Any], *values: Any) -> Any:
    """Returns the figure that `draw(*values)` makes, as the address of an image in the page.

    Raises InputError if matplotlib is not installed.
    """
    matplotlib = module_of_extra("matplotlib", "plot", needed_by="a picture")
    with matplotlib.rc_context(STYLE):
        svg = svg_text(draw(*values))
    address = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    return module_of_extra("markupsafe", "plot", needed_by="a page").Markup(address)


def svg_text(figure: Any) -> str:
    """Returns the figure as an SVG, the same text from the same figures."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    lines = text.getvalue().splitlines()
    # Points of a path: a tenth of a pixel is enough.
    return "".join(
        re.sub(r"^(L \d+\.\d)\d* (\d+\.\d)\d*", r"\1 \2", line).rstrip() + "\n" for line in lines
    )


def printable(text: str) -> str:
    """Returns the text without characters that cannot be printed, and not endlessly long."""
    if len(text) > LONGEST_TEXT:
        text = f"{text[: LONGEST_TEXT - 3]}..."
    return "".join(
        one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in text
    )


def number(value: float | None) -> str:
    """Returns a value with four significant digits, or all before the point; "" for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.4g}"
