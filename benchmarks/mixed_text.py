"""English text of four kinds to calibrate on, in equal shares: `python -m benchmarks.mixed_text`.

A quarter each is documentation (the text of `benchmarks.real`), articles of Wikipedia (of 2016, shortened dump among
gensim's tests), news (the Lee corpus of 2005, 300 articles of the Australian Broadcasting Corporation, there too) and
novels (Jane Austen's, from a package of R). None of it is of the yardsticks of `modeling-gqa evaluate`: no title of
WikiText-2's test set is among the articles, which is checked where that file is given.

The folder `mixed/` beside that text has `calibration.jsonl` with a section of a page a row, and the files of
`benchmarks.real` to test on, so that other benchmarks take it with `--text`.
"""

import argparse
import bz2
import json
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory

from .real import (
    LONGEST_BOOK,
    SHORTEST,
    cache_folder,
    debian_package,
    describe,
    digest,
    made,
    placed,
    real_text,
    sampled,
    sections,
    wheel,
)

GENSIM = "gensim==4.4.0"
TESTED = "gensim/test/test_data"
WIKIPEDIA = f"{TESTED}/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
NEWS = f"{TESTED}/lee_background.cor"
NOVELS = "r-cran-janeaustenr"
SHARE = LONGEST_BOOK // 2  # characters of each kind
# What a string of R is preceded by: its type, that it is ASCII, and (as a group) the number of its bytes.
R_STRING = re.compile(rb"\x00\x04\x00\x09(.{4})", re.DOTALL)


def mixed_text() -> Path:
    """Return the folder of the text; it is made where there is none."""
    folder = cache_folder() / "mixed"
    if not folder.is_dir():
        print(f"making {folder} from {GENSIM} and Debian's {NOVELS}", flush=True)
        with TemporaryDirectory(dir=made(cache_folder())) as temporary:
            whole = made(Path(temporary) / "mixed")
            for path in real_text().glob("test*.jsonl"):
                shutil.copy(path, whole)
            with (real_text() / "calibration.jsonl").open(encoding="utf-8") as file:
                kinds = {"documentation": [json.loads(row)["text"] for row in file]}
            gensim = wheel(GENSIM, Path(temporary))
            kinds["wikipedia"] = [part for _, text in articles(gensim) for part in sections(text)]
            # A report is shorter than a section, and ten are about one.
            reports = gensim.read(NEWS).decode("utf-8", "replace").splitlines()
            kinds["news"] = ["\n\n".join(reports[start : start + 10]) for start in range(0, len(reports), 10)]
            kinds["novels"] = [part for novel in novels(Path(temporary)) for part in sections(novel)]
            rows = [row for parts in kinds.values() for row in sampled(parts, SHARE)]
            with (whole / "calibration.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps({"text": row}) + "\n" for row in sorted(rows, key=digest))
            placed(whole, folder)
    return folder


def articles(gensim: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """Yield title and text of each article, without redirections."""
    dump = bz2.decompress(gensim.read(WIKIPEDIA)).decode("utf-8")
    for title, text in re.findall(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", dump, flags=re.DOTALL):
        if ":" not in title and not text.lower().startswith("#redirect"):
            yield unescape(title), wiki_text(unescape(text))


def wiki_text(page: str) -> str:
    """Return the text of a page of Wikipedia: without notes, templates, tables, pictures and lists of sources."""
    page = re.split(r"^==+\s*(?:See also|References|Notes|External links|Further reading)\b", page, flags=re.M)[0]
    page = re.sub(r"<!--.*?-->|<ref[^>]*/>|<(ref|math|gallery|timeline)\b.*?</\1>", "", page, flags=re.DOTALL)
    for _ in range(8):  # those within others first
        page = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", "", page)
        page = re.sub(r"\[\[(?:File|Image|Category|[a-z-]{2,12}):[^\[\]]*\]\]", "", page)
        page = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", page)
    page = re.sub(r"\[https?:\S+ ?([^\]]*)\]|<[^>]*>|'{2,}", r"\1", page)
    page = re.sub(r"^=+\s*(.*?)\s*=+\s*$", r"\n\1\n", page, flags=re.M)
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", re.sub(r"^[*#:;]+ ?", "", page, flags=re.M)).strip()


def novels(folder: Path) -> Iterator[str]:
    """Yield each novel, with an empty line between paragraphs; the package of R is unpacked in `folder`."""
    (database,) = debian_package(NOVELS, folder).rglob("data/Rdata.rdb")
    data = database.read_bytes()
    while data:  # each vector of lines is its size, 4 bytes, and compressed by zlib
        unpacking = zlib.decompressobj()
        vector, data = unpacking.decompress(data[4:]), unpacking.unused_data
        lines = []
        for mark in R_STRING.finditer(vector):
            (size,) = struct.unpack(">i", mark[1])
            lines.append(vector[mark.end() : mark.end() + max(size, 0)].decode("utf-8", "replace"))
        paragraphs = re.split(r"\n{2,}", "\n".join(lines))
        yield "\n\n".join(paragraph.replace("\n", " ").strip() for paragraph in paragraphs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wikitext2", type=Path, metavar="FILE", help="test set whose titles must not be among these")
    options = parser.parse_args()
    if options.wikitext2:
        tested = set(re.findall(r"^ = ([^=].*?) = $", options.wikitext2.read_text("utf-8"), flags=re.M))
        with TemporaryDirectory() as temporary:
            titles = {title for title, text in articles(wheel(GENSIM, Path(temporary))) if len(text) >= SHORTEST}
        print(f"articles: {len(titles)}, of {len(tested)} tested ones {sorted(tested & titles) or 'none'}")
    print("\n".join(describe(mixed_text())))


if __name__ == "__main__":
    main()
