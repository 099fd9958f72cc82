"""The options of the commands that take no recipe, each declared once."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import UsageError
from .parser import option

Kind = Literal["mha", "mqa", "gqa", "mla"]
Method = Literal["lowrank", "auto", "mean"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]  # "auto" names no dtype of torch
Bits = Literal["2", "3", "4", "6", "8", "fp8", "16"]
IGNORE_FIELD = "Field of SOURCE's configuration that is refused as unknown, and changes nothing."
SIZES = ("num_key_value_heads", "kv_lora_rank", "qk_rope_head_dim", "cache_size", "cache_bytes", "cache_share")


def spelled(name: str) -> str:
    """Return a field's name as the command line shows it."""
    return "--" + name.replace("_", "-")


def options(help: str, **more: Any) -> Any:
    """Return a field whose option takes several values, and may be repeated."""
    return option(help, action="extend", **more)


def switch(help: str) -> Any:
    """Return a field of type `bool | None` whose option may stand alone."""
    return option(help, nargs="?", const=True)


@dataclass
class Files:
    """SOURCE and TARGET, which are not options."""

    source: str
    target: Path


@dataclass
class NewAttention:
    _argument_group_name = "The new attention; give its sizes in one way"

    attention_kind: Kind = field(metadata={"help": "Attention of the result."})
    num_key_value_heads: int | None = option("GQA: key/value heads, a divisor of the query heads.")
    kv_lora_rank: int | None = option("MLA: size R of the cached latent.")
    qk_rope_head_dim: int | None = option("MLA: size P of the cached rotary key, even, 0 for none. Default: R.")
    cache_size: int | None = option("MLA: R + P, numbers cached per token and layer.")
    cache_bytes: int | None = option("MLA: the same in bytes, in the result's dtype.")
    cache_share: float | None = option("GQA and MLA: the same by what SOURCE caches, such as 0.5.")
    cache_bits: Literal["auto"] | None = option(
        "Round the cache on --text: --cache-share is then of bytes; MLA's size is tried out, or given."
    )
    budget: float | None = option(
        "Bytes per token of the whole cache, or a share, divided over layers by loss; on --text."
    )
    layers: str | None = option("Layers to change, such as 0,2-5. Default: all.", metavar="LAYERS")
    engine: Literal["vllm"] | None = option("Take sizes that this engine's fast kernels take.", aliases=["--for"])


@dataclass
class HowToConvert:
    _argument_group_name = "Method"

    method: Method = option("How heads are merged; auto tries settings on --text. Default: lowrank.", "lowrank")
    regroup: bool | None = switch("Choose which heads to merge. --no-regroup: neighbours.")
    refit: bool | None = switch("Fit each output projection on the text. Default: with --text.")
    key_mean: bool | None = switch("MLA: keep the keys' mean beside the cache. Default, but with --for vllm.")
    refine: int | None = option("Passes of gradient steps in each layer. Default with --text: 2.")
    polish: int | None = option(
        "Tokens to train all layers on at the end, by KL. Default with --text, but for --method mean: twice "
        "--calibration-tokens, 8 times on a GPU, if memory allows."
    )
    seed: int = option("Seed of what is drawn, and of the text's order. Default: 0.", 0)


@dataclass
class Text:
    _argument_group_name = "Text"

    text: list[Path] | None = options(
        "Files or folders: .txt .md .rst .py .json .jsonl .parquet. Parts: to calibrate, choose, measure."
    )
    evaluation_text: list[Path] | None = options("Measure on this text instead of a part of --text.")
    text_column: str = option("Column that holds the text. Default: text.", "text")
    calibration_tokens: int = option("Tokens to calibrate on. Default: 32768.", 32768)
    evaluation_tokens: int = option("Tokens to measure on. Default: 16384.", 16384)
    sequence_length: int | None = option("Tokens of a sequence. Default: 1024, or the model's positions.")
    batch_size: int = option("Sequences in a batch; fewer need less memory. Default: 4.", 4)


@dataclass
class Running:
    _argument_group_name = "Running"

    dtype: Dtype = option("Dtype of the result and, on a CPU fast in it, of computing. Default: SOURCE's.", "auto")
    ignore_field: list[str] | None = options(IGNORE_FIELD)
    device: str | None = option("Such as cpu or cuda:1. Default: cuda if there is one.")


@dataclass
class ImportOptions:
    _argument_group_name = "Options"

    dtype: Literal["float32", "bfloat16", "float16"] | None = option("What a .gguf file is unpacked to: bfloat16.")
    ignore_field: list[str] | None = options(IGNORE_FIELD)


@dataclass
class ExportOptions:
    _argument_group_name = "Options"

    family: str | None = option(
        "llama, mistral, ministral3, qwen2, qwen3, phi3, granite, smollm3, granitemoehybrid, olmo2, olmo3, "
        "gemma3_text, deepseek_v3. Default: the first that fits."
    )
    engine: Literal["transformers"] | None = option(
        "Export also what vLLM's and SGLang's own classes would compute wrongly; the card says what.",
        aliases=["--for"],
    )


@dataclass
class InspectOptions:
    _argument_group_name = "Options"

    ignore_field: list[str] | None = options(IGNORE_FIELD)


@dataclass
class WhatToRound:
    _argument_group_name = "What is rounded"

    cache_share: float | None = option(
        "Bytes of the cache by SOURCE's; bits are chosen by layer and channel, on --text."
    )
    nbits: Bits | None = option("Bits of a number that is cached. Default: 4.")
    key_bits: Bits | None = option("Bits of a key, but MLA's. Default: --nbits.")
    value_bits: Bits | None = option("Bits of a value, but MLA's. Default: --nbits.")
    latent_bits: Bits | None = option("Bits of a number of MLA's latent. Default: --nbits.")
    rope_bits: Bits | None = option("Bits of a number of MLA's rotary key. Default: --nbits.")
    q_group_size: int | None = option("Channels that share a scale. Default: all of a head, or of the latent.")
    exact_tokens: int = option("First tokens of each sequence that are not rounded. Default: 4.", 4)
    polish: int = option("Tokens to train the attention on, with its cache rounded, by KL. Default: 0.", 0)
    residual_length: int = option("Last tokens that are not rounded. Default: 0.", 0)


@dataclass
class Frontier:
    _argument_group_name = "What is compared"

    converted: list[str] | None = options(
        "Conversions of SOURCE, to compare as they are and rounded.", metavar="FOLDER"
    )
    shares: list[float] | None = options("Sizes to try, by SOURCE's cache. Default: 0.4 0.25 0.2 0.15 0.1.")
    loss: float = option("KL in nats that the smallest cache may lose. Default: 0.02.", 0.02)
    picture: Path | None = option("Save a picture: NAME.png, .svg or .pdf.")


@dataclass
class WhatToWrite:
    _argument_group_name = "What is written"

    tokens: int = option("Tokens to write. Default: 65536.", 65536)
    sequence_length: int | None = option("Tokens of a document. Default: 1024, or the model's positions.")
    seed: int = option("Seed of the tokens that are drawn. Default: 0.", 0)


@dataclass
class WhereToWrite:
    _argument_group_name = "Running"

    batch_size: int = option("Documents that are written at once; fewer need less memory. Default: 32.", 32)
    dtype: Dtype = option("Dtype of computing. Default: SOURCE's, or float32 on a CPU slow in it.", "auto")
    device: str | None = option("Such as cpu or cuda:1. Default: cuda if there is one.")


@dataclass
class Sizes:
    _argument_group_name = "One more configuration: the first CONFIG, or the default, with these sizes"

    attention_kind: Kind | None = option("Attention of all layers.")
    hidden_size: int | None = option("Width of the model.")
    num_hidden_layers: int | None = option("Number of layers.")
    num_attention_heads: int | None = option("Number of query heads.")
    num_key_value_heads: int | None = option("GQA: number of key/value heads.")
    head_dim: int | None = option("Size of a head.")
    intermediate_size: int | None = option("Width of the MLP.")
    vocab_size: int | None = option("Number of tokens that there are.")
    sliding_window: int | None = option("Tokens that each layer sees.")
    kv_lora_rank: int | None = option("MLA: size R of the latent.")
    q_lora_rank: int | None = option("MLA: size of the latent of queries.")
    qk_nope_head_dim: int | None = option("MLA: size N of a head's part without positions.")
    qk_rope_head_dim: int | None = option("MLA: size P of the rotary key.")
    v_head_dim: int | None = option("MLA: size V of a value.")


@dataclass
class Asked:
    _argument_group_name = "What is asked"

    context: list[int] | None = options("Tokens of each sequence. Default: 1024 8192 32768.")
    batch_size: list[int] | None = options("Number of sequences. Default: 1.")
    dtype: Dtype = option("Of weights and cache. Default: what the first CONFIG names, else bfloat16.", "auto")


@dataclass
class MachineOptions:
    _argument_group_name = "The machine"

    memory: float | None = option("Memory for weights and cache, in GiB.")
    bandwidth: float | None = option("What it reads, in GB/s (10^9 bytes).")
    rate: float | None = option("Matrix products in the dtype, in TFLOP/s.")
    device: str | None = option("What --measure measures. Default: cuda if there is one.")


@dataclass
class Output:
    _argument_group_name = "Output"

    plot: Path | None = option("Picture to write: cache and bound against the context.")


@dataclass
class WhatToEvaluate:
    _argument_group_name = "What is evaluated"

    against: str | None = option("Another checkpoint, on the same items: folder, .gguf file, or name on the Hub.")
    tasks: list[str] | None = options(
        "wikitext2, lambada, hellaswag, humaneval, or names of lm-eval's tasks. Default: the first three, of those "
        "that --data has.",
        metavar="NAME",
    )
    data: Path | None = option("Folder with the files of these four. Without it lm-eval fetches a task's data.")
    limit: int | None = option("Items of each task at most, from the first on. Default: all.")
    sequence_length: int = option("Tokens of a window of WikiText-2. Default: 2048.", 2048)
    batch_size: int = option("Items in a batch. Default: 8.", 8)


@dataclass
class WhereToEvaluate:
    _argument_group_name = "Running, and what is written"

    dtype: Dtype = option("Dtype of computing. Default: the checkpoint's, or float32 on a CPU slow in it.", "auto")
    device: str | None = option("Such as cpu or cuda:1. Default: cuda if there is one.")
    json: Path | None = option("File to write the scores to, as JSON.")


def parse_layers(text: str) -> list[int]:
    """Read `0,2-5` as `[0, 2, 3, 4, 5]`; raises `UsageError`."""
    layers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise UsageError(f"--layers: {part[:40]!r} is no layer and no range of layers such as 2-5")
        layers.update(range(first, last + 1))
    return sorted(layers)
