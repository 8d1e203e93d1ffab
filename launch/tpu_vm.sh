#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Trains on one worker of a Cloud TPU VM slice; started on all workers at the same time:
#
#   gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all --command='
#     cd switchx && launch/tpu_vm.sh --gin_file=configs/runs/pretrain_switch_base.gin \
#       --gin.VOCABULARY_FILE=t5.model --model_dir=/shared/base'
#
# The run has its own mesh, 4 x 4 x 8 devices and more along `data`; a file of configs/meshes/ after
# it takes its place. For several slices of a queued resource, the same for each of them. What
# follows the script's name are options of `switchx train`. JAX asks the metadata server which
# worker this is, and how many there are; process 0 is worker 0 of slice 0, whose port 8482 the
# others have to reach.
#
# A process that is lost ends those of all workers; each of these scripts begins its own again,
# from the last checkpoint, RESTARTS times in a row without a new one, and they wait
# --start_seconds for each other: that is how long a worker may take to be repaired.

set -euo pipefail

RESTARTS="${RESTARTS:-3}"
SWITCHX="${SWITCHX:-switchx}"

model_dir="" option=""
for word in "$@"; do
  case "$word" in --model_dir=*) model_dir="${word#--model_dir=}" ;; esac
  if [ "$option" = --model_dir ]; then model_dir="$word"; fi
  option="$word"
done
case "$model_dir" in "~" | "~/"*) model_dir="$HOME${model_dir#\~}" ;; esac # as switchx reads it

newest_checkpoint() {
  # An object store is not listed: there every restart counts.
  find "$model_dir/checkpoints" -mindepth 1 -maxdepth 1 -printf '%f\n' 2>/dev/null |
    grep -xE '[0-9]+' | sort -n | tail -n 1 || true
}

before="$(newest_checkpoint)"
left="$RESTARTS"
while true; do
  status=0
  "$SWITCHX" train --silence_seconds=60 --start_seconds=600 "$@" || status=$?
  # 0: done. 2: wrong input, 3: training stopped, as where it diverged; another attempt changes
  # neither. 75: saved after a signal, as when a machine is taken away: the same command goes on
  # when it is back.
  case "$status" in 0 | 2 | 3 | 75) exit "$status" ;; esac
  newest="$(newest_checkpoint)"
  if [ "$newest" != "$before" ]; then
    before="$newest"
    left="$RESTARTS"
  elif [ "$left" -eq 0 ]; then
    exit "$status"
  else
    left=$((left - 1))
  fi
  echo "switchx: status $status; begins again${newest:+ from step $newest}, $left restarts left without a new checkpoint"
done
