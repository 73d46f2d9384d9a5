#!/usr/bin/env bash
# Sets up, then trains a tiny model to use a calculator, on two CPU cores: its sums are too hard for it without.
#
#   bash scripts/train/debug/cpu_tools.sh
#   bash scripts/train/debug/cpu_tools.sh --output_dir out/x --seed 3     further options win over those below
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
bash "$ROOT/scripts/setup_cpu.sh"

# Two cores: one for the engine, one for the learner. The model and the data come with the project.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

SUMS="reasoning_gym/chain_sum?min_terms=4&max_terms=4&min_digits=4&max_digits=4"

exec "$ROOT/.venv/bin/python" "$ROOT/open_instruct/grpo_fast.py" \
    --model_name_or_path "$ROOT/assets/tiny_tools_model" \
    --dataset_mixer_list "$SUMS&size=8000&seed=7" 1.0 \
    --dataset_mixer_eval_list "$SUMS&size=256&seed=20240" 1.0 \
    --tools calculator \
    --tool_parser_type legacy \
    --pass_tools_to_chat_template False \
    --max_steps 2 \
    --max_prompt_token_length 80 \
    --response_length 80 \
    --pack_length 2048 \
    --num_unique_prompts_rollout 16 \
    --num_samples_per_prompt_rollout 8 \
    --total_episodes 12800 \
    --learning_rate 2e-4 \
    --verification_reward 1.0 \
    --beta 0.0 \
    --load_ref_policy False \
    --vllm_enforce_eager \
    --eval_on_step_0 \
    --local_eval_every 25 \
    --checkpoint_state_freq 100 \
    --seed 1 \
    --output_dir out/cpu_tools \
    "$@"
