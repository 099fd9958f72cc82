"""The search for the setting of a conversion that changes the model's predictions least."""

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..common.progress import ShowProgress, no_progress
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .calibration import Batch, evaluating, first_batches
from .layer_store import Kept
from .layers.latent import ALPHAS
from .measuring import compare_predictions, predicted_states
from .sequential import NewLayer, Setting, assemble, convert_layers
from .targets import Fields, configuration

# Tokens that a setting is tried on where trials are made without gradient steps.
CANDIDATE_TOKENS = 16384


@dataclass
class Search:
    """Settings tried on one model, with the KL(source || converted) of each on the text `selection`.

    Args:
        model: the source.
        target: the configuration to convert it to.
        calibration: text to calibrate on, if any.
        selection: text that settings are compared on, if any.
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
    layers: Kept
    show_progress: ShowProgress = no_progress
    tried: list[tuple[float, Setting]] = field(default_factory=list)

    def converted(
        self, setting: Setting, share: bool, trial: bool = False
    ) -> tuple[GQAForCausalLM, list[Fields], dict[int, NewLayer]]:
        """Convert the model by `setting`.

        Args:
            setting: the setting.
            share: whether the result's other tensors are the source's own, instead of copies.
            trial: whether `CANDIDATE_TOKENS` tokens of the text are enough.

        Returns:
            The converted model, the fields of all its layers, and the new layers by index.
        """
        progress, done = self.show_progress("converting layers"), self.layers.of(setting)
        text = first_batches(self.calibration, CANDIDATE_TOKENS) if trial and self.calibration else self.calibration
        fields = convert_layers(self.model, self.target, text, setting, done, progress)
        layers = dict(done)
        states = {index: layer.state for index, layer in layers.items()}
        return assemble(self.model, configuration(self.target, fields), states, share), fields, layers

    def best_of(self, settings: Iterable[Setting], trial: bool) -> Setting:
        """Try the settings that were not tried yet and return the best of all tried; `trial` as for `converted`."""
        tried = {setting for _, setting in self.tried}
        for setting in self.show_progress("trying settings")([setting for setting in settings if setting not in tried]):
            if (kl := self.layers.measured(setting)) is None:
                self.see_source()
                candidate, _, _ = self.converted(setting, share=True, trial=trial)
                kl = compare_predictions(self.model, candidate, self.selection, source_states=self.source_states)["kl"]
                self.layers.measure(setting, kl)
                del candidate  # before there is another one
            self.tried.append((kl, setting))
        return min(self.tried, key=lambda pair: pair[0])[1]

    def see_source(self) -> None:
        """Fill `source_states`, once."""
        if not self.source_states:
            with evaluating(self.model):
                self.source_states.update(
                    (number, predicted_states(self.model, batch)) for number, batch in enumerate(self.selection)
                )

    def run(self, start: Setting, to_mla: set[bool], regroup: bool | None) -> Setting:
        """Search greedily: one choice after another, each with the best of those before it.

        Settings are tried without gradient steps, which take most of the time, and then on less text.

        Args:
            start: the setting to begin with.
            to_mla: whether the layers that change with loss become MLA; both values for a mixed model.
            regroup: of the settings; `None` to try both.
        """
        first = best = replace(start, refine=0)
        trial = first != start
        if False in to_mla:
            groupings = [True, False] if regroup is None else [regroup]
            settings = [replace(first, weighted=weighted, regroup=r) for weighted in (True, False) for r in groupings]
            best = self.best_of([*settings, replace(first, method="procrustes", regroup=groupings[0])], trial)
        if True in to_mla:
            best = self.best_of((replace(best, alpha=alpha) for alpha in ALPHAS), trial)
        return replace(best, refine=start.refine)
