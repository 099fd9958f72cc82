"""Where the text comes from: files and folders, a Hub data set, or Python's standard library.

A *document* is one file, or one row of a JSONL, JSON or Parquet file or a Hub data set. It is read in
pieces, so that a long file is never in memory as a whole.
"""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from modeling_gqa_cli.recipes import public_name

from ..common.errors import UserError, one_line
from ..training.recipe import Recipe
from .reading import Document, Files, find_files, read_documents, row_text

# Tests repeat themselves, installed packages have other licences, and lib2to3's test data is broken on purpose.
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SHUFFLE_BUFFER = 10_000  # rows, of a streamed Hub data set


@dataclass(frozen=True)
class Source:
    """Where the text comes from.

    Attributes:
        name: of the data set, or of the files and folders without their paths.
        license: of the text; `None` where the recipe does not say.
        documents: reads the text; it raises `UserError` or `UserError` where it cannot.
        notes: returns a line for each file that is left out.
    """

    name: str
    license: str | None
    documents: Callable[[], Iterator[Document]]
    notes: Callable[[], list[str]] = list


def open_source(recipe: Recipe) -> Source:
    """Return the recipe's source of text; no file is opened before `documents` is called."""
    if recipe.dataset_name:
        return Source(public_name(recipe.dataset_name), recipe.license, lambda: hub_documents(recipe))
    if recipe.data_files:
        name = ", ".join(os.path.basename(os.path.abspath(path)) for path in recipe.data_files)
        found = cache(lambda: list_files(recipe.data_files, recipe.text_column))
        documents = lambda: file_documents(found().paths, recipe.text_column)  # noqa: E731
        return Source(name, recipe.license, documents, lambda: found().notes)
    return Source("the Python standard library's source code", recipe.license or "PSF-2.0", stdlib_documents)


def stdlib_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not STDLIB_SKIPPED.intersection(relative.parts):
            text = path.read_bytes().decode("utf-8", errors="replace")
            if text.strip():
                yield Document(partial(iter, (text,)), relative.as_posix())


def list_files(patterns: list[str], text_column: str) -> Files:
    """Return the files that paths, folders and globs stand for, in a fixed order; raises `UserError` for none."""
    named, matched = [], []
    for pattern in patterns:
        try:
            path = Path(pattern).expanduser()
            files = [] if path.exists() else [Path(item) for item in glob.glob(str(path), recursive=True)]
        except (OSError, RuntimeError) as error:  # a name too long, a folder that is shut, an unknown ~user
            raise UserError(f"data_files: nothing to read at {pattern[:200]}: {error}") from error
        files = [item for item in files if item.is_file()]
        matched += files
        named += [] if files else [path]
    with recipe_errors():
        found = find_files(named, text_column, matched)
    if not found.paths:
        raise UserError(f"data_files: nothing to read at {', '.join(patterns)} ({'; '.join(found.notes)})")
    return found


def file_documents(paths: list[Path], text_column: str) -> Iterator[Document]:
    for path in paths:
        for document in read_documents(path, text_column):
            if any(piece.strip() for piece in document.pieces()):
                yield document


def hub_documents(recipe: Recipe) -> Iterator[Document]:
    import datasets

    try:
        rows = datasets.load_dataset(
            recipe.dataset_name, recipe.dataset_config_name, split=recipe.dataset_split, streaming=recipe.streaming
        )
        if recipe.streaming:
            rows = rows.shuffle(seed=recipe.data_seed or recipe.seed, buffer_size=SHUFFLE_BUFFER)
        for number, row in enumerate(rows, 1):
            text = row_text(row, recipe.text_column, f"{recipe.dataset_name}, row {number}")
            if text.strip():
                yield Document(partial(iter, (text,)))
    except UserError:
        raise
    except Exception as error:  # the network, the name, access rights: each has its own class
        raise UserError(f"cannot load the Hub data set {recipe.dataset_name}: {one_line(error)}") from error


@contextmanager
def recipe_errors() -> Iterator[None]:
    """Turn a `UserError` into a `UserError`, which names the field of a recipe."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--text-column", "text_column")) from error
