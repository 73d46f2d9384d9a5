#!/usr/bin/env bash
# Sets up on a machine with Python (3.11 to 3.13) and pip, then trains a tiny model to add, on two CPU cores.
#
#   bash scripts/train/debug/cpu_demo.sh
#   bash scripts/train/debug/cpu_demo.sh --output_dir out/x --seed 3     further options win over those below
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
bash "$ROOT/scripts/setup_cpu.sh"

# Two cores: one for the engine, one for the learner. The model and the data come with the project.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

SUMS="reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2"

exec "$ROOT/.venv/bin/python" "$ROOT/open_instruct/grpo_fast.py" \
    --model_name_or_path "$ROOT/assets/tiny_model" \
    --dataset_mixer_list "$SUMS&size=8000&seed=7" 1.0 \
    --dataset_mixer_eval_list "$SUMS&size=512&seed=20240" 1.0 \
    --max_prompt_token_length 64 \
    --response_length 32 \
    --pack_length 2048 \
    --num_unique_prompts_rollout 32 \
    --num_samples_per_prompt_rollout 8 \
    --total_episodes 40960 \
    --learning_rate 2e-4 \
    --verification_reward 1.0 \
    --beta 0.0 \
    --load_ref_policy False \
    --vllm_enforce_eager \
    --eval_on_step_0 \
    --local_eval_every 40 \
    --checkpoint_state_freq 40 \
    --seed 1 \
    --output_dir out/cpu_demo \
    "$@"
