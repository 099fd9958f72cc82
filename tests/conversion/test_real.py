"""A real checkpoint, SmolLM2-135M-Instruct, which `make real` builds: import, conversion, and what they lose."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real import SMOLLM2, cache_folder
from modeling_gqa.common.batches import computing_dtype
from modeling_gqa.conversion import compare_predictions, convert_model, load_source, sequential, target_config
from modeling_gqa.conversion.inspection import inspect_checkpoint
from modeling_gqa.conversion.layers.latent import ALPHAS, GAINS, MEAN_SHARES
from modeling_gqa.data.packing import read_batches

FOLDER, TEXT = cache_folder() / SMOLLM2, cache_folder() / "text"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (FOLDER / "config.json").is_file() or not TEXT.is_dir(), reason="needs make real"),
]


def batches(part: str, tokens: int) -> list[dict[str, torch.Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return read_batches([TEXT / f"{part}.jsonl"], tokenizer, {part: tokens}, sequence_length=512, batch_size=4)[part]


def test_import_computes_the_same():
    """Logits and the eight next tokens are transformers' own Llama's."""
    ours, theirs = (
        load_source(FOLDER, dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32"),
    )
    ids = batches("test", 512)[0]["input_ids"][:, :64]
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-3)
    greedy = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(ours.generate(ids, **greedy), theirs.generate(ids, **greedy))


def test_inspect_knows_it():
    """Its configuration, as transformers writes it from a GGUF file, is accepted."""
    found = inspect_checkpoint(FOLDER)
    assert found["family"] == "llama" and found["cache_bytes_per_token"] == 30 * 384 * 2


def test_layers_calibrated_in_order_and_fitted_lose_less(monkeypatch):
    """MLA at a quarter of the cache in five layers loses less by the defaults than without all that text chooses or
    trains: gradient steps, fits, the mean's share, gain and alpha."""
    source = load_source(FOLDER, dtype=computing_dtype(torch.bfloat16, "cpu")).eval()
    calibration, evaluation = batches("calibration", 4096), batches("test", 2048)
    target = target_config(source.config, "mla", cache_size=96, layers=range(0, 30, 6))
    kls = []
    for options, tried in (({"refit": False}, slice(1)), ({}, slice(None))):
        for name, values in (("MEAN_SHARES", MEAN_SHARES), ("GAINS", GAINS), ("ALPHAS", ALPHAS)):
            monkeypatch.setattr(sequential, name, values[tried])
        converted, _ = convert_model(source, target, calibration, divide_cache=True, share_weights=True, **options)
        kls.append(compare_predictions(source, converted, evaluation)["kl"])
    assert kls[1] < 0.85 * kls[0] and kls[1] < 0.06, kls  # 0.054 and 0.082
