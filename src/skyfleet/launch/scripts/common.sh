# What set-up, run and drain share: the variables of the task file, checked, and the folders.
# shellcheck shell=bash disable=SC2034

fail() {
  echo "skyfleet task: $*" >&2
  exit 2
}

# SkyPilot exports a variable without a value as an empty string, which boto3 and others take as a value.
for name in AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_REGION AWS_ENDPOINT_URL \
  FLEET_API_KEY FLEET_BASE_URL WANDB_API_KEY WANDB_BASE_URL SLACK_BOT_TOKEN HF_TOKEN HF_ENDPOINT; do
  [[ -n ${!name:-} ]] || unset "$name"
done
[[ ${DISABLE_SLACK:-} != true ]] || unset SLACK_BOT_TOKEN

modality=${MODALITY:-tool_use}
case $modality in
  tool_use | computer_use) modalities=("$modality") ;;
  both) modalities=(tool_use computer_use) ;;
  *) fail "MODALITY=$modality is unknown; use tool_use, computer_use or both" ;;
esac

config=${CONFIG:-fleet_$modality}
state=${SKYFLEET_STATE:-$HOME/.skyfleet}
mkdir -p "$state"
chmod 700 "$state"

constraints=${CONSTRAINTS-constraints.txt}
nodes=${SKYPILOT_NUM_NODES:-1}
rank=${SKYPILOT_NODE_RANK:-${SKYPILOT_SETUP_NODE_RANK:-0}}
extras=${EXTRAS:-train,s3,slack,wandb}

# Another commit with the same packages reuses the environment: skyfleet itself is installed editable.
venv=$state/venv-$({ cat pyproject.toml ${constraints:+"$constraints"} && echo "$PWD $extras"; } |
  sha256sum | cut -c1-12)

openenv=$venv/OpenEnv
[[ ! -d $openenv/src ]] || export PYTHONPATH=$openenv/src${PYTHONPATH:+:$PYTHONPATH}

# The name must be the same after a preemption: SkyPilot keeps the task's id when it recovers a job.
name_run() {
  local chosen=${RESUME_RUN_NAME:-${RUN_NAME:-}}
  if [[ -z $chosen ]]; then
    if [[ -z ${SKYPILOT_TASK_ID:-} ]]; then
      fail "RUN_NAME is empty and this is not a SkyPilot job; set RUN_NAME"
    fi
    chosen=fleet_${modality}_$(printf %s "$SKYPILOT_TASK_ID" | sha256sum | cut -c1-8)
  fi
  [[ $chosen =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*$ ]] ||
    fail "RUN_NAME=$chosen: use letters, digits, _, . and -"
  echo "$chosen"
}
