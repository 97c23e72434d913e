"""Loops as people write them, on two ranks, against one process of plain torch: a part of benchmarks/loops.py.

The whole of it (benchmarks/habits) is for three numbers of ranks and takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DAILY = (
    *("plain", "zero_by_the_model", "two_backwards", "backward_given_up", "accumulate_short_group"),
    *("clip_grad_norm", "grad_scaler", "gradient_by_autograd_grad", "hook_that_clamps"),
    *("ignore_index", "class_weights", "sum_with_penalty"),
    *("nested", "fewer_rows_than_ranks", "distributed_sampler_left_in"),
    *("unequal_data", "rows_of_a_class"),
    *("wrapped_again_unfrozen", "two_wraps_that_share", "wrapped_again_with_another_norm"),
    *("kept_as_they_are", "hook_that_clamps_amid_a_group", "hook_on_rank_0_amid_a_group"),
    *("adamw_fused_channels_last", "buffers_assigned_of_the_batch"),
)
BY_NIGHT = (
    *("root_of_the_mean", "class_weights_untold", "shuffled_while_one_rank_samples"),
    *("looked_at", "fetched_ahead", "rows_augmented_later"),
    *("unfrozen_on_the_way", "experts_chosen_by_rows", "two_models", "batch_norm_of_all", "lbfgs"),
    *("contrast_with_rows_by_a_function", "sum_times_a_tensor", "mean_over_rows_then_over_tasks", "mean_without_nan"),
    *("evaluated_on_the_wrapped_loader", "size_as_long_as_the_batch", "attention_of_square_batches_turned"),
    *("preference", "groups_of_answers", "queue_of_keys", "contrast_of_rows_that_want_a_gradient"),
    *("saved_and_loaded", "one_rank_stops_early", "variables_by_hand_two_wraps"),
    *("wrapped_again_with_a_group_more", "head_replaced_after_pretraining", "wrap_of_a_part_later"),
    *("part_unfrozen_and_wrapped_later", "kept_in_parts", "kept_and_added_to", "kept_amid_a_group"),
    *("hook_that_clamps_without_sync", "adamw_fused_channels_last_amid_a_group"),
    *("buffers_assigned_of_the_weights", "batch_norm_of_all_wrapped_again", "batch_norm_of_all_copied"),
)


@pytest.mark.parametrize("some", [DAILY, pytest.param(BY_NIGHT, marks=pytest.mark.nightly)], ids=["daily", "by night"])
def test_habits_are_exact_or_refused(some: tuple[str, ...]) -> None:
    ranks, habits = "2", ",".join(some)
    command = [sys.executable, str(ROOT / "benchmarks" / "loops.py"), "--ranks", ranks, "--habits", habits, "--json"]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*command, "--no-fp32"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["habit"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert set(rows) == set(some)
    bad = [f"{row['habit']}: wanted {row['wanted']}, {row['detail']}" for row in rows.values() if not row["good"]]
    assert not bad, "\n".join(bad)
    assert {"equal", "refused"} == {row["result"] for row in rows.values()}
