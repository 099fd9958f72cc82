"""Tables of fields: those that are refused, those that a resumption may change, and the bounds of numbers."""

from collections.abc import Callable

# Fields of TrainingArguments that the scripts do not read: refused rather than silently ignored.
UNUSED = {
    "resume_from_checkpoint": "use --resume",
    "do_train": "this script always trains",
    "do_eval": "use --eval-strategy",
    "do_predict": "this script does not predict",
    "hub_strategy": "the script uploads the finished repository once, at the end",
    "include_num_input_tokens_seen": "tokens are always counted",
    "load_best_model_at_end": "the last weights are the result of a pretraining run",
    "dataloader_drop_last": "it would drop validation text as well",
    "auto_find_batch_size": "it would change the run's arithmetic",
    "save_only_model": "--resume needs all of a checkpoint",
    "ignore_data_skip": "a resumed run would train on the same text again",
    "metric_for_best_model": "the last weights are the result of a pretraining run",
    "greater_is_better": "the last weights are the result of a pretraining run",
    "prediction_loss_only": "the validation loss is counted from the predictions",
    "batch_eval_metrics": "the validation loss is counted over all batches",
    "include_for_metrics": "the validation loss needs no further inputs",
    "eval_do_concat_batches": "the validation loss is counted over all batches",
    "eval_use_gather_object": "the validation loss is made of tensors",
    "bf16_full_eval": "it would round the weights that are saved at the end",
    "fp16_full_eval": "it would round the weights that are saved at the end",
    "label_names": "labels are made by this script",
    "remove_unused_columns": "the script makes the columns, and needs all of them",
    "length_column_name": "all blocks have one length",
    "train_sampling_strategy": "all blocks have one length, and are drawn at random",
}
# What may differ between a run and its resumption: none of it changes the weights.
FREE_ON_RESUME = {
    "resume", "overwrite", "output_dir", "run_name", "project", "report_to", "disable_tqdm", "log_level",
    "log_level_replica", "logging_steps", "logging_first_step", "save_steps", "save_strategy", "save_total_limit",
    "push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision", "hub_token", "ddp_timeout", "ddp_backend",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers",
    "sample_prompt", "license", "bigram_baseline", "local_rank", "eval_strategy", "eval_steps", "eval_delay",
    "eval_on_start", "per_device_eval_batch_size", "eval_accumulation_steps", "logging_strategy", "skip_memory_metrics",
    "log_on_each_node", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "hub_always_push",
    "torch_empty_cache_steps", "enable_jit_checkpoint",
}  # fmt: skip
# Bounds: TrainingArguments accepts more, and training then fails when it has begun, or at its end.
NUMBERS: list[tuple[tuple[str, ...], Callable[[float], bool], str]] = [
    (("sequence_length",), lambda number: number >= 2, "at least 2"),
    (
        (
            "max_eval_blocks", "per_device_train_batch_size", "per_device_eval_batch_size", "save_total_limit",
            "gradient_accumulation_steps", "eval_accumulation_steps", "torch_empty_cache_steps", "ddp_timeout",
            "dataloader_prefetch_factor",
        ),
        lambda number: number >= 1,
        "at least 1",
    ),
    (
        (
            "learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "dataloader_num_workers", "eval_delay",
            "eval_steps", "neftune_noise_alpha",
        ),
        lambda number: number >= 0,
        "at least 0",
    ),
    (("adam_epsilon", "logging_steps", "save_steps"), lambda number: number > 0, "positive"),
    (("adam_beta1", "adam_beta2", "label_smoothing_factor"), lambda number: 0 <= number < 1, "at least 0 and below 1"),
    (("seed", "data_seed"), lambda number: 0 <= number < 2**32, f"from 0 to {2**32 - 1}"),
]  # fmt: skip
