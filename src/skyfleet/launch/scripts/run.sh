#!/usr/bin/env bash
# Train the run of this task, or resume it from its newest complete checkpoint.
#
# The trainer runs in a session of its own and writes to a file. SkyPilot ends a cancelled job with SIGKILL
# after 30 seconds; the trainer gets only the SIGTERM, and goes on until its uploads are complete.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$scripts/../../../.."
# shellcheck source=src/skyfleet/launch/scripts/common.sh
. "$scripts/common.sh"
[[ -e $venv/complete ]] || fail "$venv is not complete; run the task's set-up first"

export TMPDIR=$state/tmp
mkdir -p "$TMPDIR"
ray_pid=
trap '[[ -z $ray_pid ]] || kill "$ray_pid" 2>/dev/null || true' EXIT
if ((nodes > 1)); then
  # shellcheck source=src/skyfleet/launch/scripts/ray.sh
  . "$scripts/ray.sh"
  if ((rank > 0)); then
    join_ray
    exit 0
  fi
  start_ray_head
fi

run_name=$(name_run)
log=$state/$run_name.log
echo "run: $run_name, commit ${GIT_COMMIT:-unknown}, configuration $config, log $log"
bash "$scripts/drain.sh" # of an earlier job on this machine

arguments=("$config" "trainer.run_name=$run_name")
list_files() { # SPLIT: the prepared files of that split; without tasks to evaluate there is no validation file
  local found=() one
  for one in "${modalities[@]}"; do
    [[ ! -e data/fleet/$one/$1.parquet ]] || found+=("data/fleet/$one/$1.parquet")
  done
  (IFS=, && echo "[${found[*]}]")
}
if [[ ${DATASET-fleet} == fleet ]]; then
  arguments+=("data.train_data=$(list_files train)" "data.val_data=$(list_files validation)")
fi
[[ -z ${S3_CHECKPOINT_BUCKET:-} ]] || arguments+=("trainer.ckpt_bucket=$S3_CHECKPOINT_BUCKET")
[[ -z ${S3_TRAJECTORY_BUCKET:-} ]] || arguments+=("trainer.trajectory_bucket=$S3_TRAJECTORY_BUCKET")
[[ -z ${WANDB_API_KEY:-} ]] || arguments+=("trainer.logger=[${LOGGER:-console,wandb}]")
if [[ -n ${SLACK_BOT_TOKEN:-} && -n ${SLACK_CHANNEL:-} && ,$extras, == *,slack,* ]]; then
  arguments+=("trainer.alerts.slack_channel=${SLACK_CHANNEL#\#}")
fi
find_price() { # of all machines of this run, on the cloud that SkyPilot names
  local cloud entry
  cloud=$(sed -nE 's/.*"cloud": *"([^"]*)".*/\1/p' <<<"${SKYPILOT_CLUSTER_INFO:-}")
  for entry in $(tr "," " " <<<"${DOLLARS_PER_HOUR:-}"); do
    [[ ${entry%%=*} != "${cloud,,}" ]] || echo "${entry#*=}"
  done
}
price=$(find_price)
[[ -z $price ]] || arguments+=("trainer.alerts.dollars_per_hour=$price")
while IFS= read -r override; do
  [[ -z $override ]] || arguments+=("$override")
done <<<"${OVERRIDES:-}"

# All that is missing, such as a key, a bucket or a GPU, is named at once, before the trainer starts. A
# failure is tried once more; 75, a service that does not answer, as often as the trainer is restarted.
for ((attempt = 0; ; attempt++)); do
  code=0
  [[ ${PREFLIGHT:-1} != 1 ]] || "$venv/bin/skyfleet" preflight "${arguments[@]}" || code=$?
  ((code != 0)) || break
  if ((code == 75)); then
    ((attempt < ${MAX_RESTARTS:-3})) || exit 75
  elif ((attempt > 0)); then
    exit 2
  fi
  sleep "${RESTART_SECONDS:-15}"
done

start_trainer() {
  rm -f "$state/trainer.pid" "$state/trainer.status"
  touch "$log"
  # shellcheck disable=SC2016 # expanded by the inner shell
  setsid --fork bash -c '
    state=$1; shift
    trap : TERM INT HUP
    "$@" & pid=$!
    echo "$pid" >"$state/trainer.pid"
    code=0; wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do code=0; wait "$pid" || code=$?; done
    echo "$code" >"$state/trainer.status"
  ' trainer "$state" "$venv/bin/skyfleet" train "${arguments[@]}" >>"$log" 2>&1 </dev/null
}

stopping=
stop_trainer() {
  stopping=1
  local pid
  pid=$(cat "$state/trainer.pid" 2>/dev/null) && kill -TERM "$pid" 2>/dev/null || true
}
trap stop_trainer TERM INT HUP

# Returns the trainer's exit status; 137 if it and the shell above it were killed.
follow_trainer() {
  local pid='' missing=0
  tail -n 0 -F "$log" 2>/dev/null &
  local tail_pid=$!
  while [[ ! -s $state/trainer.status ]]; do
    sleep "${POLL_SECONDS:-1}" &
    wait $! || true
    if [[ -z $pid ]]; then
      pid=$(cat "$state/trainer.pid" 2>/dev/null) || pid=
      # A signal that came before the trainer had written its number.
      [[ -z $pid || -z $stopping ]] || kill -TERM "$pid" 2>/dev/null || true
    fi
    if [[ -z $pid ]] || kill -0 "$pid" 2>/dev/null; then missing=0; else missing=$((missing + 1)); fi
    if ((missing > 10)); then echo 137 >"$state/trainer.status"; fi
  done
  sleep "${POLL_SECONDS:-1}" # the last lines
  kill "$tail_pid" 2>/dev/null || true
  wait "$tail_pid" 2>/dev/null || true
  return "$(cat "$state/trainer.status")"
}

# 2 is a mistake that a restart repeats; 128 + a signal is a stop that was asked for. Anything else is a
# crash, or 75, an outage: the same command resumes from the newest complete checkpoint.
for ((restart = 0; ; restart++)); do
  start_trainer
  code=0
  follow_trainer || code=$?
  case $code in
    0) exit 0 ;;
    2 | 129 | 130 | 143) exit "$code" ;;
  esac
  [[ -z $stopping ]] || exit "$code"
  if ((restart >= ${MAX_RESTARTS:-3})); then
    echo "run: the trainer ended with code $code; ${MAX_RESTARTS:-3} restarts are used up" >&2
    exit "$code"
  fi
  echo "run: the trainer ended with code $code; restart $((restart + 1)) of ${MAX_RESTARTS:-3} resumes it" >&2
  sleep "${RESTART_SECONDS:-15}" &
  wait $! || true
  [[ -z $stopping ]] || exit 143
done
