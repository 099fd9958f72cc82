"""The README's tree names what is there, and its examples run."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def tree() -> dict[str, str]:
    """Path and phrase of every line of the tree under Layout."""
    block = README.partition("## Layout")[2].split("```")[1]
    folder, paths = "", {}
    for line in block.strip("\n").splitlines():
        name, phrase = re.fullmatch(r" *(\S+) +(.+)", line).groups()
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
            paths[name] = phrase
        else:
            paths[folder + name] = phrase
    return paths


def tracked() -> list[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listing.splitlines() if path != ".gitignore"]


def test_tree_names_only_what_exists():
    for path in tree():
        pattern = path.replace("NAME", "*")
        assert list(ROOT.glob(pattern.rstrip("/"))), f"README's tree names {path}, which does not exist"


def test_tree_names_every_file():
    patterns = [re.escape(path).replace("NAME", "[^/]+") for path in tree()]
    for path in tracked():
        named = any(re.fullmatch(pattern, path) for pattern in patterns)
        assert named, f"README's tree lacks {path}"


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_runs(example, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(example, "README.md", "exec"), {})
