"""The names of our metrics in other frameworks, from the sources in SOURCES.

A name is listed only if it means the same number; docs/correction.md lists edge cases that differ.
"""

SOURCES = {
    "verl": "0.9.1, trainer/ppo/rollout_corr_helper.py",
    "slime": "0.3.1 (624b824), examples/train_infer_mismatch_helper/mis.py and "
    "backends/megatron_utils/loss.py",
    "NeMo-RL": "0.6.0 (7ea279a), nemo_rl/algorithms/loss/loss_functions.py",
    "prime-rl": "0.8.0 (559b447), src/prime_rl/trainer/rl/{loss,train}.py",
    "TRL": "1.16.0, trl/trainer/grpo_trainer.py",
}


def _row(
    verl: str = "", slime: str = "", nemo_rl: str = "", prime_rl: str = "", trl: str = ""
) -> dict[str, str]:
    """Only the frameworks that have it, with the prefixes of verl, slime and TRL."""
    names = {
        "verl": verl and f"rollout_corr/{verl}",
        "slime": slime and f"train/{slime}",
        "NeMo-RL": nemo_rl,
        "prime-rl": prime_rl,
        "TRL": trl and f"sampling/{trl}",
    }
    return {framework: name for framework, name in names.items() if name}


NAMES: dict[str, dict[str, str]] = {
    "mismatch_kl_k1": _row("kl", "mis_kl"),
    "mismatch_kl_k3": _row("k3_kl", "mis_k3_kl", "gen_kl_error", "mismatch_kl/all/mean"),
    "ratio_mean": _row(slime="mis_tis_weight_before_bound"),
    "chi2_token": _row("chi2_token", "mis_chi2_token"),
    "chi2_seq": _row("chi2_seq", "mis_chi2_seq"),
    "logprob_abs_diff_mean": _row(
        slime="train_rollout_logprob_abs_diff", trl="sampling_logp_difference/mean"
    ),
    "logprob_abs_diff_max": _row(trl="sampling_logp_difference/max"),
    "token_mult_prob_error": _row(nemo_rl="token_mult_prob_error"),
    "trainer_ppl": _row("training_ppl", "mis_training_ppl"),
    "trainer_log_ppl": _row("training_log_ppl", "mis_training_log_ppl"),
    "rollout_ppl": _row("rollout_ppl", "mis_rollout_ppl"),
    "rollout_log_ppl": _row("rollout_log_ppl", "mis_rollout_log_ppl"),
    "log_ppl_gap": _row("log_ppl_diff", "mis_log_ppl_diff"),
    "log_ppl_gap_abs": _row("log_ppl_abs_diff", "mis_log_ppl_abs_diff"),
    "log_ppl_gap_min": _row("log_ppl_diff_min"),
    "log_ppl_gap_max": _row("log_ppl_diff_max"),
    "ppl_ratio": _row("ppl_ratio", "mis_ppl_ratio"),
    "weight_mean": _row(
        "rollout_is_mean",
        "mis_tis_weight_after_bound",
        "sampling_importance_ratio",
        trl="importance_sampling_ratio/mean",
    ),
    "weight_min": _row("rollout_is_min", trl="importance_sampling_ratio/min"),
    "weight_max": _row("rollout_is_max", trl="importance_sampling_ratio/max"),
    "weight_ess": _row("rollout_is_eff_sample_size"),
    "weight_batch_mean": _row("rollout_is_batch_norm_factor", "mis_batch_norm_factor"),
    "clipped_fraction": _row(
        "rollout_is_ratio_fraction_high", "mis_tis_truncate_fraction", "is_oob_ratio"
    ),
    "masked_fraction": _row("rollout_rs_masked_fraction"),
    "masked_sequence_fraction": _row("rollout_rs_seq_masked_fraction"),
    "veto/masked_sequence_fraction": _row(slime="mis_rs_catastrophic_seq_fraction"),
    "<option>/masked_fraction": _row("rollout_rs_<option>_masked_fraction"),
    "<option>/masked_sequence_fraction": _row("rollout_rs_<option>_seq_masked_fraction"),
    "<option>/min": _row("rollout_rs_<option>_min"),
    "<option>/max": _row("rollout_rs_<option>_max"),
}
"""Ours, then framework -> theirs. <option> is a rejection such as seq_mean_k3."""
