"""The models that a study trains: the source, and its conversions."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from modeling_gqa import GQAForCausalLM
from modeling_gqa.checkpoints.files import local_folder
from modeling_gqa.common.atomic import read_object
from modeling_gqa.common.console import say
from modeling_gqa.conversion import convert_model, load_source
from modeling_gqa.data.blocks import tokenize
from modeling_gqa.data.packing import pack
from modeling_gqa.data.source import open_source, split_source
from modeling_gqa.data.tokenizer import load_tokenizer
from modeling_gqa.training.comparison.runs import Runs
from modeling_gqa.training.recipe import load_recipe
from modeling_gqa.training.results import RESULTS
from modeling_gqa.training.run_setup import fingerprint
from modeling_gqa.training.uptraining import UptrainRecipe
from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.recipes import as_arguments

from .recipe import SET_IN_RUNS, StudyRecipe
from .study import Student, Study, check_source

BATCH = 8  # sequences
APART = 8  # every so many sequences one calibrates, so that they come from more documents
PAPERS_METHODS = ("mean", "first", "random")  # which see no text


def uptraining_of(recipe: StudyRecipe) -> tuple[UptrainRecipe, dict[str, Any]]:
    """Return the recipe of a study's runs, as if the source were trained, and its values; raises `UserError`."""
    options = {**recipe.options_of_runs(), "student": recipe.source, "max_steps": 1, "pretraining_fraction": 0}
    return load_recipe([recipe.uptraining, *as_arguments(options)], UptrainRecipe)


def values_of_runs(recipe: StudyRecipe) -> dict[str, Any]:
    """Return what all runs of a study have alike: the source, and options of uptraining that the study does not set."""
    _, values = uptraining_of(recipe)
    alike = {name: value for name, value in values.items() if name not in SET_IN_RUNS}
    return alike | {"source": fingerprint(recipe.source)}


def open_study(name: str, recipe: StudyRecipe) -> tuple[Study, GQAForCausalLM, PreTrainedTokenizerBase]:
    """Load the source, and return the study of it; raises `UserError`."""
    try:
        source = load_source(recipe.source).eval()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the source {recipe.source}: {error}") from error
    check_source(source.config, recipe)
    tokens = recipe.pretraining_tokens
    if tokens is None:
        tokens = (read_object(local_folder(recipe.source) / RESULTS) or {}).get("tokens_seen")
    if not isinstance(tokens, int) or tokens < 1:
        raise UserError(f"shares need the pretraining tokens of {recipe.source}: give --pretraining-tokens")
    return Study(name, recipe, source.config, tokens), source, load_tokenizer(recipe.source)


def convert_students(study: Study, runs: Runs, source: GQAForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the source and its conversions to `students/`, each in one launch."""
    logging.disable_progress_bar()  # of writing models, which takes a moment
    text: list[dict[str, torch.Tensor]] = []
    for student, seed in study.students_by_seed():
        folder = study.student_folder(student, seed)
        with runs.claim(f"student-{folder.name}").acquire(timeout=-1):
            if (folder / "config.json").is_file():
                continue
            say(f"Converting {folder.name} ...")
            if student.method and student.method not in PAPERS_METHODS and not text:
                text = calibration(study, tokenizer)
            model = convert(study, source, student, seed, text)
            partial = folder.with_name(f"{folder.name}.partial")
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            partial.rename(folder)


def convert(study: Study, source: GQAForCausalLM, student: Student, seed: int, text: Sequence[Any]) -> GQAForCausalLM:
    """Return the source with fewer heads, or itself."""
    if not student.method:
        return source
    target = study.config_with(student.heads)
    seen = None if student.method in PAPERS_METHODS else text
    converted, _ = convert_model(source, target, seen, method=student.method, seed=seed)
    return converted


def calibration(study: Study, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, torch.Tensor]]:
    """Return batches of the training text."""
    recipe, _ = uptraining_of(study.recipe)
    split = split_source(open_source(recipe, recipe.data_seed or recipe.seed), recipe)
    wanted = max(1, study.recipe.calibration_tokens // recipe.sequence_length)
    packed = pack(tokenize(split.pieces("train"), tokenizer), recipe.sequence_length)
    blocks = np.stack(list(islice(packed, 0, wanted * APART, APART))).astype(np.int64)
    return [{"input_ids": x[:, 0], "position_ids": x[:, 1]} for x in torch.from_numpy(blocks).split(BATCH)]
