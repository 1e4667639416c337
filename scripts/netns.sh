#!/usr/bin/env bash
# Copies between servers in network namespaces, recorded on the network between them.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/netns.sh

Starts three servers, each in a network namespace of its own, which a bridge in a fourth one joins. A client copies a file from
server to server, once over TLS with keys, and once without. All packets on the bridge are recorded. Fails unless the copies
succeed, no 16 bytes of the file in a row are in the packets of the first run, and those of the second run have them.

  -h, --help  this text

FANOUT_BUILT: folder with rpc-server and examples/copy_between_servers, which are already built; without it, they are built.
Needs root, Linux, iproute2 and Python 3. Exits with status 77 where namespaces cannot be made.
TEXT
}

case ${1-} in
    '') ;;
    -h | --help) usage; exit 0 ;;
    *) echo "netns.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${CARGO_TARGET_DIR:-target}
built=$(realpath -m "${FANOUT_BUILT:-$target/debug}")
for program in ip python3; do
    command -v "$program" >/dev/null || { echo "netns.sh: skipped: no program $program" >&2; exit 77; }
done

prefix=fanout$$
network=$prefix-net
folder=$(mktemp -d)
pids=()
clean_up() {
    ((${#pids[@]} == 0)) || kill "${pids[@]}" 2>/dev/null || true
    wait
    # With a namespace, its interfaces go.
    for name in "$network" "$prefix"-{1,2,3}; do
        ip netns delete "$name" 2>/dev/null || true
    done
    rm -rf "$folder"
}
trap clean_up EXIT

if ! ip netns add "$network" 2>"$folder/error" || ! ip -n "$network" link add bridge type bridge 2>>"$folder/error"; then
    echo "netns.sh: skipped: cannot make a network namespace: $(tr '\n' ' ' <"$folder/error")" >&2
    exit 77
fi
[[ ${FANOUT_BUILT-} ]] || cargo build --locked -p fanout --bin rpc-server --example copy_between_servers

ip -n "$network" address add 10.77.0.254/24 dev bridge
ip -n "$network" link set bridge up
for i in 1 2 3; do
    ip netns add "$prefix-$i"
    ip -n "$network" link add "port$i" type veth peer name eth0 netns "$prefix-$i"
    ip -n "$network" link set "port$i" master bridge up
    ip -n "$prefix-$i" address add "10.77.0.$i/24" dev eth0
    ip -n "$prefix-$i" link set eth0 up
    ip -n "$prefix-$i" link set lo up # a server wakes itself by a connection
done

head -c 400000 /dev/urandom >"$folder/tensor"
keygen() {
    "$built/rpc-server" keygen "$folder/key-$1"
}
client=$(keygen client) key1=$(keygen 1) key2=$(keygen 2) key3=$(keygen 3)
printf '%s client\n' "$client" | tee "$folder/allowed-1" >"$folder/allowed-2"
printf '%s gpu-1\n' "$key1" >>"$folder/allowed-2"
printf '%s client\n%s gpu-2\n' "$client" "$key2" >"$folder/allowed-3"

# Starts server $1 with further options, and waits until it listens.
serve() {
    local i=$1
    shift
    ip netns exec "$prefix-$i" "$built/rpc-server" -H "10.77.0.$i" -d CPU -t 1 --mem 64M --no-supervise "$@" \
        >"$folder/out-$i" 2>"$folder/log-$i" &
    pids+=($!)
    for ((tries = 0; tries < 600; tries++)); do
        grep -qs '^listening on' "$folder/out-$i" && return
        kill -0 "$!" 2>/dev/null || break
        sleep 0.1
    done
    echo "netns.sh: server $i does not listen:" >&2
    cat "$folder/log-$i" >&2
    exit 1
}

stop_servers() {
    kill "${pids[@]}"
    wait "${pids[@]}" || true
    pids=()
}

# Copies while packets are recorded. $1: whether the recording must have the file (seen) or must not (unseen).
record() {
    local expected=$1
    shift
    ip netns exec "$network" python3 scripts/netns_capture.py --expect "$expected" --file "$folder/tensor" \
        --flow 10.77.0.1,10.77.0.2 --flow 10.77.0.2,10.77.0.3 -- \
        "$built/examples/copy_between_servers" "$folder/tensor" "$@"
}

with_keys() {
    printf '%s\n' --key "$folder/key-$1" --allow-keys "$folder/allowed-$1"
}
mapfile -t keys1 < <(with_keys 1)
mapfile -t keys2 < <(with_keys 2)
mapfile -t keys3 < <(with_keys 3)
serve 1 "${keys1[@]}" --peer "10.77.0.2=$key2"
serve 2 "${keys2[@]}" --peer "10.77.0.3=$key3"
serve 3 "${keys3[@]}"
record unseen --key "$folder/key-client" "10.77.0.1:50052=$key1" "10.77.0.2:50052=$key2" "10.77.0.3:50052=$key3"
stop_servers

serve 1 --insecure --peer 10.77.0.2
serve 2 --insecure --peer 10.77.0.3
serve 3 --insecure
record seen 10.77.0.1:50052 10.77.0.2:50052 10.77.0.3:50052
stop_servers
echo "netns.sh: the recordings of the copies are as expected"
