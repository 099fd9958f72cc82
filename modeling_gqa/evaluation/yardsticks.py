"""The yardsticks whose data are files in a folder: reading them, lm-eval's tasks on them, perplexity by windows.

Shapes: T tokens of a window, V vocabulary.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_gqa_cli.errors import UserError, one_line

from ..cache_quantized import rounds_cache
from ..common.batches import evaluating
from ..common.progress import Progress
from ..data.reading import text_pieces

# The file of each yardstick in the folder that --data names.
FILES = {
    "wikitext2": "wikitext2-raw-test.txt",
    "lambada": "lambada_openai_test.jsonl",
    "hellaswag": "hellaswag_val.txt.bz2",
    "humaneval": "HumanEval.jsonl.gz",
}
# lm-eval's own definitions of prompts and metrics, in its folder of tasks.
DEFINITIONS = {
    "wikitext2": "wikitext/wikitext.yaml",
    "lambada": "lambada/lambada_openai.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "humaneval": "humaneval/humaneval.yaml",
}
FIELDS = {"lambada": ("text",), "humaneval": ("task_id", "prompt", "test", "entry_point")}
LINES_OF_AN_ITEM = 6  # of HellaSwag: the context, the number of the right ending, four endings
# Logits are turned into float32 for this number of tokens at a time.
TOKENS_AT_ONCE = 256


# -- Files


def read_documents(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the documents of a yardstick, as lm-eval's task of it has them.

    Args:
        name: one of `FILES`.
        folder: where its file lies.

    Returns:
        Of "wikitext2" a `page` for each article; of "lambada" a `text`; of "hellaswag" `query`, `choices` and `label`,
        the index of the right one; of "humaneval" `task_id`, `prompt`, `test` and `entry_point`.

    Raises:
        UserError: the file is missing, or holds something else.
    """
    text = read_text(name, folder)
    lines = text.rstrip("\n").split("\n")  # `splitlines` would end a line at other characters, too
    try:
        if name == "wikitext2":
            return [{"page": page} for page in split_pages(text)]
        if name == "hellaswag":
            return hellaswag_items(lines)
        rows = [json.loads(line) for line in lines if line.strip()]
        found = [{field: row[field] for field in FIELDS[name]} for row in rows]
        if not found:
            raise ValueError("it is empty")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / FILES[name]} is not the data of {name}: {one_line(error)}") from error
    return found


def read_text(name: str, folder: Path) -> str:
    """Return what the file of a yardstick holds, with "\n" at every end of a line; raises `UserError`."""
    path = folder / FILES[name]
    if not path.is_file():
        raise UserError(f"{name} needs the file {path}, which is not there: give its folder by --data")
    return "".join(text_pieces(path, newlines=True))


def hellaswag_items(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return HellaSwag's items from lines of text, six an item; raises ValueError where they are none.

    lm-eval begins the sentence that an ending continues with a capital (`ctx_b.capitalize()`), and the file does not:
    it is made up for here.
    """
    if not lines or len(lines) % LINES_OF_AN_ITEM:
        raise ValueError(f"{len(lines)} lines are no items of {LINES_OF_AN_ITEM}")
    found = []
    for start in range(0, len(lines), LINES_OF_AN_ITEM):
        context, right, *endings = lines[start : start + LINES_OF_AN_ITEM]
        if right not in ("0", "1", "2", "3"):
            raise ValueError(f"line {start + 2} is no index of an ending: {right[:40]!r}")
        query = re.sub(r"(?<=[.!?] )[a-z][^.!?]*$", lambda last: last[0].capitalize(), context)
        found.append({"query": query, "choices": endings, "label": int(right)})
    return found


def split_pages(text: str) -> list[str]:
    """Return the articles of WikiText as lm-eval's data set has them, from its rows joined by two newlines.

    A row that is not empty ends with a newline of its own. A heading of the first level begins an article.
    """
    lines, rows, at = text.split("\n"), [], 0
    while at < len(lines):
        rows.append(lines[at] or " ")  # as the published file has empty lines
        at += 3 if lines[at] else 2
    pages: list[list[str]] = []
    for row in rows:
        heading = row.replace("= = =", "===").replace("= =", "==").strip()
        if not pages or (heading.startswith("= ") and heading.endswith(" =")):
            pages.append([])
        pages[-1].append(row)
    found = ["\n".join(page) for page in pages if "".join(page).strip()]
    if not found:
        raise ValueError("it is empty")
    return found


# -- lm-eval's tasks


def definition(name: str, resolve_functions: bool = True) -> dict[str, Any]:
    """Return lm-eval's definition of a yardstick: prompts, metrics and how text is generated."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = Path(lm_eval.tasks.__file__).parent
    return load_yaml(folder / DEFINITIONS[name], resolve_func=resolve_functions)


def local_task(name: str, documents: list[dict[str, Any]]) -> Any:
    """Return lm-eval's task of a yardstick on these documents, under this package's name of it."""
    from datasets import Dataset, DatasetDict
    from lm_eval.api.task import ConfigurableTask

    config = definition(name)
    split = config.get("test_split") or config["validation_split"]
    data = DatasetDict({split: Dataset.from_list(documents)})
    splits = {"training_split": None, "validation_split": None, "test_split": split}
    # The documents are processed already.
    changed = {"task": name, "tag": None, "process_docs": None, "custom_dataset": lambda **_: data}
    return ConfigurableTask(config=config | splits | changed)


# -- Perplexity


def token_windows(tokenizer: PreTrainedTokenizerBase, text: str, length: int) -> torch.Tensor:
    """Return a text's tokens in windows (windows, T), without the rest behind the last whole one.

    The text is tokenized as a whole. A token at the beginning (BOS) is there only if the tokenizer adds it by itself.

    Args:
        tokenizer: of the model.
        text: all of it.
        length: tokens of a window, T.

    Raises:
        UserError: the text has fewer tokens than a window.
    """
    ids = torch.tensor(tokenizer(text)["input_ids"])
    whole = len(ids) // length
    if not whole:
        raise UserError(f"the text has {len(ids)} tokens, less than a window: --sequence-length is {length}")
    return ids[: whole * length].view(whole, length)  # (windows, T)


@torch.no_grad()
def window_losses(model: PreTrainedModel, windows: torch.Tensor, progress: Progress = iter) -> np.ndarray:
    """Return the mean loss of each window, in nats per predicted token; the first token of a window is not predicted.

    Its mean over windows is what GPTQ (2210.17323) and others take the exponential of.

    Args:
        model: a causal language model.
        windows: token ids (windows, T), of which one window is computed at a time.
        progress: wraps the iteration over windows.
    """
    losses = []
    with evaluating(model):
        for window in progress(windows):
            window = window.to(model.device)
            logits = model(input_ids=window[None], use_cache=rounds_cache(model.config)).logits[0, :-1]  # (T - 1, V)
            parts = zip(logits.split(TOKENS_AT_ONCE), window[1:].split(TOKENS_AT_ONCE), strict=True)
            wide = torch.promote_types(logits.dtype, torch.float32)
            total = sum(
                torch.nn.functional.cross_entropy(part.to(wide), targets, reduction="sum").item()
                for part, targets in parts
            )
            losses.append(total / (len(window) - 1))
    return np.array(losses)
