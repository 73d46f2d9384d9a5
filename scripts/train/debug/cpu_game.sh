#!/usr/bin/env bash
# Sets up, then trains a tiny model to play TextArena's GuessTheNumber in up to ten turns, on two CPU cores.
#
#   bash scripts/train/debug/cpu_game.sh
#   bash scripts/train/debug/cpu_game.sh --output_dir out/x --seed 3     further options win over those below
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
bash "$ROOT/scripts/setup_cpu.sh"

# Two cores: one for the engine, one for the learner. The model and the data come with the project.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

exec "$ROOT/.venv/bin/python" "$ROOT/open_instruct/grpo_fast.py" \
    --model_name_or_path "$ROOT/assets/tiny_game_model" \
    --dataset_mixer_list "$ROOT/assets/guess_the_number_train.jsonl" 1.0 \
    --dataset_mixer_eval_list "$ROOT/assets/guess_the_number_eval.jsonl" 1.0 \
    --rollout_workflow conversation \
    --max_steps 10 \
    --max_prompt_token_length 256 \
    --response_length 256 \
    --per_turn_max_tokens 16 \
    --pack_length 4096 \
    --num_unique_prompts_rollout 8 \
    --num_samples_per_prompt_rollout 8 \
    --total_episodes 5120 \
    --learning_rate 2e-4 \
    --beta 0.05 \
    --vllm_enforce_eager \
    --eval_on_step_0 \
    --local_eval_every 20 \
    --checkpoint_state_freq 80 \
    --seed 1 \
    --output_dir out/cpu_game \
    "$@"
