#!/usr/bin/env bash
# Sets up on a machine with Python (3.11 to 3.13) and pip, then trains a tiny model, on two CPU cores, to answer sums that are too
# long for one turn: it works off two terms, sums up what is left, and goes on from its summary. Only the reasoning is
# trained, from the states that summaries lead to.
#
#   bash scripts/train/debug/cpu_rc.sh
#   bash scripts/train/debug/cpu_rc.sh --output_dir out/x --seed 3     further options win over those below
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
bash "$ROOT/scripts/setup_cpu.sh"

# Two cores: one for the engine, one for the learner. The model and the data come with the project.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

# One turn is enough for a quarter of them, two for three quarters, three for all.
SUMS="reasoning_gym/chain_sum?min_terms=3&max_terms=6&min_digits=1&max_digits=1"

# Templates and limits are those that the model was built with (scripts/data/build_tiny_rc_model.py).
exec "$ROOT/.venv/bin/python" "$ROOT/open_instruct/grpo_fast.py" \
    --model_name_or_path "$ROOT/assets/tiny_rc_model" \
    --dataset_mixer_list "$SUMS&size=8000&seed=7" 1.0 \
    --dataset_mixer_eval_list "$SUMS&size=256&seed=20240" 1.0 \
    --rollout_workflow rc \
    --rc_train_on states \
    --rc_num_reasoning_steps 3 \
    --rc_states_per_problem 2 \
    --rc_reasoning_prompt_template '{problem} So far: {curr_summary} Go on:' \
    --rc_summarization_prompt_template 'So far: {existing_summary} New: {reasoning} Sum up:' \
    --rc_max_summary_tokens 24 \
    --max_prompt_token_length 64 \
    --response_length 40 \
    --pack_length 2048 \
    --num_unique_prompts_rollout 16 \
    --num_samples_per_prompt_rollout 8 \
    --total_episodes 12800 \
    --learning_rate 5e-5 \
    --verification_reward 1.0 \
    --beta 0.0 \
    --load_ref_policy False \
    --vllm_enforce_eager \
    --eval_on_step_0 \
    --local_eval_every 20 \
    --checkpoint_state_freq 40 \
    --seed 1 \
    --output_dir out/cpu_rc \
    "$@"
