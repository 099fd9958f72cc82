"""The documentation: its code runs, its links lead somewhere, its tables are true."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_page import find_blocks

from modeling_gqa_cli.errors import listed
from modeling_gqa_vllm import kernels

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LANGUAGES = {"python", "bash", "yaml", "json", "text", "diff", "bibtex"}
NAME = "modeling_gqa"
WITH_CODE = [page for page in PAGES if re.search("^```(python|bash)$", page.read_text(), flags=re.MULTILINE)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(*arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_MKDOCS_2_WARNING": "1"}
    # stderr goes where stdout goes, so that what failed stands beside what was printed.
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed[-4000:]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_of_a_page_runs(page):
    run("tests/run_page.py", str(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_say_what_they_are(page):
    """A block without a language would be run by nothing."""
    blocks = find_blocks(page.read_text(encoding="utf-8"))
    assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(blocks)
    assert {block.language for block in blocks} <= LANGUAGES


def test_docstring_examples_run():
    """Each in a process that is new but for the imports."""
    run("tests/run_page.py", "--docstrings", "modeling_gqa")


# -- the site


def test_site_builds_and_every_link_leads_somewhere(tmp_path):
    run("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path))
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(list(DOCS.rglob("*.md")))
    for page in pages:
        fetched = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?|png|svg))"', page.read_text())
        assert not fetched, f"{page.name} fetches {fetched}"


def test_links_of_the_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name} links to {target}"


def test_tables_are_the_results_in_the_repository():
    sys.path.insert(0, str(ROOT))
    from benchmarks.report import tables

    numbers = (DOCS / "numbers.md").read_text()
    for table in tables():
        assert table in numbers, "run `python -m benchmarks.report` and copy its tables"
    quoted = re.findall(r"\d+ / \d+ \([\d.]+x\)", (ROOT / "README.md").read_text())
    assert quoted
    assert all(cell in tables()[0] for cell in quoted)


def test_the_readme_compares_with_gqa_of_equal_cache():
    """Beside the speed against a class that rebuilds keys and values; and says from which context on MLA pays."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    results = json.loads((ROOT / "benchmarks" / "results" / "decode.json").read_text())
    sizes, cell = results["sizes"], {"dtype": "float32", "batch": 8, "length": 2048}
    (gqa,) = (row for row in results["by_heads"] if row["key_value_heads"] == 2)
    (mla,) = (row for row in results["rows"] if row["kind"] == "mla" and cell.items() <= row.items())
    assert cell.items() <= gqa.items() and 2 * 2 * sizes["head_dim"] == 256
    assert sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"] == 288
    assert f"256 numbers, takes {gqa['ours_ms']:.0f} ms where MLA takes {mla['ours_ms']:.0f} (fp32 B8 S2048)" in readme
    measured = re.findall(r"^ +1 +[\d,]+ .*\(([\d.]+)x\)$", (DOCS / "costs.md").read_text(), flags=re.MULTILINE)
    near, far, farthest = measured
    assert f"{near} times its source's time after 1,024 tokens, {far} after 8,192 and {farthest} after 32,768" in readme


def test_sizes_of_kernels_are_those_of_the_code():
    section = (DOCS / "serving.md").read_text().split("## Which cache sizes do engines take?")[1].split("\n## ")[0]
    first, second = re.findall(r"(?:^\|.*\|\n)+", section, flags=re.MULTILINE)
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in first.splitlines()[2:]] == [
        [
            kernel.name,
            ", ".join(kernel.devices) or "all",
            listed([f"{rank} + {rope}" for rank, rope in kernel.sizes] or ["any"]),
            listed(kernel.unrotated or ["any"]),
        ]
        for kernel in kernels.LATENT_KERNELS
    ]
    assert [tuple(map(int, re.findall(r"\d+", row))) for row in second.splitlines()[2:]] == list(kernels.PROMPT_SIZES)
    said = " ".join(section.split())
    assert f"takes heads of {listed(kernels.CPU_HEADS)} numbers" in said
    assert f"takes any {listed(kernels.FAST_SUMS)} to suit" in said
    assert f"multiples of {kernels.FLASH_MULTIPLE} up to {kernels.FLASH_MOST}" in said


# -- what is installed

# pip and its like, the word that installs, options, and the package by its name alone: no path before it, no address
# after it. And the name with extras in quotes, as it is given to such a command.
BY_NAME = re.compile(
    r"""\b(?:install|add|download|uvx|pipx\ run)(?:\s+-\S+)*\s+["'`]?modeling[-_.]gqa\b(?!["'\s]*@|[/.\w-]*[/.]\w)"""
    r"""|["'`]modeling[-_.]gqa\[[\w,]+\](?!\s*@)""",
    re.VERBOSE,
)


def test_nothing_installs_the_package_by_its_name():
    """It is on no package index: whoever registers the name there could run code on the machines of our users."""
    assert all(map(BY_NAME.search, (f"pip install -U {NAME}", f"uv add '{NAME}[x]'", f"or `{NAME}[x]` from there")))
    assert not any(map(BY_NAME.search, (f"pip install '.[x]' in a checkout of {NAME}", f"install ./{NAME}-0.1.whl")))
    found = [
        f"{path}:{number}"
        for path in tracked()
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if BY_NAME.search(line)
    ]
    assert not found


# -- the table of folders


def tracked(*patterns: str) -> list[str]:
    return subprocess.check_output(["git", "ls-files", *patterns], cwd=ROOT, text=True).splitlines()


def test_the_layout_names_every_folder_of_code_and_no_other():
    named = set(re.findall(r"`([\w/]+)/`", (DOCS / "layout.md").read_text(encoding="utf-8")))
    folders = {str(Path(path).parent) for path in tracked("*.py") if not path.startswith(("tests/", "docs/"))} - {"."}
    assert folders <= named and all((ROOT / name).is_dir() for name in named)


# What lies beneath the folders of `modeling_gqa/`, and the one start of a command in them.
BENEATH = ("modeling_gqa_cli.errors", "modeling_gqa_cli.parser", "modeling_gqa_cli.paths", "modeling_gqa_cli.options",
           "modeling_gqa_cli.recipes", "modeling_gqa_cli", "modeling_gqa_vllm.kernels")  # fmt: skip
STARTS = ("modeling_gqa/training/comparison/runs.py", "modeling_gqa_cli.main")


def imports(path: str) -> set[str]:
    """Modules, by their whole names, that a file imports anywhere in it."""
    found: set[str] = set()
    package = path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found |= {module} if node.module else {f"{module}.{alias.name}" for alias in node.names}
    return found


def test_no_folder_imports_one_below_it():
    listed = re.findall(r"^\| `modeling_gqa/(\w*)/?(?:\w+/)?`", (DOCS / "layout.md").read_text(encoding="utf-8"), re.M)
    ranks = {name: rank for rank, name in enumerate(dict.fromkeys(listed))}
    assert len(ranks) >= 7, ranks
    wrong = []
    for path in tracked("modeling_gqa/*.py"):
        own = path.split("/")[1] if path.count("/") > 1 else ""
        for module in imports(path):
            top, *rest = module.split(".")
            rank = ranks.get(rest[0], 0) if rest else 0
            below = top == "modeling_gqa" and rank > ranks[own]
            outside = top in ("modeling_gqa_cli", "modeling_gqa_vllm", "training") and module not in BENEATH
            if (below or outside) and (path, module) != STARTS:
                wrong.append(f"{path} imports {module}")
    assert not wrong
