#!/bin/bash
# Prolog of slurmd: refuses a job of Orrery's partitions on a node that lacks home or Python.
# An exit code other than 0 drains the node with the reason "Prolog error" and requeues the job.
set -u
. "$(dirname "$0")/orrery.env"

if [ -n "${ORRERY_PARTITIONS:-}" ]; then
  case " $ORRERY_PARTITIONS " in
    *" ${SLURM_JOB_PARTITION:-} "*) ;;
    *) exit 0 ;;
  esac
fi

# a mount whose server is gone would block for ever
refuse() {
  echo "orrery: $1 on $(hostname -s); job ${SLURM_JOB_ID:-?} is refused" >&2
  command -v logger >/dev/null && logger -t orrery-prolog "$1, job ${SLURM_JOB_ID:-?}"
  exit 1
}
if [ -n "${ORRERY_HOME:-}" ]; then
  timeout 20 test -d "$ORRERY_HOME" || refuse "the home $ORRERY_HOME is missing"
fi
if [ -n "${ORRERY_PYTHON:-}" ]; then
  timeout 20 test -x "$ORRERY_PYTHON" || refuse "the Python $ORRERY_PYTHON is missing"
fi
exit 0
