"""A real checkpoint, SmolLM2-135M-Instruct, which `make real` builds: as transformers' model and as ours."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real import SMOLLM2, cache_folder
from modeling_gqa.checkpoints.writing import import_checkpoint
from modeling_gqa.evaluation.harness import find_tasks, open_subject
from modeling_gqa.evaluation.results import compare

FOLDER = cache_folder() / SMOLLM2
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (FOLDER / "config.json").is_file(), reason="needs make real"),
]
TEXTS = [
    "The Eiffel Tower stands in the city of Paris, and Paris is the capital of France.",
    "Twinkle, twinkle, little star, how I wonder what you are. Up above the world so high, like a diamond in the sky",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    "Nobody knows what word will be the last one of this line: wheelbarrow",
]


def test_an_imported_model_scores_as_its_source(tmp_path):
    """The last words of known lines, beside a plain loop: likelihood, and whether it is what the model writes."""
    rows = "".join(f'{{"text": "{text}"}}\n' for text in TEXTS)
    (tmp_path / "lambada_openai_test.jsonl").write_text(rows)
    import_checkpoint(FOLDER, tmp_path / "imported")
    tasks = find_tasks(None, tmp_path, batch_size=2)
    ours, theirs = (open_subject(str(folder)) for folder in (tmp_path / "imported", FOLDER))
    found = [tasks.run(subject.load(torch.float32, "cpu"), subject) for subject in (ours, theirs)]
    for name, row in compare(*found)["lambada"].items():
        assert row["paired"] and abs(row["difference"]) < 1e-2 * found[1]["lambada"].scores[name].value
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    total, right = 0.0, 0
    for text in TEXTS:
        before = len(tokenizer(text.rpartition(" ")[0])["input_ids"])
        ids = torch.tensor(tokenizer(text)["input_ids"])
        with torch.no_grad():
            scores = model(ids[None]).logits[0, before - 1 : -1].log_softmax(-1)
        total += scores.gather(1, ids[before:, None]).sum().item()
        right += int((scores.argmax(-1) == ids[before:]).all())
    scores = found[0]["lambada"].scores
    assert 0 < right < len(TEXTS) and scores["acc"].value == right / len(TEXTS)
    assert math.isclose(scores["perplexity"].value, math.exp(-total / len(TEXTS)), rel_tol=1e-3)
