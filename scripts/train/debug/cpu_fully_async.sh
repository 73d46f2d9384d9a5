#!/usr/bin/env bash
# Sets up on a machine with Python (3.11 to 3.13) and pip, then trains a tiny model to add, fully asynchronously, on two CPU cores.
#
#   bash scripts/train/debug/cpu_fully_async.sh
#   bash scripts/train/debug/cpu_fully_async.sh async_training.staleness_threshold=1 trainer.seed=3     overrides win
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
bash "$ROOT/scripts/setup_cpu.sh"

# Two cores: one for the engine, one for the learner. The model and the data come with the project.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

SUMS="reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2"

exec "$ROOT/.venv/bin/python" "$ROOT/open_instruct/fully_async_main.py" \
    --config-path "$ROOT/conf" \
    model.model_name_or_path="$ROOT/assets/tiny_model" \
    "data.dataset_mixer_list=['$SUMS&size=8000&seed=7','1.0']" \
    "data.dataset_mixer_eval_list=['$SUMS&size=512&seed=20240','1.0']" \
    data.max_prompt_token_length=64 \
    data.pack_length=2048 \
    rollout.response_length=32 \
    rollout.num_unique_prompts_rollout=32 \
    rollout.num_samples_per_prompt_rollout=8 \
    rollout.n_gpus_per_node=1 \
    rollout.vllm_enforce_eager=true \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.deepspeed_stage=2 \
    trainer.total_episodes=40960 \
    trainer.learning_rate=1e-4 \
    trainer.lr_scheduler_type=linear \
    trainer.checkpoint_state_freq=40 \
    trainer.output_dir=out/cpu_fully_async \
    trainer.seed=1 \
    trainer.eval_on_step_0=true \
    trainer.local_eval_every=40 \
    algorithm.verification_reward=1.0 \
    async_training.batch_generation_interval=0.0 \
    async_training.statistics_interval_s=10 \
    "$@"
