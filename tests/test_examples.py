"""Every public class and function shows how it is used, in a block of its docstring."""

import importlib
import inspect
import re
import textwrap

import pytest

PACKAGES = ("modeling_gqa", "modeling_gqa.costs", "modeling_gqa.conversion")
BLOCK = re.compile(r"^( *)```python([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def public_objects() -> list[tuple[str, str]]:
    """Package and name of every public class and function."""
    found = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            # Constants and modules have no docstring that could hold an example.
            if callable(getattr(module, name)):
                found.append((package, name))
    return found


def blocks(docstring: str) -> list[tuple[str, str]]:
    """What follows "python" on the fence, and the code, of each block of a docstring."""
    return [(note.strip(), textwrap.dedent(code)) for _, note, code in BLOCK.findall(inspect.cleandoc(docstring))]


@pytest.mark.parametrize(("package", "name"), public_objects())
def test_what_is_public_has_an_example(package, name):
    """`test_docs.py` runs the blocks; one that cannot run is marked `no-run`, and a comment in it says why."""
    docstring = getattr(importlib.import_module(package), name).__doc__ or ""
    examples = blocks(docstring.partition("Example:\n")[2])
    assert examples, f"{package}.{name} has no Example: with a ```python block"
    for note, code in examples:
        assert note != "no-run" or "#" in code, f"{package}.{name}: a comment says why its example is not run"


def test_what_is_public_exists():
    for package in PACKAGES:
        module = importlib.import_module(package)
        assert len(set(module.__all__)) == len(module.__all__)
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_blocks_are_found_as_they_are_marked():
    text = """One.

    Example:
        ```python
        if 1:
            pass
        ```
        ```python no-run
        # It needs a GPU.
        ```
    """
    assert blocks(text) == [("", "if 1:\n    pass\n"), ("no-run", "# It needs a GPU.\n")]
