#!/usr/bin/env bash
# Qwen3-8B on GSM8K, one node of 8 GPUs, streaming: 4 learners with ZeRO-3 begin a step while one engine over the other 4
# GPUs still samples the rest of it. Sizes are those of verl's transfer-queue recipe. Runs as it is in a shell, under Slurm
# (sbatch or srun) and as the command of a Beaker task.
#
#   bash scripts/train/qwen3_8b_transferqueue.sh
#
# From the environment, all optional:
#   RUN_NAME       name in wandb and default of the directory
#   OUTPUT_DIR     on storage that outlives the job: the same command goes on from the last checkpoint found there
#   WANDB_API_KEY  turns tracking on; WANDB_PROJECT and WANDB_ENTITY say where
#   HF_TOKEN       read by the Hugging Face libraries
#   PYTHON         interpreter with requirements.txt and this package installed
#
#SBATCH --job-name=qwen3_8b_transferqueue
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

RUN_NAME="${RUN_NAME:-qwen3_8b_transferqueue}"
tracking=()
if [[ -n "${WANDB_API_KEY:-}" ]]; then
    tracking=(trainer.with_tracking=true trainer.wandb_project="${WANDB_PROJECT:-open_instruct}")
    [[ -z "${WANDB_ENTITY:-}" ]] || tracking+=(trainer.wandb_entity="$WANDB_ENTITY")
fi

# exec: SIGTERM of the scheduler shall reach Python, which then writes a checkpoint.
exec "${PYTHON:-python}" "$ROOT/open_instruct/fully_async_main.py" \
    --config-path "$ROOT/conf" \
    trainer.exp_name=qwen3_8b_transferqueue \
    "trainer.run_name='$RUN_NAME'" \
    trainer.output_dir="${OUTPUT_DIR:-output/$RUN_NAME}" \
    model.model_name_or_path=Qwen/Qwen3-8B \
    model.gradient_checkpointing=true \
    "data.dataset_mixer_list=[ai2-adapt-dev/rlvr_gsm8k_zs,'1.0']" \
    "data.dataset_mixer_eval_list=[ai2-adapt-dev/rlvr_gsm8k_zs,'1.0']" \
    data.max_prompt_token_length=2048 \
    data.pack_length=10240 \
    rollout.response_length=8192 \
    rollout.num_unique_prompts_rollout=128 \
    rollout.num_samples_per_prompt_rollout=5 \
    rollout.n_gpus_per_node=4 \
    rollout.vllm_tensor_parallel_size=4 \
    trainer.n_gpus_per_node=4 \
    trainer.nnodes=1 \
    trainer.deepspeed_stage=3 \
    trainer.total_episodes=96000 \
    trainer.learning_rate=1e-6 \
    trainer.eval_on_step_0=true \
    trainer.local_eval_every=5 \
    trainer.save_freq=20 \
    trainer.checkpoint_state_freq=20 \
    algorithm.beta=0.001 \
    algorithm.kl_estimator=2 \
    algorithm.load_ref_policy=true \
    async_training.streaming=true \
    async_training.staleness_threshold=1 \
    async_training.max_staleness_allowed=2 \
    async_training.generation_timeout=1800 \
    async_training.sync_timeout=600 \
    ${tracking[@]+"${tracking[@]}"} \
    "$@"
