#!/bin/bash
# Prolog of slurmd: refuses a job of Orrery's partitions on a node that lacks home or Python.
# An exit code other than 0 drains the node with the reason "Prolog error" and requeues the job.
# Jobs of partitions that orrery.env does not name are never refused.
set -u
. "$(dirname "$0")/orrery.env"

case " ${ORRERY_PARTITIONS:-} " in
  *" ${SLURM_JOB_PARTITION:-none} "*) ;;
  *) exit 0 ;;
esac

# slurmd runs this as root, which a file server may not let read what the job's user can
as_user() {
  timeout -k 5 20 setpriv --reuid="${SLURM_JOB_UID:-}" --regid="$(id -g "${SLURM_JOB_UID:-}")" \
    --init-groups -- "$@"
}
as_user true 2>/dev/null || exit 0

refuse() {
  echo "orrery: $1 on $(hostname -s); job ${SLURM_JOB_ID:-?} is refused" >&2
  command -v logger >/dev/null && logger -t orrery-prolog "$1, job ${SLURM_JOB_ID:-?}"
  exit 1
}
# a mount whose server is gone would block for ever
if [ -n "${ORRERY_HOME:-}" ]; then
  as_user test -d "$ORRERY_HOME" || refuse "the home $ORRERY_HOME is missing"
fi
if [ -n "${ORRERY_PYTHON:-}" ]; then
  as_user test -x "$ORRERY_PYTHON" || refuse "the Python $ORRERY_PYTHON is missing"
fi
exit 0
