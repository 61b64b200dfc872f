#!/usr/bin/env bash
# End the trainer of this machine and wait until it has saved and uploaded its checkpoint.
# SkyPilot calls it before it takes the machine down; `skyfleet runs stop` calls it first.
set -uo pipefail
state=${SKYFLEET_STATE:-$HOME/.skyfleet}
seconds=${DRAIN_SECONDS:-900}
pid=$(cat "$state/trainer.pid" 2>/dev/null) || exit 0

# After a reboot the number may belong to another process.
is_trainer() { { [[ -n $pid ]] && tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q skyfleet; } 2>/dev/null; }

is_trainer || exit 0
echo "drain: the trainer saves its checkpoint and uploads it (at most $seconds s)"
kill -TERM "$pid" 2>/dev/null
for ((waited = 0; waited < seconds; waited++)); do
  if ! is_trainer; then
    echo "drain: the trainer ended after $waited s"
    exit 0
  fi
  sleep 1
done
echo "drain: the trainer still runs after $seconds s; the newest complete checkpoint is the one before" >&2
exit 1
