"""The benchmark of serving runs, on sizes at which its times mean nothing."""

import json

from benchmarks import serving

SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
}


SYSTEMS = [
    "MLA, vLLM",
    "Llama of equal cache, vLLM",
    "MHA source as Llama, vLLM",
    "MLA, generate_batch",
    "MLA, generate",
]


def test_every_engine(tmp_path, monkeypatch):
    """Each answers with all tokens; the cache of MLA and of its equal has room for four times the MHA source's."""
    described = {
        "machine": "any",
        "torch": "",
        "load_before": 0.0,
        "read_gb_s": 1.0,
        "matmul_gflop_s": {"float32": 1.0},
    }
    monkeypatch.setattr(serving, "describe_machine", lambda device, dtypes: described)
    arguments = serving.ServingArguments(
        systems=SYSTEMS,
        requests=[1, 5],
        rounds=[2, 1],
        prompt_tokens=20,
        new_tokens=6,
        cache_gib=0.004,
        eager=True,
        output=str(tmp_path),
    )
    serving.main(arguments, serving.ServingSizes(**SIZES))
    rows = json.loads((tmp_path / "serving.json").read_text())["rows"]
    assert [(row["system"], row["requests"]) for row in rows] == [
        (name, requests) for requests in (1, 5) for name in SYSTEMS
    ]
    assert all(row["seconds"] > 0 and row["ratio"] > 0 and row["prompts_ratio"] > 0 for row in rows)
    bytes_per_token = {row["system"]: row["bytes_per_token"] for row in rows}
    room = {row["system"]: row["room"] for row in rows}
    assert bytes_per_token["MLA, vLLM"] == bytes_per_token["Llama of equal cache, vLLM"] == 2 * 64 * 4
    assert room["MLA, vLLM"] == room["Llama of equal cache, vLLM"]
    assert 4 * room["MHA source as Llama, vLLM"] <= room["MLA, vLLM"] <= 5 * room["MHA source as Llama, vLLM"]
