"""What mkdocs runs when it builds the site.

Formulas become MathML, the tree of files becomes tables, which fit a phone, and the benchmark's picture is taken along.

`$$...$$` on lines of its own is a display formula and `$...$` an inline one; code is left alone. MathML needs neither a
script nor a network.
"""

import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", flags=re.MULTILINE | re.DOTALL)
DISPLAY = re.compile(r"^\$\$\n(.+?)\n\$\$$", flags=re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\$([^$\n]+)\$")
TREE = re.compile(r"^```text\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def on_files(files: Files, config, **_) -> Files:
    picture = ROOT / "benchmarks" / "results" / "decode.png"
    files.append(File.generated(config, "assets/decode.png", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Put a word in each formula's place, because Markdown would take MathML for a block of its own."""
    if page.file.src_uri == "layout.md":
        markdown = TREE.sub(lambda found: tree_tables(found[1]), markdown)
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


def tree_tables(tree: str) -> str:
    """A heading for each folder of the tree, and a table of its files."""
    lines = ["## At the top", "", "| | |", "|---|---|"]
    for line in tree.splitlines():
        name, phrase = line.split(maxsplit=1)
        if name.endswith("/") and not line.startswith(" "):
            lines += ["", f"## {name}", "", f"{phrase[0].upper()}{phrase[1:]}.", "", "| | |", "|---|---|"]
        else:
            lines.append(f"| `{name}` | {phrase} |")
    return "\n".join(lines)
