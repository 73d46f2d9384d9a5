#!/usr/bin/env bash
# Qwen3-8B on GSM8K, one node of 8 GPUs: 4 learners with ZeRO-3, 4 engines. Runs as it is in a shell, under Slurm
# (sbatch or srun) and as the command of a Beaker task.
#
#   bash scripts/train/qwen3_8b_gsm8k.sh
#
# From the environment, all optional:
#   RUN_NAME       name in wandb and default of the directory
#   OUTPUT_DIR     on storage that outlives the job: the same command goes on from the last checkpoint found there
#   WANDB_API_KEY  turns tracking on; WANDB_PROJECT and WANDB_ENTITY say where
#   HF_TOKEN       read by the Hugging Face libraries
#   PYTHON         interpreter with requirements.txt and this package installed
#
#SBATCH --job-name=qwen3_8b_gsm8k
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# sbatch runs a copy of this file from its spool directory.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
[[ -f "$ROOT/open_instruct/grpo_fast.py" ]] || ROOT="${SLURM_SUBMIT_DIR:-$PWD}"
if [[ ! -f "$ROOT/open_instruct/grpo_fast.py" ]]; then
    echo "$0: open_instruct/grpo_fast.py not found; submit from the root of the project" >&2
    exit 1
fi

NODE_RANK="${NODE_RANK:-${BEAKER_REPLICA_RANK:-${SLURM_NODEID:-0}}}"
if [[ "$NODE_RANK" != 0 ]]; then
    echo "$0: takes one node; nothing to do on node $NODE_RANK" >&2
    exit 0
fi

RUN_NAME="${RUN_NAME:-qwen3_8b_gsm8k}"
tracking=()
if [[ -n "${WANDB_API_KEY:-}" ]]; then
    tracking=(--with_tracking --wandb_project "${WANDB_PROJECT:-open_instruct}")
    [[ -z "${WANDB_ENTITY:-}" ]] || tracking+=(--wandb_entity "$WANDB_ENTITY")
fi

# exec: SIGTERM of the scheduler shall reach Python, which then writes a checkpoint.
exec "${PYTHON:-python}" "$ROOT/open_instruct/grpo_fast.py" \
    --exp_name qwen3_8b_gsm8k \
    --run_name "$RUN_NAME" \
    --output_dir "${OUTPUT_DIR:-output/$RUN_NAME}" \
    --model_name_or_path Qwen/Qwen3-8B \
    --gradient_checkpointing \
    --dataset_mixer_list ai2-adapt-dev/rlvr_gsm8k_zs 1.0 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list ai2-adapt-dev/rlvr_gsm8k_zs 1.0 \
    --dataset_mixer_eval_list_splits test \
    --max_prompt_token_length 512 \
    --response_length 2048 \
    --pack_length 8192 \
    --num_unique_prompts_rollout 32 \
    --num_samples_per_prompt_rollout 16 \
    --total_episodes 256000 \
    --learning_rate 1e-6 \
    --beta 0.0 \
    --load_ref_policy False \
    --num_learners_per_node 4 \
    --deepspeed_stage 3 \
    --vllm_num_engines 4 \
    --vllm_gpu_memory_utilization 0.9 \
    --eval_on_step_0 \
    --local_eval_every 25 \
    --save_freq 100 \
    --checkpoint_state_freq 25 \
    ${tracking[@]+"${tracking[@]}"} \
    "$@"
