"""lm-eval's scores against short computations of their own, and differences between two models."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from byte_texts import tokenizer_of_bytes
from transformers import AutoModelForCausalLM

from modeling_gqa.checkpoints.writing import import_checkpoint
from modeling_gqa.evaluation.harness import find_tasks, item_shares, open_subject, run_lm_eval, wrapped
from modeling_gqa.evaluation.results import Results, compare
from modeling_gqa_cli.errors import UserError

NAMES = ["wikitext2", "lambada", "hellaswag"]
WINDOW = 40


@pytest.fixture(scope="module")
def tasks(data):
    return find_tasks(None, data, batch_size=3, sequence_length=WINDOW)


@pytest.fixture(scope="module")
def results(tasks, models_folder) -> dict[str, Results]:
    found = {}
    for name in ("ours", "llama"):
        subject = open_subject(str(models_folder / name))
        found[name] = tasks.run(subject.load(torch.float32, "cpu"), subject)
    return found


@pytest.fixture(params=["ours", "llama"])
def judged(request, results, models_folder):
    """The results of a model, and that model in float64, loaded by transformers."""
    return results[request.param], AutoModelForCausalLM.from_pretrained(
        models_folder / request.param, dtype=torch.float64
    )


def log_likelihood(model, before: str, text: str) -> tuple[float, bool]:
    """Return the log-likelihood of `text` behind `before`, byte by byte, and whether each byte is the most likely."""
    tokenizer = tokenizer_of_bytes()
    first, ids = len(tokenizer(before)["input_ids"]), tokenizer(before + text)["input_ids"]
    total, greedy = 0.0, True
    with torch.no_grad():
        for at in range(first, len(ids)):
            scores = model(torch.tensor([ids[:at]])).logits[0, -1].log_softmax(-1)
            total += scores[ids[at]].item()
            greedy &= scores.argmax().item() == ids[at]
    return total, greedy


def test_lambada(judged, lambada):
    found, model = judged
    pairs = [log_likelihood(model, *re.fullmatch(r"(.*)( \S+)", text).groups()) for text in lambada]
    scores = found["lambada"].scores
    assert found["lambada"].items == 12 == len(found["lambada"].keys)
    assert 0 < scores["acc"].value < 1 and scores["acc"].value == sum(right for _, right in pairs) / 12
    assert math.isclose(scores["perplexity"].value, math.exp(-sum(x for x, _ in pairs) / 12), rel_tol=1e-4)
    assert scores["acc"].higher_is_better and not scores["perplexity"].higher_is_better


def test_hellaswag(judged, hellaswag):
    found, model = judged
    right = {"acc": [], "acc_norm": []}
    for context, gold, endings in hellaswag:
        found_likelihoods = [log_likelihood(model, context, f" {ending}")[0] for ending in endings]
        by_length = [x / len(ending) for x, ending in zip(found_likelihoods, endings, strict=True)]
        right["acc"].append(int(np.argmax(found_likelihoods)) == gold)
        right["acc_norm"].append(int(np.argmax(by_length)) == gold)
    assert right["acc"] != right["acc_norm"]  # else the test could not tell one from the other
    for metric, score in found["hellaswag"].scores.items():
        share = np.mean(right[metric])
        assert math.isclose(score.value, share)
        assert math.isclose(score.stderr, math.sqrt(share * (1 - share) / 11))


def test_word_perplexity(judged, pages):
    """Windows of a page begin behind the end-of-text token or the window before; words are those of the raw page."""
    found, model = judged
    tokenizer, total = tokenizer_of_bytes(), 0.0
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    with torch.no_grad():
        for page in pages:
            ids = [tokenizer.eos_token_id, *tokenizer(wikitext_detokenizer({"page": page}))["input_ids"]]
            for start in range(0, len(ids) - 1, WINDOW):
                # The last window is filled up with what stands before it, of which nothing is predicted again.
                end = min(start + WINDOW, len(ids) - 1)
                first = start if start == 0 or end == start + WINDOW else end - WINDOW
                scores = model(torch.tensor([ids[first:end]])).logits[0].log_softmax(-1)
                total += sum(scores[at - first, ids[at + 1]].item() for at in range(start, end))
    words = sum(len(re.split(r"\s+", page)) for page in pages)
    scores = found["wikitext"].scores
    assert math.isclose(scores["word_perplexity"].value, math.exp(-total / words), rel_tol=1e-4)
    assert scores["word_perplexity"].stderr > 0 and found["wikitext"].items == 3


def test_a_difference_has_the_error_of_differences_item_by_item(results):
    found = compare(results["ours"], results["llama"])
    assert set(found) == {"wikitext2", "wikitext", "lambada", "hellaswag"}
    for task, metrics in found.items():
        for name, row in metrics.items():
            ours, theirs = (results[model][task].scores[name] for model in ("ours", "llama"))
            assert row["paired"] and row["difference"] == ours.value - theirs.value
            differences = ours.shares - theirs.shares
            assert math.isclose(row["stderr"], np.std(differences, ddof=1) / math.sqrt(len(differences)))
            assert abs(ours.shares.mean()) < 1e-6 * max(1, ours.value)


def test_shares_are_what_a_small_change_of_an_items_weight_does():
    """The derivative of each metric by the weight of an item, by finite differences."""
    from lm_eval.api.metrics import bits_per_byte, mean, perplexity, weighted_perplexity

    generator = np.random.default_rng(0)
    numbers, weights = -generator.random(7), generator.integers(1, 9, 7)
    pairs = np.stack([numbers, weights], axis=1)
    formulas = {
        mean: (numbers, lambda w: (w * numbers).sum() / w.sum()),
        perplexity: (numbers, lambda w: math.exp(-(w * numbers).sum() / w.sum())),
        weighted_perplexity: (pairs, lambda w: math.exp(-(w * numbers).sum() / (w * weights).sum())),
        bits_per_byte: (pairs, lambda w: -(w * numbers).sum() / (w * weights).sum() / math.log(2)),
    }
    for aggregate, (items, formula) in formulas.items():
        value = aggregate([tuple(x) for x in items] if items.ndim == 2 else list(items))
        assert math.isclose(value, formula(np.ones(7)))
        found = item_shares(aggregate, items, value)
        for i in range(7):
            step = 1e-6 * np.eye(7)[i]
            derivative = (formula(np.ones(7) + step) - formula(np.ones(7) - step)) / 2e-6
            assert math.isclose(found[i], 7 * derivative, rel_tol=1e-5, abs_tol=1e-8)
    assert item_shares(max, [1.0, 2.0], 2.0) is None


def test_an_imported_checkpoint_scores_as_its_source(tasks, results, models_folder, tmp_path):
    import_checkpoint(models_folder / "llama", tmp_path / "imported")
    subject = open_subject(str(tmp_path / "imported"))
    assert subject.checkpoint is not None
    found = compare(tasks.run(subject.load(torch.float32, "cpu"), subject), results["llama"])
    for task, metrics in found.items():
        for name, row in metrics.items():
            value = results["llama"][task].scores[name].value
            assert row["paired"] and max(abs(row["difference"]), row["stderr"]) <= 1e-4 * value


def test_only_the_first_items(data, models_folder):
    limited = find_tasks(["hellaswag,wikitext2"], data, limit=2, sequence_length=WINDOW)
    subject = open_subject(str(models_folder / "llama"))
    found = limited.run(subject.load(torch.float32, "cpu"), subject)
    assert {name: result.items for name, result in found.items()} == {"hellaswag": 2, "wikitext2": 2, "wikitext": 2}


def test_scores_that_are_not_finite_are_refused(tasks, models_folder):
    subject = open_subject(str(models_folder / "llama"))
    model = subject.load(torch.float32, "cpu")
    model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match="wikitext2"):
        tasks.run(model, subject)


@pytest.mark.parametrize("name", ["wikitext2", "lambada"])
def test_a_perplexity_beyond_all_numbers_is_an_error(name, data, models_folder):
    subject = open_subject(str(models_folder / "ours"))
    model = subject.load(torch.float32, "cpu")
    model.lm_head.weight.data.mul_(1e6)
    with pytest.raises(UserError, match=f"the perplexity of {name} is beyond the largest number"):
        find_tasks([name], data, sequence_length=WINDOW, limit=2).run(model, subject)


def test_a_group_of_lm_eval(tasks, models_folder, results):
    """Its items are those of its tasks, and so is the mean; its differences are not of single items."""
    from lm_eval.api.group import Group
    from lm_eval.config.group import GroupConfig

    metric = [{"metric": "acc", "weight_by_size": True}]
    group = Group.from_config(GroupConfig(group="both", task=["lambada", "hellaswag"], aggregate_metric_list=metric))
    members = {name: tasks.lm_tasks[name]["tasks"][name] for name in ("lambada", "hellaswag")}
    for task in members.values():
        group.add(task)
    subject = open_subject(str(models_folder / "ours"))
    lm = wrapped(subject.load(torch.float32, "cpu"), subject.tokenizer, batch_size=4)
    found = run_lm_eval(lm, {"tasks": members, "groups": {"both": group}, "group_map": {"both": group.child_names}})
    assert set(found) == {"both", "lambada", "hellaswag"} and found["both"].items == 24
    alone = [results["ours"][name].scores["acc"].value for name in members]
    assert math.isclose(found["both"].scores["acc"].value, np.mean(alone)) and found["both"].scores["acc"].stderr > 0
    assert not compare(found, found)["both"]["acc"]["paired"]


@pytest.mark.parametrize(
    ("names", "folder", "said"),
    [
        pytest.param(["hellaswagg"], True, "did you mean hellaswag", marks=pytest.mark.processes),
        pytest.param(["arc_easy"], True, "arc_easy", marks=pytest.mark.processes),  # the tests have no network
        (["humaneval"], True, "--run-code"),
        (["wikitext2"], False, "wikitext2-raw-test.txt"),
        (None, False, "--data"),
    ],
)
def test_tasks_that_cannot_be_had(names, folder, said, data):
    """lm-eval takes fifteen seconds to list its tasks, so that those are in a group of tests."""
    with pytest.raises(UserError, match=said):
        find_tasks(names, data if folder else None)


def test_a_folder_without_the_file(tmp_path):
    for names, path in (("hellaswag", tmp_path), (None, tmp_path), (None, Path("nowhere"))):
        with pytest.raises(UserError):
            find_tasks([names] if names else None, path)
