#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Trains over the machines of a Slurm job: one process per machine, each with all of its GPUs.
#
#   sbatch --nodes=4 --gpus-per-node=8 launch/slurm.sh \
#     --gin_file=configs/runs/pretrain_switch_base.gin --gin.VOCABULARY_FILE=t5.model \
#     --gin_file=configs/meshes/hierarchical.gin --gin.NODES=4 --gin.EXPERT_PARTS=8 \
#     --gin_file=configs/xla/overlap.gin --model_dir=/shared/runs/base
#
# Arguments after the script's name are options of `switchx train`. --model_dir has to be on a
# file system that all machines share. A process that is lost ends the step; the job then
# begins it again from the last checkpoint, RESTARTS times in a row without a new one. After a
# signal (the time limit, a machine that is taken away) it goes back into the queue.
#
# With a spare machine, `NODES=4 sbatch --nodes=5 ...`: one that does not answer any more, or
# whose process is lost for the second time, is left out. Without a spare the job goes back into
# the queue, where Slurm gives it machines that are up. `scancel JOB` ends it.

#SBATCH --job-name=switchx
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Before the time limit each process gets SIGTERM: they save, and leave with status 75.
#SBATCH --signal=TERM@300

set -euo pipefail

RESTARTS="${RESTARTS:-3}"
export SWITCHX_LAUNCHED=1 # after a signal even a single process ends with 75
SWITCHX="${SWITCHX:-switchx}"
JOB="${SLURM_JOB_ID:-0}"
ALLOCATED="${SLURM_JOB_NUM_NODES:-1}"
NODES="${NODES:-$ALLOCATED}"

model_dir="" option=""
for word in "$@"; do
  case "$word" in --model_dir=*) model_dir="${word#--model_dir=}" ;; esac
  if [ "$option" = --model_dir ]; then model_dir="$word"; fi
  option="$word"
done
case "$model_dir" in "~" | "~/"*) model_dir="$HOME${model_dir#\~}" ;; esac # as switchx reads it
said="$(mktemp)"
trap 'rm -f "$said"' EXIT

newest_checkpoint() {
  # An object store is not listed: there every restart counts.
  find "$model_dir/checkpoints" -mindepth 1 -maxdepth 1 -printf '%f\n' 2>/dev/null |
    grep -xE '[0-9]+' | sort -n | tail -n 1 || true
}

answers() {
  timeout 60 srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" true > /dev/null 2>&1
}

requeue() {
  echo "switchx: back into the queue: $1"
  scontrol requeue "$JOB"
}

before="$(newest_checkpoint)"
left="$RESTARTS"
excluded=""     # machines, with commas
num_excluded=0
lost_once=" "   # machines whose process was lost
while true; do
  # Processes end each other and exit with the status that says why. Slurm would end process 0,
  # which is the last one, with another status.
  # srun sets SLURM_PROCID, SLURM_NTASKS and SLURM_STEP_NODELIST, which JAX reads.
  status=0
  srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 ${excluded:+--exclude="$excluded"} \
    --kill-on-bad-exit=0 --wait=120 --label \
    "$SWITCHX" train --silence_seconds=60 --start_seconds=600 "$@" \
    2>&1 | tee "$said" || status="${PIPESTATUS[0]}"
  # 0: done. 2: wrong input, 3: training stopped, as where it diverged; another attempt changes
  # neither.
  case "$status" in 0 | 2 | 3) exit "$status" ;; esac
  # 75: saved after a signal. This allocation may be about to end, so the job goes on in
  # another; where jobs may not be requeued, in this one as long as there is time.
  if [ "$status" -eq 75 ] && requeue "a signal, and the state is saved"; then
    exit "$status"
  fi
  # One line may name several: `process 1 (HOST, pid P), process 2 (HOST, pid P) is lost`.
  for host in $(grep -E 'process [0-9]+ \([^ ,]+, pid [0-9]+\) is lost' "$said" |
    grep -oE 'process [0-9]+ \([^ ,]+, pid [0-9]+\)' |
    sed -E 's/.*\(([^ ,.]+).*/\1/' | sort -u); do
    if [[ "$lost_once" == *" $host "* ]] || ! answers "$host"; then
      excluded="${excluded:+$excluded,}$host"
      num_excluded=$((num_excluded + 1))
    fi
    lost_once="$lost_once$host "
  done
  if [ $((ALLOCATED - num_excluded)) -lt "$NODES" ]; then
    if requeue "no spare for $excluded"; then
      exit "$status"
    fi
    excluded="" num_excluded=0 lost_once=" "
  fi
  newest="$(newest_checkpoint)"
  if [ "$newest" != "$before" ]; then
    before="$newest"
    left="$RESTARTS"
  elif [ "$left" -eq 0 ]; then
    exit "$status"
  else
    left=$((left - 1))
  fi
  echo "switchx: status $status; begins again${newest:+ from step $newest}${excluded:+ without $excluded}, $left restarts left without a new checkpoint"
done
