"""What mkdocs runs when it builds the site: formulas become MathML, and the benchmark's picture is taken along.

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


def on_files(files: Files, config, **_) -> Files:
    picture = ROOT / "benchmarks" / "results" / "decode.png"
    files.append(File.generated(config, "assets/decode.png", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    pieces = CODE.split(markdown)
    pieces[::2] = [render(piece) for piece in pieces[::2]]
    return "".join(pieces)


def render(text: str) -> str:
    text = DISPLAY.sub(lambda found: f'<div class="formula">{convert(found[1], display="block")}</div>', text)
    return INLINE.sub(lambda found: convert(found[1], display="inline"), text)
