#!/usr/bin/env bash
# Sets up, then trains the tiny model by the grades of another tiny model, a judge that vLLM serves on the same two CPU cores. The judge
# likes the right number alone best (scripts/data/build_tiny_judge_model.py).
#
#   bash scripts/train/debug/cpu_judge.sh
#   bash scripts/train/debug/cpu_judge.sh --output_dir out/x --seed 3     further options win over those below
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
bash "$ROOT/scripts/setup_cpu.sh"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

exec "$ROOT/.venv/bin/python" "$ROOT/scripts/with_judge.py" --model "$ROOT/assets/tiny_judge_model" -- \
    "$ROOT/.venv/bin/python" "$ROOT/open_instruct/grpo_fast.py" \
    --model_name_or_path "$ROOT/assets/tiny_model" \
    --dataset_mixer_list "$ROOT/assets/judged_sums_train.jsonl" 1.0 \
    --dataset_mixer_eval_list "$ROOT/assets/judged_sums_eval.jsonl" 1.0 \
    --llm_judge_model "$ROOT/assets/tiny_judge_model" \
    --llm_judge_max_tokens 32 \
    --llm_judge_max_context_length 1000 \
    --llm_judge_temperature 0 \
    --max_prompt_token_length 64 \
    --response_length 24 \
    --pack_length 2048 \
    --num_unique_prompts_rollout 16 \
    --num_samples_per_prompt_rollout 8 \
    --total_episodes 10240 \
    --learning_rate 2e-4 \
    --verification_reward 1.0 \
    --beta 0.0 \
    --load_ref_policy False \
    --vllm_enforce_eager \
    --eval_on_step_0 \
    --local_eval_every 20 \
    --checkpoint_state_freq 80 \
    --seed 1 \
    --output_dir out/cpu_judge \
    "$@"
