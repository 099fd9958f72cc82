"""How far a converted model is from its source: measured, and as a loss to train on.

Shapes: B batch, T tokens, n predicted tokens of a batch, E hidden size, V vocabulary, k most likely tokens.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import PreTrainedModel

from modeling_gqa_cli.errors import UserError

from ..common.batches import MODEL_INPUTS, Batch, evaluating, hooks
from ..common.progress import Progress
from ..modeling_gqa import GQADecoderLayer, GQAForCausalLM, GQAModel

# Logits are computed for this number of tokens at a time; more no longer fit into the processor's caches, and take
# twice as long.
TOKENS_AT_ONCE = 256
# Number of the teacher's logits, and of float32 copies of the student's, that are in memory at a time in training.
LOGITS_AT_ONCE = 2**25


def require_one_device(*models: torch.nn.Module) -> None:
    """Raise `UserError` for a model that `device_map` or offloading has spread.

    A conversion calls parts of layers by themselves, so the hooks that bring an offloaded weight do not run.
    """
    for model in models:
        devices = sorted({str(parameter.device) for parameter in model.parameters()})
        if "meta" in devices:
            raise UserError(
                "the model's weights are not in memory (offloaded, or on the meta device): load the whole model on "
                "one device, without offloading; what does not fit a GPU fits the processor's memory, device='cpu'"
            )
        if len(devices) > 1:
            raise UserError(
                f"the model's weights are on several devices ({', '.join(devices)}), as device_map places them: load "
                f"the whole model on one, such as {devices[-1]} or cpu"
            )


def not_finite(what: str, dtype: torch.dtype) -> UserError:
    """Return the error for numbers that are nan or infinite; dtypes but float16 have the range of float32, or more."""
    remedy = "choose --dtype float32 or bfloat16" if dtype == torch.float16 else "the weights are damaged"
    return UserError(f"{what} are not finite in {str(dtype).removeprefix('torch.')}: {remedy}")


@torch.no_grad()
def compare_predictions(
    source: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[Batch],
    progress: Progress = iter,
    source_states: Mapping[int, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Compare two models' predictions of the next token of the same document.

    Args:
        source: the causal language model to compare with.
        converted: another one with the same vocabulary.
        batches: `input_ids` (B, T), optionally `attention_mask` (B, T), 0 for padding, and `position_ids` (B, T), 0 at
            the first token of a document, which is not predicted.
        progress: wraps the iteration over the batches.
        source_states: the source's `predicted_states` by number of the batch; computed where it is `None`.

    Returns:
        `perplexity_before` and `perplexity_after`, of source and converted; `kl`, the mean over tokens of
        KL(source || converted) in nats; `top1_agreement`, the share of tokens for which the same next token is the most
        likely in both; `tokens`, the number of tokens predicted.

    Raises:
        UserError: there is nothing to predict, logits are not finite, or a model is spread over devices.

    Example:
        ```python
        import torch

        from modeling_gqa import GQAConfig, GQAForCausalLM
        from modeling_gqa.conversion import compare_predictions, convert_model, target_config

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = GQAForCausalLM(GQAConfig(vocab_size=64, attention_kind="mha", **sizes))
        converted, _ = convert_model(model, target_config(model.config, "mqa"))
        measured = compare_predictions(model, converted, [{"input_ids": torch.randint(64, (2, 16))}])
        assert measured["kl"] > 0 and measured["tokens"] == 30
        ```
    """
    require_one_device(source, converted)
    totals = torch.zeros(4, dtype=torch.float64)
    tokens = 0
    with evaluating(source, converted):
        for index, batch in enumerate(progress(batches)):
            targets = batch["input_ids"][:, 1:][predicted_positions(batch)]  # (n,)
            before = source_states[index] if source_states else predicted_states(source, batch)
            hidden = (before, predicted_states(converted, batch))
            heads = [model.get_output_embeddings() for model in (source, converted)]
            totals += compare_states(heads, hidden, targets)
            tokens += len(targets)
    if not tokens:
        raise UserError("no token to measure on: every one is padding or the first of its document")
    means = totals / tokens
    perplexities = means[:2].exp().tolist()
    for whose, dtype, perplexity in zip(
        ("source", "result"), (source.dtype, converted.dtype), perplexities, strict=True
    ):
        if not math.isfinite(perplexity):
            raise not_finite(f"the {whose}'s logits, or the perplexity, on the held-out text", dtype)
    if not math.isfinite(means[2]):
        raise not_finite("the result's logits on the held-out text", converted.dtype)
    return {
        "perplexity_before": perplexities[0],
        "perplexity_after": perplexities[1],
        "kl": means[2].item(),
        "top1_agreement": means[3].item(),
        "tokens": tokens,
    }


def compare_states(
    heads: Sequence[torch.nn.Module], hidden: Sequence[torch.Tensor], targets: torch.Tensor
) -> torch.Tensor:
    """Return sums over n tokens of both losses, of KL(before || after) and of agreements.

    `hidden` are the last hidden states (n, hidden) of source and conversion, `heads` their output layers, `targets`
    (n,) the tokens that follow.
    """
    totals = torch.zeros(4, dtype=torch.float64)
    for target, *states in zip(*(x.split(TOKENS_AT_ONCE) for x in (targets, *hidden)), strict=True):
        before, after = (log_softmax(head(x)) for head, x in zip(heads, states, strict=True))  # (tokens, vocabulary)
        after, target = after.to(before.device), target.to(before.device)
        losses = [-x.gather(1, target[:, None]).sum(dtype=torch.float64) for x in (before, after)]
        # A token of probability 0 in the source adds 0, where the product would be nan.
        kl = torch.where(before > -torch.inf, before.exp() * (before - after), 0.0).sum(dtype=torch.float64)
        agreements = (before.argmax(-1) == after.argmax(-1)).sum(dtype=torch.float64)
        totals += torch.stack([*losses, kl, agreements]).cpu()
        del before, after  # before there are others
    return totals


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities, computed in at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def predicted_positions(batch: Batch) -> torch.Tensor:
    """Return where (B, T - 1) the next token is of the same document and neither is padding."""
    predicted = torch.ones_like(batch["input_ids"][:, 1:], dtype=torch.bool)
    if (positions := batch.get("position_ids")) is not None:
        predicted = predicted & (positions[:, 1:] != 0)
    if (mask := batch.get("attention_mask")) is not None:
        predicted = predicted & mask[:, 1:].bool() & mask[:, :-1].bool()
    return predicted


@torch.no_grad()
def predicted_states(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the last hidden states (n, hidden) from which the next tokens of a batch are predicted."""
    return last_hidden_state(model, batch)[:, :-1][predicted_positions(batch).to(model.device)]


def last_hidden_state(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the last hidden states (B, T, hidden) of a batch."""
    # With a cache transformers would not see from the position ids that documents are packed.
    inputs = {name: x.to(model.device) for name, x in batch.items() if name in MODEL_INPUTS}
    return model.base_model(**inputs, use_cache=False).last_hidden_state


@torch.no_grad()
def layer_errors(
    source: GQAForCausalLM,
    converted: GQAForCausalLM,
    batches: Iterable[Batch],
    progress: Progress = iter,
) -> list[float]:
    """Measure the relative error of each layer's attention output, where both layers get the source's hidden states.

    It is the root of sum |converted - source|^2 / sum |source|^2 over all tokens that are not padding.

    Args:
        source: the model to compare with.
        converted: a conversion of it with the same attention implementation.
        batches: model inputs, as for `compare_predictions`.
        progress: wraps the iteration over the batches.

    Returns:
        One number for each layer.

    Raises:
        ValueError: the attention implementations differ.
        UserError: a model is spread over devices.

    Example:
        ```python
        import torch

        from modeling_gqa import GQAConfig, GQAForCausalLM
        from modeling_gqa.conversion import convert_model, layer_errors, target_config

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = GQAForCausalLM(GQAConfig(vocab_size=64, attention_kind="mha", **sizes))
        converted, _ = convert_model(model, target_config(model.config, "mqa", layers=[1]))
        errors = layer_errors(model, converted, [{"input_ids": torch.randint(64, (2, 16))}])
        assert errors[0] == 0 < errors[1]
        ```
    """
    require_one_device(source, converted)
    if source.config._attn_implementation != converted.config._attn_implementation:
        raise ValueError("layer_errors needs one attention implementation: call set_attn_implementation on one model")
    sums = torch.zeros(len(source.model.layers), 2, dtype=torch.float64)
    real: torch.Tensor

    def hook(index: int, other: torch.nn.Module):
        def compare_layers(layer, args, kwargs):
            hidden = args[0]  # (B, T, hidden)
            expected = attend(source.model, index, layer, hidden, kwargs)
            found = attend(converted.model, index, other, hidden, kwargs).to(expected.device)
            kept = real.to(expected.device)
            sums[index, 0] += (found.double() - expected.double())[kept].square().sum().cpu()
            sums[index, 1] += expected.double()[kept].square().sum().cpu()

        return compare_layers

    pairs = enumerate(zip(source.model.layers, converted.model.layers, strict=True))
    handles = [layer.register_forward_pre_hook(hook(i, other), with_kwargs=True) for i, (layer, other) in pairs]
    with hooks(*handles), evaluating(source, converted):
        for batch in progress(batches):
            real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()  # (B, T)
            last_hidden_state(source, batch)
    # An output of zeros that stays zeros has no error.
    return (sums[:, 0] / sums[:, 1].clamp(min=torch.finfo(torch.float64).tiny)).sqrt().tolist()


def attend(
    model: GQAModel, index: int, layer: GQADecoderLayer, hidden: torch.Tensor, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return the attention output (B, T, hidden) of layer `index` of `model` for an input and what came with it."""
    device = next(layer.parameters()).device
    kwargs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
    hidden = hidden.to(device, next(layer.parameters()).dtype)
    # The two layers may rotate heads of different sizes.
    rotary = model.rotary_emb[model.rotary_sizes[index]]
    kwargs["position_embeddings"] = rotary(hidden, kwargs["position_ids"])
    return layer.self_attn(layer.input_layernorm(hidden), **kwargs)[0]


# -- The loss to train on


def prediction_losses(
    logits: torch.Tensor,
    teacher_states: torch.Tensor,
    teacher_head: torch.nn.Module,
    labels: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return three sums over the predicted tokens: next-token loss, KL(teacher || student), and the teacher's loss.

    Args:
        logits: the student's (B, T, V).
        teacher_states: (B, T, E), of which `teacher_head` makes logits, a part of the tokens at a time.
        labels: (B, T), shifted here; -100 at the start of a document, which the text before does not predict.
        temperature: both logits are divided by it for the KL, which is multiplied by its square (1503.02531).
    """
    targets = pad(labels[:, 1:], (0, 1), value=-100).flatten()  # (B T,)
    tokens = tokens_at_once(logits.device, logits.shape[-1])
    return PredictionSums.apply(
        logits.flatten(0, 1), teacher_states.flatten(0, 1), targets, teacher_head, temperature, tokens
    )


def tokens_at_once(device: torch.device, vocab_size: int) -> int:
    """Return the number of tokens whose logits are in float32 at a time."""
    # On a CPU, parts that stay in its caches take half the time.
    return max(1, LOGITS_AT_ONCE // (4 if device.type == "cpu" else 1) // vocab_size)


class PredictionSums(torch.autograd.Function):
    """The three sums of `prediction_losses`, and the gradient of the first two by the logits.

    With s and t the logits of student and teacher, and y the next token, the sums are of log sum exp s - s_y, of
    KL(p || q) for p = softmax(t / temperature) and q = softmax(s / temperature), and of log sum exp t - t_y. The
    gradient by s of the first is softmax(s) - onehot(y), that of the second, times temperature^2, is
    temperature * (q - p). The softmaxes of a part of the tokens are computed in the forward pass and again in the
    backward pass, from their normalizers, and never exist together.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        states: torch.Tensor,
        targets: torch.Tensor,
        head: torch.nn.Module,
        temperature: float,
        part: int,
    ) -> torch.Tensor:
        """Return the sums of n tokens: logits (n, V), states (n, E) of the teacher, targets (n,), `part` at a time."""
        ctx.save_for_backward(logits, states, targets)
        kind = logits.device.type
        autocast = {"device_type": kind, "dtype": torch.get_autocast_dtype(kind)}
        ctx.autocast = autocast | {"enabled": torch.is_autocast_enabled(kind)}
        ctx.head, ctx.temperature, ctx.part = head, temperature, part
        ctx.normalizers = []
        total = torch.zeros(3, device=logits.device)
        for student, teacher, target in parts((logits, states, targets), head, part):
            predicted = target >= 0
            chosen = target.clamp(min=0)[:, None]
            losses = [x.logsumexp(-1) - x.gather(1, chosen)[:, 0] for x in (student, teacher)]
            if temperature != 1:
                student, teacher = student / temperature, teacher / temperature
            ours, theirs = (x.logsumexp(-1, keepdim=True) for x in (student, teacher))
            weights = torch.sub(teacher, theirs).exp_()
            # The logits' difference first: its weighted sum is small where the models agree.
            kl = weights.mul_(teacher.sub_(student)).sum(-1) + (ours - theirs)[:, 0]
            sums = (losses[0], kl * temperature**2, losses[1])
            total = total + torch.stack([x[predicted].sum() for x in sums])
            ctx.normalizers.append((ours, theirs))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Return the gradient by the logits; `gradient` (3,) is that by the sums."""
        of_loss, of_kl, _ = gradient.tolist()
        of_kl *= ctx.temperature
        result = torch.empty_like(ctx.saved_tensors[0])
        with torch.autocast(**ctx.autocast), torch.no_grad():
            read = parts(ctx.saved_tensors, ctx.head, ctx.part)
            found = zip(result.split(ctx.part), read, ctx.normalizers, strict=True)
            for place, (student, teacher, target), (ours, theirs) in found:
                chosen = target.clamp(min=0)[:, None]
                if ctx.temperature == 1:
                    change = torch.sub(student, ours).exp_().mul_(of_loss + of_kl)
                else:
                    change = student.softmax(-1).mul_(of_loss)
                    change.add_(torch.sub(student / ctx.temperature, ours).exp_(), alpha=of_kl)
                change.sub_((teacher / ctx.temperature).sub_(theirs).exp_(), alpha=of_kl)
                change.scatter_add_(1, chosen, torch.full_like(ours, -of_loss))
                place.copy_(change.mul_((target >= 0)[:, None]))
        return result, None, None, None, None, None


def parts(
    tensors: tuple[torch.Tensor, ...], head: torch.nn.Module, part: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield both models' logits (n, V), in at least float32, and the targets (n,), of n = `part` tokens at a time.

    `tensors` are the student's logits, the teacher's states, of which `head` makes its logits, and the targets.
    """
    for logits, states, targets in zip(*(x.split(part) for x in tensors), strict=True):
        dtype = torch.promote_types(logits.dtype, torch.float32)
        yield logits.to(dtype), head(states).to(dtype), targets


def top_prediction_losses(
    logits: torch.Tensor,
    ids: torch.Tensor,
    log_probs: torch.Tensor,
    rest: torch.Tensor,
    target_log_probs: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return the sums of `prediction_losses`, the KL being over the teacher's top k tokens and all others as one.

    To take tokens together never raises a KL divergence, so this one is a lower bound of that over all tokens.

    Args:
        logits: the student's (B, T, V).
        ids: (B, T, k), the teacher's most likely tokens.
        log_probs: (B, T, k), their log-probabilities l at temperature 1.
        rest: (B, T), log sum exp(l / temperature) over all other tokens; -inf where there are none.
        target_log_probs: (B, T), the teacher's log-probability of the next token at temperature 1.
        labels: as for `prediction_losses`.
        temperature: as for `prediction_losses`.
    """
    targets = pad(labels[:, 1:], (0, 1), value=-100).flatten()  # (B T,)
    # By this softmax the probabilities sum to 1, however `log_probs` were rounded.
    buckets = torch.cat([log_probs / temperature, rest[..., None]], dim=-1).log_softmax(-1)  # (B, T, k + 1)
    tokens = tokens_at_once(logits.device, logits.shape[-1])
    sums = TopPredictionSums.apply(
        logits.flatten(0, 1), ids.flatten(0, 1), buckets.flatten(0, 1), targets, temperature, tokens
    )
    return torch.cat([sums, -target_log_probs.flatten()[targets >= 0].sum()[None]])


class TopPredictionSums(torch.autograd.Function):
    """The first two sums of `top_prediction_losses`, and their gradient by the logits.

    Let s be the student's logits, q = softmax(s / temperature), K the k tokens, q_R the sum of q over all others, and
    p_1 ... p_k, p_R the teacher's probabilities. The KL is the sum over K of p_i log(p_i / q_i), plus
    p_R log(p_R / q_R). Its gradient by s, times temperature^2, is temperature * (q_i - p_i) for a token of K, and
    temperature * (q_j - p_R q_j / q_R) for another. log q_R and q_j / q_R come from a log-sum-exp over the others, not
    from 1 - sum q_i, of which nothing is left where the k tokens have nearly all of the probability.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        ids: torch.Tensor,
        buckets: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        part: int,
    ) -> torch.Tensor:
        """Return the sums of n tokens: logits (n, V), ids (n, k), log p in buckets (n, k + 1), targets (n,)."""
        ctx.save_for_backward(logits, ids, buckets, targets)
        ctx.temperature, ctx.part, ctx.normalizers = temperature, part, []
        total = torch.zeros(2, device=logits.device)
        for student, top, theirs, target in top_parts((logits, ids, buckets, targets), part):
            whole = student.logsumexp(-1, keepdim=True)  # (n, 1)
            loss = (whole - student.gather(1, target.clamp(min=0)[:, None]))[:, 0]
            student = student / temperature
            rest = student.scatter(1, top, -torch.inf).logsumexp(-1, keepdim=True)  # (n, 1)
            ours = torch.cat([student.gather(1, top), rest], dim=-1)  # (n, k + 1)
            normalizer = ours.logsumexp(-1, keepdim=True)  # (n, 1)
            # A bucket of probability 0 adds 0, where the product would be nan.
            kl = torch.where(theirs > -torch.inf, theirs.exp() * (theirs - (ours - normalizer)), 0.0).sum(-1)
            total = total + torch.stack([x[target >= 0].sum() for x in (loss, kl * temperature**2)])
            ctx.normalizers.append((whole, rest, normalizer))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Return the gradient by the logits; `gradient` (2,) is that by the sums."""
        of_loss, of_kl = gradient.tolist()
        of_kl *= ctx.temperature
        result = torch.empty_like(ctx.saved_tensors[0])
        found = zip(result.split(ctx.part), top_parts(ctx.saved_tensors, ctx.part), ctx.normalizers, strict=True)
        for place, (student, top, theirs, target), (whole, rest, normalizer) in found:
            change = torch.sub(student, whole).exp_().mul_(of_loss)
            student = student / ctx.temperature
            change.add_(torch.sub(student, normalizer).exp_(), alpha=of_kl)
            # Where there are no others, `rest` is -inf.
            others = student.scatter_(1, top, -torch.inf).sub_(rest.clamp(min=torch.finfo(rest.dtype).min)).exp_()
            change.sub_(others.mul_(theirs[:, -1:].exp()), alpha=of_kl)
            change.scatter_add_(1, top, theirs[:, :-1].exp().mul_(-of_kl))
            change.scatter_add_(1, target.clamp(min=0)[:, None], torch.full_like(whole, -of_loss))
            place.copy_(change.mul_((target >= 0)[:, None]))
        return result, None, None, None, None, None


def top_parts(tensors: tuple[torch.Tensor, ...], part: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the student's logits (n, V), ids, log p and targets of n = `part` tokens at a time, in at least float32."""
    for logits, ids, buckets, targets in zip(*(x.split(part) for x in tensors), strict=True):
        dtype = torch.promote_types(logits.dtype, torch.float32)
        yield logits.to(dtype), ids, buckets.to(dtype), targets
