#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# GRPO with verl 0.9 on shared prompts, on the GPUs of one machine. What it needs: docs/trainers.md.
#
#   TRAIN=train.parquet VAL=test.parquet examples/verl_grpo.sh
#   MODEL=Qwen/Qwen3-8B GPUS=4 N=32 examples/verl_grpo.sh actor_rollout_ref.actor.entropy_coeff=0.01
#
# All that follows the script's name goes to verl as it stands. Three settings are this package:
# external_lib for updates and log-probabilities, vLLM's attention backend and the router for
# rollouts. verl's own, for comparison, and a task to try it on: examples/rule_task.py
#
#   ATTENTION= ROUTER= examples/verl_grpo.sh actor_rollout_ref.model.external_lib=null
set -euo pipefail

: "${MODEL:=Qwen/Qwen3-1.7B}"                  # a name on the Hugging Face hub, or a folder
: "${TRAIN:=$HOME/data/gsm8k/train.parquet}"   # in verl's format: prompt, data_source, reward_model
: "${VAL:=$HOME/data/gsm8k/test.parquet}"
: "${GPUS:=8}"
: "${ROLLOUT:=vllm}"                           # or sglang
: "${TENSOR_PARALLEL:=1}"                      # GPUs of one rollout engine
# Decoding on this package, with vLLM; ATTENTION= takes vLLM's own.
: "${ATTENTION=CUSTOM}"
# A prompt's responses on one engine; ROUTER= takes verl's own balancer, which scatters them.
: "${ROUTER=$(python -m flash_attn_dualkv.integrations.verl.router)}"
: "${N:=16}"                                   # responses to a prompt
: "${PROMPT_LENGTH:=2048}"                     # the longest, in tokens
: "${RESPONSE_LENGTH:=4096}"
: "${PROMPTS:=64}"                             # of a step
: "${MINI_PROMPTS:=$PROMPTS}"                  # of an optimizer step: a multiple of the GPUs keeps groups whole
: "${TOKENS:=32768}"                           # of a micro-batch on a GPU, every prompt counted once
: "${LEARNING_RATE:=1e-6}"
: "${EPOCHS:=1}"

exec python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$TRAIN" \
    data.val_files="$VAL" \
    data.train_batch_size="$PROMPTS" \
    data.max_prompt_length="$PROMPT_LENGTH" \
    data.max_response_length="$RESPONSE_LENGTH" \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.external_lib=flash_attn_dualkv.integrations.verl \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr="$LEARNING_RATE" \
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_PROMPTS" \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$TOKENS" \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name="$ROLLOUT" \
    actor_rollout_ref.rollout.tensor_model_parallel_size="$TENSOR_PARALLEL" \
    actor_rollout_ref.rollout.n="$N" \
    actor_rollout_ref.rollout.router_config_path="$ROUTER" \
    ${ATTENTION:+"+actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend=$ATTENTION"} \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node="$GPUS" \
    trainer.logger='["console"]' \
    trainer.project_name=shared_prompts \
    trainer.experiment_name=grpo \
    trainer.total_epochs="$EPOCHS" \
    trainer.val_before_train=False \
    "$@"
