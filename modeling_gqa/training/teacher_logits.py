"""The teacher's most likely next tokens for every token of a run's text: computed once, read by any number of runs.

A folder of them holds `train.npy` and `validation.npy`, with a record for every token, and `complete.json`, which says
of which teacher and text they are.
Shapes: B batch, T tokens, V vocabulary, k most likely tokens.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel, default_data_collator

from modeling_gqa_cli.errors import UserError

from ..common.atomic import read_object, sync, write_json, written_aside
from ..common.console import failed_to_write, say
from ..common.progress import progress_bars
from ..common.tables import in_bytes
from ..conversion.divergence import log_softmax
from ..conversion.losses import tokens_at_once
from ..data.blocks import PackedBlocks
from .distillation import load_model, model_inputs
from .run_folder import COMPLETE
from .run_setup import OpenRun, from_main

if TYPE_CHECKING:
    from .uptraining import UptrainRecipe

FORMAT_VERSION = 2
# What a batch holds of the teacher, in the order in which `top_prediction_losses` takes it.
FIELDS = ("teacher_ids", "teacher_log_probs", "teacher_rest", "teacher_target_log_probs")


def record_of(top_k: int, vocab_size: int) -> np.dtype:
    """Return the dtype of one token's record.

    float16 has three bits more than bfloat16, and its range holds every log-probability down to -65504. Its rounding is
    relative, so that the likely tokens, which weigh most in a KL divergence, are rounded least.
    """
    ids = np.uint16 if vocab_size <= 2**16 else np.int32
    rounded = [("ids", ids, (top_k,)), ("log_probs", np.float16, (top_k,))]
    return np.dtype([("rest", np.float32), ("target_log_probs", np.float32), *rounded])


class TeacherBlocks(PackedBlocks):
    """Packed blocks (blocks, 2, T), each with its row of the teacher's records (blocks, T), as examples of training.

    An example holds `FIELDS` as well: ids and log-probabilities of the k most likely tokens (T, k); the logarithm of
    the sum of the others (T,); and the log-probability of the next token (T,).
    """

    def __init__(self, blocks: np.ndarray, records: np.ndarray) -> None:
        super().__init__(blocks)
        self.records, self.top_k = records, records.dtype["ids"].shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        found = self.records[index]  # (T,)
        numbers = (found[name.removeprefix("teacher_")] for name in FIELDS)
        wide = (torch.from_numpy(x.astype(np.int64 if x.dtype.kind in "iu" else np.float32)) for x in numbers)
        return super().__getitem__(index) | dict(zip(FIELDS, wide, strict=True))


def with_teacher_logits(run: OpenRun, recipe: "UptrainRecipe", vocab_size: int) -> OpenRun:
    """Return the run with the teacher's records beside its blocks; every process must call this function.

    Where the folder `recipe.teacher_logits` is missing, the main process loads the teacher and writes it.

    Raises:
        UserError: the folder is of another teacher or text, or is damaged; it cannot be written.
    """
    folder = Path(recipe.teacher_logits or "").expanduser()
    parts: dict[str, Any] = {"train": run.train, "validation": run.validation}
    if run.folder is not None:
        wanted = {
            "teacher": run.folder.notes["models"]["teacher"],
            "sequence_length": recipe.sequence_length,
            "precision": "bfloat16" if recipe.bf16 else "float16" if recipe.fp16 else "float32",
            **{part: run.folder.files[f"data/{part}.npy"] for part in parts},
            "top_k": min(recipe.teacher_top_k, vocab_size),
        }
        if folder.exists():
            check_folder(folder, wanted)
        else:
            write_folder(folder, wanted, recipe, parts, vocab_size)
    from_main(None)  # waits until the folder is there
    try:
        loaded = {part: TeacherBlocks(x.blocks, np.load(folder / f"{part}.npy", "r")) for part, x in parts.items()}
    except (OSError, ValueError) as error:
        raise UserError(f"teacher_logits {folder} is damaged ({error}): delete it, and it is computed again") from error
    say(f"Teacher top {loaded['train'].top_k} tokens, read from {folder}")
    return replace(run, train=loaded["train"], validation=loaded["validation"])


def check_folder(folder: Path, wanted: dict[str, Any]) -> None:
    """Raise `UserError` where the folder is not of what is `wanted`; it names what differs. A larger k is taken."""
    known = read_object(folder / COMPLETE) or {}
    if known.get("format_version") != FORMAT_VERSION:
        raise UserError(f"teacher_logits {folder} exists and holds no teacher's logits: name a folder to be made")
    names = {"train": "training text", "validation": "validation text"}
    differ = [
        names.get(name, name) + (f" ({known[name]} there and {value} here)" if isinstance(value, int | float) else "")
        for name, value in wanted.items()
        if (known[name] < value if name == "top_k" else known[name] != value)
    ]
    if differ:
        raise UserError(
            f"teacher_logits {folder} is of something else, by its {', '.join(differ)}: name another folder"
        )


def write_folder(
    folder: Path, wanted: dict[str, Any], recipe: "UptrainRecipe", parts: dict[str, Any], vocab_size: int
) -> None:
    """Compute the teacher's records of all blocks, and write them whole or not at all.

    Raises:
        UserError: the disk has too little space, another process writes the folder, or the teacher cannot be loaded.
    """
    record = record_of(wanted["top_k"], vocab_size)
    tokens = sum(x.blocks.shape[0] * x.blocks.shape[2] for x in parts.values())
    size = tokens * record.itemsize
    say(
        f"Teacher top {wanted['top_k']} of {vocab_size:,} tokens in float16, ids in {record['ids'].base}, for each of "
        f"{tokens:,} tokens: {in_bytes(size)} in {folder}"
    )
    free = shutil.disk_usage(next(path for path in folder.absolute().parents if path.exists())).free
    if size > free:
        raise UserError(
            f"teacher_logits {folder} takes {in_bytes(size)}, and {in_bytes(free)} are free there: make room, choose a "
            "smaller teacher_top_k, or give less text"
        )

    def refuse(target: Path) -> None:
        if target.exists():
            raise UserError(f"another process has written {target}: run the command again, which reads it")

    try:
        with written_aside(folder, refuse) as aside, progress_bars() as show_progress:
            teacher: Any = load_model("teacher", recipe.teacher, recipe).eval()
            teacher.to(recipe.device)
            for part, blocks in parts.items():
                with (aside / f"{part}.npy").open("wb") as file:
                    header = {"descr": np.lib.format.dtype_to_descr(record), "fortran_order": False}
                    shape = (len(blocks), recipe.sequence_length)
                    np.lib.format.write_array_header_1_0(file, {**header, "shape": shape})
                    step = recipe.per_device_eval_batch_size
                    for start in show_progress(f"teacher, {part}")(range(0, len(blocks), step)):
                        rows = [blocks[i] for i in range(start, min(start + step, len(blocks)))]
                        batch = {name: x.to(recipe.device) for name, x in default_data_collator(rows).items()}
                        file.write(predict(teacher, batch, record, recipe).data)
            write_json(aside / COMPLETE, {"format_version": FORMAT_VERSION, **wanted})
            sync(aside)
    except OSError as error:
        raise UserError(f"{failed_to_write(error, folder)}; {folder} was not written") from error


@torch.no_grad()
def predict(teacher: PreTrainedModel, batch: dict[str, Any], record: np.dtype, recipe: "UptrainRecipe") -> np.ndarray:
    """Return the records (B T,) of a batch, computed in the precision of training."""
    dtype = torch.bfloat16 if recipe.bf16 else torch.float16
    targets = pad(batch["labels"][:, 1:], (0, 1)).clamp(min=0).flatten()  # (B T,)
    with torch.autocast(recipe.device.type, dtype, enabled=recipe.bf16 or recipe.fp16):
        states = teacher.model(**model_inputs(batch)).last_hidden_state.flatten(0, 1)  # (B T, E)
        result, at_once = np.empty(len(states), record), tokens_at_once(states.device, teacher.config.vocab_size)
        places = (result[i : i + at_once] for i in range(0, len(result), at_once))
        for place, state, target in zip(places, states.split(at_once), targets.split(at_once), strict=True):
            log_probs = log_softmax(teacher.lm_head(state))  # (n, V)
            top, ids = log_probs.topk(record["ids"].shape[0])  # (n, k)
            if not top[:, 0].isfinite().all():
                raise UserError("the teacher's logits are not finite: its weights are damaged, or fp16 is too narrow")
            place["target_log_probs"] = log_probs.gather(1, target[:, None])[:, 0].cpu()
            others = log_probs.scatter_(1, ids, -torch.inf)
            place["rest"] = others.logsumexp(-1).cpu()
            place["ids"], place["log_probs"] = ids.cpu(), top.half().cpu()
    return result
