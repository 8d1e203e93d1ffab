#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Trains over the machines of a Slurm job: one process a machine, all of its GPUs each.
#
#   sbatch --nodes=4 --gpus-per-node=8 launch/slurm.sh \
#     --gin_file=configs/runs/pretrain_switch_base.gin --gin.VOCABULARY_FILE=t5.model \
#     --gin_file=configs/meshes/hierarchical.gin --gin.NODES=4 --gin.EXPERT_PARTS=8 \
#     --gin_file=configs/xla/overlap.gin --model_dir=/shared/runs/base
#
# What follows the script's name are options of `switchx train`. --model_dir has to be on a
# file system that all machines share. A process that is lost ends the step; the job then
# begins it again, as often as RESTARTS says, from the last checkpoint. After a signal (the time
# limit, a machine that is taken away) it goes back into the queue. `scancel JOB` ends it.

#SBATCH --job-name=switchx
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Before the time limit each process gets SIGTERM: they save, and leave with status 75.
#SBATCH --signal=TERM@300

set -euo pipefail

RESTARTS="${RESTARTS:-3}"
SWITCHX="${SWITCHX:-switchx}"

for attempt in $(seq 0 "$RESTARTS"); do
  # --kill-on-bad-exit: Slurm, too, ends all tasks when one fails.
  # srun sets SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_STEP_NODELIST, which switchx reads.
  status=0
  srun --ntasks-per-node=1 --kill-on-bad-exit=1 --label \
    "$SWITCHX" train --silence_seconds=60 --start_seconds=600 "$@" || status=$?
  # 0: done. 2: wrong input, which another attempt does not change.
  if [ "$status" -eq 0 ] || [ "$status" -eq 2 ]; then
    exit "$status"
  fi
  # 75: saved after a signal. This allocation may be about to end, so the job goes on in
  # another; where jobs may not be requeued, in this one as long as there is time.
  if [ "$status" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"; then
    exit "$status"
  fi
  echo "attempt $attempt ended with status $status"
done
exit "$status"
