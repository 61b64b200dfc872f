# One Ray cluster over the nodes of the task, beside SkyPilot's own, which `ray stop` would end.
# shellcheck shell=bash disable=SC2154 # venv, nodes and state come from common.sh

[[ -x $venv/bin/ray ]] ||
  fail "SKYPILOT_NUM_NODES=$nodes needs Ray; launch with --env EXTRAS=$extras,ray"
ray_port=${RAY_PORT:-6479}
head_ip=$(head -n 1 <<<"$SKYPILOT_NODE_IPS")
node_ip=$(sed -n "$((rank + 1))p" <<<"$SKYPILOT_NODE_IPS")
export RAY_ADDRESS=$head_ip:$ray_port
# Every node knows the same secrets, so every node computes the same token.
RAY_AUTH_TOKEN=$(printf '%s\n' "${SKYPILOT_TASK_ID:-}" "${FLEET_API_KEY:-}" "${WANDB_API_KEY:-}" \
  "${AWS_SECRET_ACCESS_KEY:-}" | sha256sum | cut -c1-64)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
# Ray's sockets are below this folder, and their paths may have 107 characters.
ray_options=(--disable-usage-stats --temp-dir="/tmp/skyfleet_ray_$UID" --node-ip-address="$node_ip"
  --object-store-memory="${RAY_OBJECT_STORE_BYTES:-10000000000}")

start_ray_head() {
  # `ray start --block` ends its processes when it gets SIGTERM.
  "$venv/bin/ray" start --head --port="$ray_port" --include-dashboard=false "${ray_options[@]}" --block \
    >"$state/ray.log" 2>&1 &
  ray_pid=$!
  local joined=0 try
  for ((try = 0; try < 24; try++)); do
    joined=$("$venv/bin/python" "$scripts/count_ray_nodes.py" 2>>"$state/ray.log") || joined=0
    if ((joined >= nodes)); then
      echo "ray: $joined of $nodes nodes at $RAY_ADDRESS"
      return
    fi
    sleep 5 &
    wait $! || true
  done
  tail -n 20 "$state/ray.log" >&2
  fail "only $joined of $nodes nodes joined Ray at $RAY_ADDRESS within two minutes"
}

join_ray() {
  local try
  for ((try = 0; try < 24; try++)); do
    if "$venv/bin/ray" health-check --address="$RAY_ADDRESS" >/dev/null 2>&1; then break; fi
    sleep 5 &
    wait $! || true
  done
  # Without --temp-dir: Ray takes the head's.
  "$venv/bin/ray" start --address="$RAY_ADDRESS" --disable-usage-stats --node-ip-address="$node_ip" \
    --object-store-memory="${RAY_OBJECT_STORE_BYTES:-10000000000}" --block >"$state/ray.log" 2>&1 &
  ray_pid=$!
  echo "ray: node $rank joins $RAY_ADDRESS"
  # The head ends its Ray with the run; a worker that ends with an error would fail the job.
  wait "$ray_pid" || true
}
