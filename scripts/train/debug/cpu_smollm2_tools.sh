#!/usr/bin/env bash
# Sets up, fetches SmolLM2-135M-Instruct (see cpu_smollm2.sh), and trains it to use a calculator for sums of four digits, which it
# cannot do in its head. Each question stands after one example of a call, which the model imitates now and then before training.
# What it learns: docs/measurements/demos.md.
#
#   bash scripts/train/debug/cpu_smollm2_tools.sh
#   bash scripts/train/debug/cpu_smollm2_tools.sh --output_dir out/x --seed 3     further options win over those below
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
bash "$ROOT/scripts/setup_cpu.sh"

# Two cores: one for the engine, one for the learner.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

MODEL="$ROOT/out/SmolLM2-135M-Instruct"
SUMS="$ROOT/out/tool_sums"
"$ROOT/.venv/bin/python" "$ROOT/scripts/data/get_smollm2.py" --output_dir "$MODEL"
"$ROOT/.venv/bin/python" "$ROOT/scripts/data/make_sums.py" --output_dir "$SUMS" --with_calculator

exec "$ROOT/.venv/bin/python" "$ROOT/open_instruct/grpo_fast.py" \
    --model_name_or_path "$MODEL" \
    --dataset_mixer_list "$SUMS/train.jsonl" 1.0 \
    --dataset_mixer_eval_list "$SUMS/test.jsonl" 1.0 \
    --tools calculator \
    --tool_parser_type legacy \
    --pass_tools_to_chat_template False \
    --max_steps 2 \
    --max_prompt_token_length 160 \
    --response_length 64 \
    --pack_length 2048 \
    --num_unique_prompts_rollout 8 \
    --num_samples_per_prompt_rollout 8 \
    --total_episodes 768 \
    --learning_rate 2e-5 \
    --verification_reward 1.0 \
    --beta 0.0 \
    --load_ref_policy False \
    --eval_on_step_0 \
    --local_eval_every 4 \
    --checkpoint_state_freq 12 \
    --seed 1 \
    --output_dir out/cpu_smollm2_tools \
    "$@"
