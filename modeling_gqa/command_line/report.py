"""The command `report`: what models cost, from their configurations alone."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from ..common.device import usable_device
from ..common.errors import UserError
from ..common.pictures import check_picture, plot_costs, save
from ..common.results import to_json
from ..common.tables import Table
from ..conversion.command.options import Kind
from ..costs import Machine, Model, report
from ..costs.comparison import Costs, compare
from ..costs.configurations import PRESETS, changed, find_model
from ..costs.measuring import measure_decoding, measure_machine
from .console import out, printable, progress_bars, user_errors

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
GIB, GB, TERA = 2**30, 1e9, 1e12
MOST, LONGEST = 1e9, 2**31 - 1  # of GiB, GB/s and TFLOP/s, and of tokens and rows
CONTEXTS, ROWS = [1024, 8192, 32768], [1]  # that are shown without --context and --batch-size
SIZES = {
    "attention_kind": (Kind, "Attention of all layers."),
    "hidden_size": (int, "Width of the model."),
    "num_hidden_layers": (int, "Number of layers."),
    "num_attention_heads": (int, "Number of query heads."),
    "num_key_value_heads": (int, "GQA: number of key/value heads."),
    "head_dim": (int, "Size of a head."),
    "intermediate_size": (int, "Width of the MLP."),
    "vocab_size": (int, "Number of tokens that there are."),
    "sliding_window": (int, "Tokens that each layer sees."),
    "kv_lora_rank": (int, "MLA: size R of the latent."),
    "q_lora_rank": (int, "MLA: size of the latent of queries."),
    "qk_nope_head_dim": (int, "MLA: size N of a head's part without positions."),
    "qk_rope_head_dim": (int, "MLA: size P of the rotary key."),
    "v_head_dim": (int, "MLA: size V of a value."),
}
EXAMPLES = """Examples:

- `modeling-gqa report llama-3-8b --attention-kind mla --memory 80 --bandwidth 3350 --rate 989`
- `modeling-gqa report out/ meta-llama/Llama-3.2-1B deepseek-v3 --context 4096 --context 131072`
- `modeling-gqa report smollm2-135m --attention-kind mla --kv-lora-rank 64 --qk-rope-head-dim 32 --measure`
- `modeling-gqa report --hidden-size 4096 --num-attention-heads 32 --attention-kind gqa --json`
"""
_asked, _machine, _output = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("What is asked", "The machine", "Output")
)


def add_report_command(app: typer.Typer) -> None:
    """Add the command of this file to a command line."""
    app.command("report", epilog=EXAMPLES)(with_sizes(report_))


def with_sizes(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that ends in `**sizes` an option for each of `SIZES`, ahead of its own."""
    own = [x for x in inspect.signature(command).parameters.values() if x.kind != inspect.Parameter.VAR_KEYWORD]
    panel = "One more configuration: the first CONFIG, or the default, with these sizes"
    sizes = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kind | None, typer.Option(help=said, rich_help_panel=panel, show_default=False)],  # type: ignore[operator]
            default=None,
        )
        for name, (kind, said) in SIZES.items()
    ]
    command.__signature__ = inspect.Signature([own[0], *sizes, *own[1:]])  # type: ignore[attr-defined]
    return command


def report_(
    configs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG]...",
            help="Preset, folder with a config.json, that file, or name of a model on the Hub, of which only "
            f"config.json is read. Presets: {', '.join(PRESETS)}.",
            show_default=False,
        ),
    ] = None,
    *,
    context: Annotated[
        list[int], _asked(min=1, max=LONGEST, help="Tokens of each row; may be repeated.", metavar="TOKENS")
    ] = CONTEXTS,
    batch_size: Annotated[
        list[int], _asked(min=1, max=LONGEST, help="Number of rows; may be repeated.", metavar="ROWS")
    ] = ROWS,
    dtype: Annotated[
        Dtype, _asked(help="Of weights and cache. auto: what the first CONFIG names, else bfloat16.")
    ] = "auto",
    memory: Annotated[float | None, _machine(help="Memory for weights and cache, in GiB.", show_default=False)] = None,
    bandwidth: Annotated[
        float | None, _machine(help="What it reads, in GB/s (10^9 bytes).", show_default=False)
    ] = None,
    rate: Annotated[
        float | None, _machine(help="Matrix products in the dtype, in TFLOP/s.", show_default=False)
    ] = None,
    measure: Annotated[
        bool, _machine("--measure", help="Measure this machine, and decoding with random weights on it.")
    ] = False,
    device: Annotated[
        str | None, _machine(help="What --measure measures. Default: cuda where it is, else cpu.", show_default=False)
    ] = None,
    as_json: Annotated[bool, _output("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None,
        _output(help="Picture to write: cache and bound against the context.", metavar="FILE", show_default=False),
    ] = None,
    **sizes: Any,
) -> None:
    """Show what models cost, from their configurations alone: parameters, FLOPs, cache, bytes read, and the bound on
    their speed.

    Nothing is downloaded but `config.json`, and nothing is built unless `--measure` asks for it. With several
    configurations, each is compared with the first. Stock configurations of Llama, Mistral, Qwen2, Qwen3, DeepSeek-V2
    and V3, Youtu, Mixtral and Qwen3-MoE are read, too.
    """
    with user_errors(plot):
        if plot:
            check_picture(plot)
        models, named = find_models(configs or [], {name: value for name, value in sizes.items() if value is not None})
        precision = getattr(torch, dtype) if dtype != "auto" else named or torch.bfloat16
        if device and not measure:
            raise UserError("--device says what --measure measures: give both, or neither")
        where = usable_device(device) if measure else ""
        check_positive({"--memory": memory, "--bandwidth": bandwidth, "--rate": rate})
        machine = find_machine(bandwidth, rate, measure, where, precision)
        room = None if memory is None else memory * GIB
        contexts, rows = sorted(set(context)), sorted(set(batch_size))
        sizes = {"contexts": contexts, "batch_sizes": rows, "dtype": precision}
        reports = [report(model, **sizes, memory=room, machine=machine) for model in models]
        measured = []
        if measure:
            with progress_bars() as show_progress:
                measured = measure_decoding(models, **sizes, device=where, show_progress=show_progress)
        costs = Costs(models, reports, compare(models, machine, **sizes), measured)
        if plot:
            save(plot_costs(models, machine, max(batch_size), max(context), precision), plot)
        if as_json:
            print(to_json(costs.to_dict()), end="", flush=True)
            return
        for section in costs.sections():
            out.print(section.to_rich() if isinstance(section, Table) else f"{printable(section)}\n", soft_wrap=False)
        if plot:
            out.print(f"Wrote {printable(plot)}.", soft_wrap=True)


def find_models(sources: list[str], sizes: dict[str, Any]) -> tuple[list[Model], torch.dtype | None]:
    """Return the models that the command line names, each under a name of its own, and the first one's dtype."""
    found = [find_model(source) for source in sources]
    models = [Model(model.config, printable(model.name), model.experts) for model, _ in found]
    if sizes or not models:
        models.append(changed(models[0] if models else None, sizes))
    names: list[str] = []
    for index, model in enumerate(models):
        alike = sum(other.name == model.name for other in models) > 1
        name = f"{model.name} ({printable(sources[index])})" if alike and index < len(sources) else model.name
        again = sum(earlier == name or earlier.startswith(f"{name} no. ") for earlier in names)
        names.append(f"{name} no. {again + 1}" if again else name)
    models = [Model(model.config, name, model.experts) for model, name in zip(models, names, strict=True)]
    return models, found[0][1] if found else None


def check_positive(options: dict[str, float | None]) -> None:
    """Raise `UserError` for an option that is not more than 0, or larger than any machine."""
    for name, value in options.items():
        if value is not None and not 0 < value <= MOST:
            raise UserError(f"{name} {value:g} must be more than 0, and at most {MOST:g}")


def find_machine(
    bandwidth: float | None, rate: float | None, measure: bool, device: str, dtype: torch.dtype
) -> Machine | None:
    """Return the machine that the options describe, or this one; raises `UserError` for half of a description."""
    if measure:
        if bandwidth or rate:
            raise UserError("--measure measures bandwidth and rate: leave out --bandwidth and --rate")
        return measure_machine(device, dtype)
    if (bandwidth is None) != (rate is None):
        raise UserError("a bound needs both --bandwidth and --rate")
    return Machine(bandwidth * GB, rate * TERA) if bandwidth and rate else None
