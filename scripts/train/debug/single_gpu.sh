#!/usr/bin/env bash
# Learner and engine take turns on one GPU: Qwen3-0.6B learns to add longer numbers. For trying changes; fits into 24 GB.
#
#   bash scripts/setup_gpu.sh && source .venv/bin/activate
#   bash scripts/train/debug/single_gpu.sh
#
# PYTHON names the interpreter, OUTPUT_DIR the directory; the same command goes on from the last checkpoint.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
SUMS="reasoning_gym/chain_sum?min_terms=3&max_terms=5&min_digits=2&max_digits=4"

exec "${PYTHON:-python}" "$ROOT/open_instruct/grpo_fast.py" \
    --colocate \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --deepspeed_stage 2 \
    --gradient_checkpointing \
    --dataset_mixer_list "$SUMS&size=20000&seed=7" 1.0 \
    --dataset_mixer_eval_list "$SUMS&size=256&seed=20240" 1.0 \
    --max_prompt_token_length 256 \
    --response_length 512 \
    --pack_length 32768 \
    --num_unique_prompts_rollout 16 \
    --num_samples_per_prompt_rollout 8 \
    --total_episodes 12800 \
    --learning_rate 1e-6 \
    --beta 0.0 \
    --load_ref_policy False \
    --vllm_gpu_memory_utilization 0.8 \
    --vllm_enforce_eager \
    --eval_on_step_0 \
    --local_eval_every 25 \
    --output_dir "${OUTPUT_DIR:-output/single_gpu}" \
    "$@"
