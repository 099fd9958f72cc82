"""What mkdocs runs when it builds the site: formulas become MathML.

`$$...$$` on lines of its own is a display formula and `$...$` an inline one; code is left alone. MathML needs neither a
script nor a network.
"""

import re

from latex2mathml.converter import convert

CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", flags=re.MULTILINE | re.DOTALL)
DISPLAY = re.compile(r"^\$\$\n(.+?)\n\$\$$", flags=re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\$([^$\n]+)\$")


def on_page_markdown(markdown: str, page, **_) -> str:
    """Put a word in each formula's place, because Markdown would take MathML for a block of its own."""
    page.formulas = []

    def display(found: re.Match) -> str:
        page.formulas.append(f'<span class="formula">{convert(found[1], display="block")}</span>')
        return f"formula{len(page.formulas) - 1}formula"

    def inline(found: re.Match) -> str:
        page.formulas.append(convert(found[1], display="inline"))
        return f"formula{len(page.formulas) - 1}formula"

    pieces = CODE.split(markdown)
    pieces[::2] = [INLINE.sub(inline, DISPLAY.sub(display, piece)) for piece in pieces[::2]]
    return "".join(pieces)


def on_page_content(html: str, page, **_) -> str:
    return re.sub(r"formula(\d+)formula", lambda found: page.formulas[int(found[1])], html)
