#!/usr/bin/env bash
# Sets up, then trains a tiny model to play Kuhn poker against itself (scripts/train/debug/kuhn_poker.py), on two CPU cores.
#
#   bash scripts/train/debug/cpu_self_play.sh
#   bash scripts/train/debug/cpu_self_play.sh --output_dir out/x --seed 3     further options win over those below
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
bash "$ROOT/scripts/setup_cpu.sh"

# Two cores: one for the engine, one for the learner. The model and the data come with the project.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

exec "$ROOT/.venv/bin/python" "$ROOT/open_instruct/grpo_fast.py" \
    --model_name_or_path "$ROOT/assets/tiny_poker_model" \
    --dataset_mixer_list "$ROOT/assets/kuhn_poker_train.jsonl" 1.0 \
    --dataset_mixer_eval_list "$ROOT/assets/kuhn_poker_eval.jsonl" 1.0 \
    --workflow_modules "$ROOT/scripts/train/debug/kuhn_poker.py" \
    --rollout_workflow kuhn_poker \
    --max_prompt_token_length 64 \
    --response_length 96 \
    --pack_length 2048 \
    --num_unique_prompts_rollout 16 \
    --num_samples_per_prompt_rollout 16 \
    --total_episodes 15360 \
    --learning_rate 2e-4 \
    --beta 0.0 \
    --load_ref_policy False \
    --vllm_enforce_eager \
    --eval_on_step_0 \
    --local_eval_every 20 \
    --checkpoint_state_freq 60 \
    --seed 1 \
    --output_dir out/cpu_self_play \
    "$@"
