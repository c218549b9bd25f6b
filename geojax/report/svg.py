# SPDX-License-Identifier: Apache-2.0
"""A picture as SVG that stands inside a page.

Invariant: it names no other file and no address, its text is text, and what is black or white by
default takes the page's colours, light or dark.
"""

import re
from io import BytesIO

from geojax.track.section import Picture

_SETTINGS = {
    "legend.frameon": False,
    "savefig.format": "svg",
    "savefig.transparent": True,
    "svg.fonttype": "none",  # text stays text
}


def inline_svg(picture: Picture, prefix: str) -> str:
    """An <svg> element; `prefix` makes the ids in it those of one picture of the page."""
    import matplotlib  # takes most of a second

    buffer = BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        picture.draw(buffer)
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    head = re.sub(r' (xmlns(:\w+)?|width|height|version)="[^"]*"', "", head)

    def tag(found: re.Match[str]) -> str:
        inside = re.sub(r'(\bid="|="#|url\(#)', rf"\g<1>{prefix}", found[0])
        inside = inside.replace("xlink:href", "href")
        return re.sub(r"(fill|stroke): #000000", r"\1: currentColor", inside)

    return f"{head}>{re.sub('<[^<>]*>', tag, rest)}".strip()
