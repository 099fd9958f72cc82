"""From one kind of attention to another: what changes, what stays exact, and on which text the rest is chosen.

converted, done = convert_model(model, target_config(model.config, "mla", cache_size=64), calibration)
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from modeling_gqa_cli.errors import UserError, did_you_mean

from ..cache_quantized import rounds_cache
from ..common.batches import Batch, evaluating, first_batches
from ..common.progress import ShowProgress, no_progress
from ..configuration_gqa import GQAConfig
from ..configuration_overrides import PER_LAYER_FIELDS
from ..modeling_gqa import GQAForCausalLM
from .divergence import compare_predictions, predicted_states, require_one_device
from .fitting import PASSES
from .layer_store import LayerStore
from .sequential import NewLayer, Setting, as_own, assemble, convert_layers
from .streams import scratch
from .targets import BOOKKEEPING_FIELDS, configuration, describe, layer_frequencies, lossy_layers

# "auto" compares settings on at most this number of tokens, on which two settings differ by more than two texts.
SELECTION_TOKENS = 16384
# Tokens that a setting is tried on where trials are made without gradient steps.
CANDIDATE_TOKENS = 16384
# What `NewLayer` says of how a layer was converted, as in `conversion.json`.
CHOSEN = ("loss", "gain", "alpha", "key_mean", "mean_share", "learning_rate", "ridge")
METHODS = ("lowrank", "auto", "mean")


def convert_model(
    model: PreTrainedModel,
    target_config: GQAConfig,
    calibration: Sequence[Batch] | None = None,
    *,
    selection: Sequence[Batch] | None = None,
    method: str = "lowrank",
    regroup: bool | None = None,
    refit: bool | None = None,
    refine: int | None = None,
    polish: int = 0,
    polish_text: Sequence[Batch] = (),
    divide_cache: bool = False,
    key_mean: bool = True,
    share_weights: bool = False,
    seed: int = 0,
    folder: Path | None = None,
    show_progress: ShowProgress = no_progress,
) -> tuple[GQAForCausalLM, dict[str, Any]]:
    """Give a trained model another attention.

    With text, layers are converted in order. Each is calibrated on the input that the converted layers before it give.

    Three conversions are exact: to a multiple of the key/value heads, from MQA to MLA, and from MLA without a latent
    norm to MHA. Every other conversion is lossy.

    Args:
        model: the source, of this package or of a family that `load_source` reads; it is not changed.
        target_config: the same model with other attention, best made by `target_config`. The conversion sets the
            frequencies, softmax scale and biases of its MLA layers, which have no latent norm.
        calibration: batches of model inputs of typical text, `[{"input_ids": (B, T)}, ...]`, with "attention_mask" or
            "position_ids" where they are needed; `None`: the weights alone decide.
        selection: batches that judge the whole model, where "auto" chooses and in the training at the end; `None`:
            these get the last quarter of `calibration`, at most `SELECTION_TOKENS` tokens.
        method: how heads are merged, one of `METHODS`. "lowrank" keeps the leading subspace of the heads of a group.
            "auto" tries settings of it, and MLA with and without choices by layer, and keeps the one with the least
            KL(source || converted) on `selection`; trials make no gradient steps and see 16,384 tokens.
        regroup: whether heads may be merged with others than their neighbours; `None`: "auto" tries both, "lowrank"
            does.
        refit: whether each converted layer's output projection is fitted to `calibration` by least squares, so that the
            residual stream comes back to the source's; `None`: "auto" and "lowrank" do.
        refine: passes over `calibration` in which each converted layer's attention is trained by gradient steps before
            the fit; `None`: two where it is fitted, else none. Documents that they do not see judge both: in each layer
            each is kept only where it lowers the error there, by which learning rate and ridge are chosen too.
        polish: tokens on which the new attention of all lossy layers is trained at the end on the source's predictions;
            see `polish.polish`. What does not lower the KL on `selection` is not kept.
        polish_text: batches of text for that step, which nothing was fitted to. Where they have fewer tokens than
            `polish`, `calibration` is used as well.
        divide_cache: whether each lossy MLA layer divides its R + P cached numbers between R and P anew: by the error
            that is left on documents which a trial is not fitted to, else by a rule.
        key_mean: whether lossy MLA layers keep the mean of their keys beside the cache, exactly (`GQAConfig.key_mean`).
            The method "auto" tries to leave it out, too.
        share_weights: whether the result's other parameters are the source's own tensors, instead of copies.
        seed: of regrouping.
        folder: an existing folder where each new layer is written when it is finished. The same call with a folder that
            an interrupted one has left goes on from its layers.
        show_progress: returns, for a description, what wraps an iterable to show progress.

    Returns:
        The converted model, and what was done: {"exact", "method", "setting", "layers", "candidates", "polish"}, the
        entries of that name in `conversion.json`.

    Raises:
        UserError: this cannot be converted, and why.

    Example:
        ```python
        import torch

        from modeling_gqa import GQAConfig, GQAForCausalLM
        from modeling_gqa.conversion import convert_model, target_config

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = GQAForCausalLM(GQAConfig(vocab_size=64, attention_kind="mha", **sizes))
        batches = [{"input_ids": torch.randint(64, (4, 16))}]
        target = target_config(model.config, "mla", cache_size=24)
        converted, done = convert_model(model, target, batches, method="lowrank")
        assert converted.config.attention_kind == "mla" and not done["exact"]
        ```
    """
    require_one_device(model)
    model = as_own(model)
    if method not in METHODS:
        near = did_you_mean(str(method), METHODS)
        raise UserError(f"method={method!r} is unknown{near}: choose one of {', '.join(METHODS)}")
    if rounds_cache(model.config):
        raise UserError("the model's cache is quantized: load it with cache_quantization=None, and quantize the result")
    check_same_model(model.config, target_config)
    lossy = lossy_layers(model.config, target_config)
    if lossy and (method == "auto" or polish) and calibration and selection is None:
        calibration, selection = hold_out(calibration)
    after = [target_config.per_layer_config[index] for index in lossy]
    to_mla = {layer.attention_kind == "mla" for layer in after}
    for name, value in (("refit", refit), ("refine", refine), ("polish", polish)):
        if value and lossy and not calibration:
            raise UserError(f"{name} needs calibration text")
        if value is not None and value < 0:
            raise UserError(f"{name}={value} must not be negative")
    if to_mla == {True} and method not in ("auto", "lowrank"):
        raise UserError(f"method={method!r} merges heads, and to MLA none are merged: choose auto or lowrank")
    if all(layer.num_key_value_heads == 1 for layer in after):
        regroup = regroup or False  # one group holds all heads, however they are ordered
    same: Any = {"divide_cache": divide_cache, "key_mean": key_mean, "seed": seed}
    setting = Setting.start(method, regroup, refit, bool(calibration), **same)
    setting = replace(setting, refine=PASSES * setting.refit if refine is None else refine)
    with scratch(model.device) as source_states:
        search = Search(model, target_config, calibration, selection, source_states, LayerStore(folder), show_progress)
        if method == "auto" and lossy and selection:
            setting = search.run(setting, to_mla, regroup)
        converted, layers = search.converted(setting, share=share_weights)
    polished = None
    if polish and lossy and calibration and selection:
        from .polish import polish as train

        text = first_batches([*polish_text, *calibration], polish)
        polished = train(model, converted, text, selection, lossy, polish, show_progress, seed)
    done = {
        "exact": not lossy,
        "method": setting.method if lossy else "exact",
        "setting": setting.as_json() if lossy else None,
        "layers": describe_changes(model.config, converted.config, layers),
        "candidates": [{"name": str(tried), "kl": kl} for kl, tried in search.tried],
        "polish": polished,
    }
    return converted, done


def check_same_model(source: GQAConfig, target: GQAConfig) -> None:
    """Raise `UserError` where two configurations differ in more than their attention."""

    def whole(config: GQAConfig) -> dict[str, Any]:
        skipped = BOOKKEEPING_FIELDS | set(PER_LAYER_FIELDS)
        values = {name: value for name, value in config.to_dict().items() if name not in skipped}
        rope = {k: v for k, v in values["rope_parameters"].items() if k != "partial_rotary_factor"}
        return values | {"rope_parameters": rope}

    compared = [("", whole(source), whole(target))]
    for index, layers in enumerate(zip(source.per_layer_config, target.per_layer_config, strict=True)):
        names = ["num_attention_heads", "intermediate_size", "mlp_bias", "attention_dropout", "qk_norm"]
        grouped = all(layer.attention_kind != "mla" for layer in layers)
        before, after = (
            {name: getattr(layer, name) for name in [*names, *["head_dim"] * grouped]}
            | ({"rotary frequencies": layer_frequencies(layer)} if grouped else {})
            for layer in layers
        )
        compared.append((f"layer {index}: ", before, after))
    for where, ours, theirs in compared:
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise UserError(
                    f"{where}the target's {name}={theirs.get(name)!r} differs from the source's {ours.get(name)!r}: a "
                    "conversion changes the attention alone; build the target with `target_config`"
                )


def hold_out(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Split batches into the first three quarters and the last quarter; fewer than four are split into rows first.

    The second part has at most `SELECTION_TOKENS` tokens, or one batch.
    """
    if len(batches) < 4:
        batches = [
            {name: tensor[row : row + 1] for name, tensor in batch.items()}
            for batch in batches
            for row in range(len(batch["input_ids"]))
        ]
    if len(batches) < 4:
        raise UserError(f"{len(batches)} sequences of text are too few to hold some out: give 4, or `selection`")
    held_out = len(batches) // 4
    while held_out > 1 and sum(batch["input_ids"].numel() for batch in batches[-held_out:]) > SELECTION_TOKENS:
        held_out -= 1
    return list(batches[:-held_out]), list(batches[-held_out:])


def describe_changes(before: GQAConfig, after: GQAConfig, new_layers: Mapping[int, NewLayer]) -> list[dict[str, Any]]:
    """Return one `LayerReport` for each layer, from the configurations before and after, and new layers by index."""
    pairs = zip(before.per_layer_config, after.per_layer_config, strict=True)
    return [
        {"layer": index, "from": describe(old), "to": describe(new)}
        | {name: getattr(new_layers.get(index), name, None) for name in CHOSEN}
        for index, (old, new) in enumerate(pairs)
    ]


@dataclass
class Search:
    """Settings tried on one model, with the KL(source || converted) of each on the text `selection`.

    Args:
        model, target, calibration, selection: as for `convert_model`.
        source_states: filled with the source's last hidden states on `selection`, to compare every candidate with.
        layers: returns where the new layers of a setting are kept; what is there already is not converted again.
        show_progress: wraps loops.
        tried: the settings tried so far, each after its KL in nats per token.
    """

    model: GQAForCausalLM
    target: GQAConfig
    calibration: Sequence[Batch] | None
    selection: Sequence[Batch] | None
    source_states: MutableMapping[int, torch.Tensor]
    layers: LayerStore
    show_progress: ShowProgress = no_progress
    tried: list[tuple[float, Setting]] = field(default_factory=list)

    def converted(
        self, setting: Setting, share: bool, trial: bool = False
    ) -> tuple[GQAForCausalLM, dict[int, NewLayer]]:
        """Convert the model by `setting`, and return the new layers by index, too.

        `share`: whether the result's other tensors are the source's own. `trial`: `CANDIDATE_TOKENS` tokens are enough.
        """
        progress, done = self.show_progress("converting layers"), self.layers.of(setting)
        text = first_batches(self.calibration, CANDIDATE_TOKENS) if trial and self.calibration else self.calibration
        fields = convert_layers(self.model, self.target, text, setting, done, progress)
        layers = dict(done)
        states = {index: layer.state for index, layer in layers.items()}
        return assemble(self.model, configuration(self.target, fields), states, share), layers

    def best_of(self, settings: Iterable[Setting], trial: bool) -> Setting:
        """Try the settings that were not tried yet and return the best of all tried; `trial` as for `converted`."""
        tried = {setting for _, setting in self.tried}
        for setting in self.show_progress("trying settings")([setting for setting in settings if setting not in tried]):
            if (kl := self.layers.measured(setting)) is None:
                if not self.source_states:
                    with evaluating(self.model):
                        states = (predicted_states(self.model, batch) for batch in self.selection or ())
                        self.source_states.update(enumerate(states))
                candidate, _ = self.converted(setting, share=True, trial=trial)
                kl = compare_predictions(self.model, candidate, self.selection, source_states=self.source_states)["kl"]
                self.layers.measure(setting, kl)
                del candidate  # before there is another one
            self.tried.append((kl, setting))
        return min(self.tried, key=lambda pair: pair[0])[1]

    def run(self, start: Setting, to_mla: set[bool], regroup: bool | None) -> Setting:
        """Search greedily: one choice after another, each with the best of those before it, without gradient steps.

        `to_mla`: whether the layers that change with loss become MLA; both values for a mixed model. `regroup`: of the
        settings; `None` to try both.
        """
        first = best = replace(start, refine=0)
        trial = first != start
        if False in to_mla:
            groupings = [True, False] if regroup is None else [regroup]
            settings = [replace(first, weighted=weighted, regroup=r) for weighted in (True, False) for r in groupings]
            best = self.best_of(settings, trial)
        if True in to_mla:
            best = self.best_of((replace(best, by_layer=by_layer) for by_layer in (True, False)), trial)
            best = self.best_of((replace(best, key_mean=kept) for kept in {start.key_mean, False}), trial)
        return replace(best, refine=start.refine)
