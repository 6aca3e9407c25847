#!/bin/bash
# Epilog of slurmd: ends what a job left on the node, and deletes old logs of Orrery's jobs.
# Never fails, because that would drain the node.
set -u
. "$(dirname "$0")/orrery.env"

job="${SLURM_JOB_ID:-}"
if [ -n "$job" ]; then
  for place in /proc/[0-9]*; do
    # only processes of Orrery's attempts in this job have both variables
    { tr '\0' '\n' < "$place/environ"; } 2>/dev/null | awk -v job="SLURM_JOB_ID=$job" '
      $0 == job { one = 1 } /^ORRERY_FENCE=/ { two = 1 } END { exit !(one && two) }' &&
      kill -KILL "${place#/proc/}" 2>/dev/null
  done
fi
find /tmp -maxdepth 1 -name 'orrery-*-*.log' -type f -mtime +"${ORRERY_LOG_DAYS:-14}" -delete 2>/dev/null
exit 0
