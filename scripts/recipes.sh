#!/usr/bin/env bash
# Checks the recipes of docs/deploy with the tools that are installed.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/recipes.sh [--boot] [--slurm MODEL]

Checks the files of docs/deploy, each with its tool, as far as the tool is installed; says what was skipped:

  systemd     `systemd-analyze verify` finds nothing; the exposure that `systemd-analyze security` estimates is at most 2.0, with the
              drop-in for GPUs at most 3.2
  activation  systemd-socket-activate starts the server with the first client, and --status finds it ready
  kubernetes  kubernetes-validate (PyPI) accepts the manifests, and knows all their fields
  slurm       shellcheck finds nothing in the script of the job
  compose     podman-compose (PyPI) reads the compose file, and the server knows the options of each service

  --boot         also boots systemd in a container of systemd-nspawn, with this machine's /usr: starts the unit with the server in its
                 sandbox, stops it, and starts it again by a client of the socket unit (root)
  --slurm MODEL  also runs the job on a Slurm of its own, with two nodes on this machine, on a GGUF file (root; Debian: slurm-wlm,
                 munge)
  -h, --help     this text

FANOUT_BUILT: folder with rpc-server and generate, which are already built (default: target/release).
TEXT
}

boot=false model=
while (($#)); do
    case $1 in
        --boot) boot=true ;;
        --slurm)
            (($# > 1)) || { echo "recipes.sh: $1 needs a value" >&2; usage >&2; exit 2; }
            model=$(realpath "$2")
            shift
            ;;
        -h | --help) usage; exit 0 ;;
        *) echo "recipes.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
built=$(realpath -m "${FANOUT_BUILT:-target/release}")
recipes=docs/deploy
folder=$(mktemp -d)
pids=()
clean_up() {
    ((${#pids[@]} == 0)) || kill "${pids[@]}" 2>/dev/null || true
    wait
    rm -rf "$folder"
}
trap clean_up EXIT

die() { echo "recipes.sh: $*" >&2; exit 1; }
checked=() skipped=()

# Whether a program is there, and runs with these arguments; otherwise its check is skipped.
has() { # CHECK PROGRAM [ARGUMENT…]
    if ! command -v "$2" >/dev/null; then
        skipped+=("$1 (no program $2)")
    elif (($# > 2)) && ! "${@:2}" >/dev/null 2>&1; then
        skipped+=("$1 (\`${*:2}\` fails: a part of it is missing, or it is too old)")
    else
        return 0
    fi
    return 1
}

exposure() { # UNIT LIMIT
    local shown
    shown=$(systemd-analyze security --offline=true --no-pager "$1" | sed -n 's/.*Overall exposure level.*: \([0-9.]*\) .*/\1/p')
    [[ -n $shown ]] || die "systemd-analyze security does not say the exposure of $1"
    awk -v shown="$shown" -v limit="$2" 'BEGIN { exit !(shown <= limit) }' || die "$1: exposure $shown, more than $2"
    echo "systemd: ${1##*/}${3:+ with $3}: exposure $shown (at most $2)"
}

check_systemd() {
    local unit=$folder/fanout.service messages
    # verify demands that the program exists. Pages of man need not be installed.
    sed 's,/usr/local/bin/rpc-server,/bin/true,' "$recipes/systemd/fanout.service" >"$unit"
    cp "$recipes/systemd/fanout.socket" "$folder"
    messages=$(systemd-analyze verify --man=no "$unit" "$folder/fanout.socket" 2>&1) || die "systemd-analyze verify: $messages"
    [[ -z $messages ]] || die "systemd-analyze verify: $messages"
    exposure "$unit" 2.0
    mkdir "$unit.d"
    cp "$recipes/systemd/gpu.conf" "$unit.d"
    messages=$(systemd-analyze verify --man=no "$unit" 2>&1) || die "systemd-analyze verify with gpu.conf: $messages"
    [[ -z $messages ]] || die "systemd-analyze verify with gpu.conf: $messages"
    exposure "$unit" 3.2 gpu.conf
}

check_activation() {
    local port=$((20000 + $$ % 10000)) log=$folder/activation
    systemd-socket-activate --listen "127.0.0.1:$port" "$built/rpc-server" --port "$port" --threads 1 --mem 64M >"$log" 2>&1 &
    pids+=($!)
    # The first client starts the server. Until systemd-socket-activate listens, it is refused.
    for _ in {1..50}; do
        ! "$built/rpc-server" --status "127.0.0.1:$port" >"$folder/status" 2>&1 || break
        sleep 0.1
    done
    grep -q ': ready$' "$folder/status" || die "the server is not started by its client: $(cat "$folder/status" "$log")"
    echo "activation: $(grep '^listening on' "$log")"
}

check_compose() {
    local options
    podman-compose -f "$recipes/compose.yaml" config >"$folder/compose" || die "podman-compose does not read the compose file"
    mapfile -t options < <(sed -n '/^services:/,/^volumes:/s/^ *- \(--.*\)$/\1/p' "$folder/compose" | sort -u)
    ((${#options[@]})) || die "the compose file gives the servers no options"
    # Options are parsed before anything is done.
    "$built/rpc-server" "${options[@]}" --list-devices >/dev/null || die "the server does not know the options of the compose file"
    echo "compose: ${options[*]}"
}

# A container with this machine's /usr and nothing else of it. Its /check.service runs once, and its output is in /result.
check_boot() {
    local root=$folder/root unit
    mkdir -p "$root"/{usr,var,tmp,root,run,proc,sys,dev,opt} "$root/etc/systemd/system/multi-user.target.wants"
    for link in bin sbin lib lib64; do ln -s "usr/$link" "$root/$link"; done
    cp /etc/os-release /etc/nsswitch.conf "$root/etc"
    cp -r /etc/ld.so.cache /etc/pam.d /etc/alternatives "$root/etc"
    echo root:x:0:0:root:/root:/bin/sh >"$root/etc/passwd"
    echo root:x:0: >"$root/etc/group"
    : >"$root/etc/machine-id"
    cp "$built/rpc-server" "$root/opt"
    for unit in fanout.service fanout.socket; do
        sed 's,/usr/local/bin/rpc-server,/opt/rpc-server,' "$recipes/systemd/$unit" >"$root/etc/systemd/system/$unit"
    done
    cat >"$root/etc/systemd/system/check.service" <<'UNIT'
[Unit]
After=basic.target
[Service]
Type=oneshot
StandardOutput=file:/result
StandardError=inherit
ExecStart=/bin/sh /check.sh
ExecStopPost=systemctl --no-block poweroff
UNIT
    ln -s ../check.service "$root/etc/systemd/system/multi-user.target.wants"
    cat >"$root/check.sh" <<'SCRIPT'
status() { for _ in 1 2 3 4 5 6 7 8 9; do /opt/rpc-server --status 127.0.0.1:50052 && return; sleep 1; done; return 1; }
set -ex
systemctl start fanout.service
status
systemctl stop fanout.service
systemctl show --property Result --value fanout.service | grep -x success
systemctl start fanout.socket
! systemctl is-active fanout.service
status
systemctl is-active fanout.service
journalctl --no-pager -o cat -u fanout.service
ls -ld /var/cache/private/fanout
echo all steps passed
SCRIPT
    timeout 120 systemd-nspawn --quiet --directory="$root" --bind-ro=/usr --private-network --register=no --keep-unit --boot \
        --system-call-filter="landlock_create_ruleset landlock_add_rule landlock_restrict_self" \
        </dev/null >"$folder/boot" 2>&1 || true
    grep -q '^all steps passed$' "$root/result" || die "the unit does not work: $(cat "$root/result" "$folder/boot")"
    ! grep '^sandbox: .*missing' "$root/result" || die "the unit keeps the server from its sandbox"
    grep -E '^(sandbox|listening on)' "$root/result" | sed 's/^/boot: /'
}

# Slurm with two nodes on this machine.
check_slurm() {
    local host node
    host=$(hostname)
    mkdir -p "$folder/slurm/state"
    dd if=/dev/urandom of="$folder/slurm/key" bs=32 count=1 status=none
    chmod 400 "$folder/slurm/key"
    munged --force --foreground --key-file="$folder/slurm/key" --socket="$folder/slurm/munge" --pid-file="$folder/slurm/munge.pid" \
        --log-file="$folder/slurm/munge.log" --seed-file="$folder/slurm/seed" >/dev/null 2>&1 &
    pids+=($!)
    cat >"$folder/slurm/slurm.conf" <<CONFIGURATION
ClusterName=fanout
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=26817
AuthType=auth/munge
AuthInfo=socket=$folder/slurm/munge
StateSaveLocation=$folder/slurm/state
SlurmdSpoolDir=$folder/slurm/spool-%n
SlurmctldPidFile=$folder/slurm/slurmctld.pid
SlurmdPidFile=$folder/slurm/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
NodeName=n[0-1] NodeHostname=$host NodeAddr=127.0.0.1 Port=[26820-26821] CPUs=1
PartitionName=main Nodes=ALL Default=YES State=UP
CONFIGURATION
    export SLURM_CONF=$folder/slurm/slurm.conf
    slurmctld -D >"$folder/slurm/slurmctld.log" 2>&1 &
    pids+=($!)
    for node in n0 n1; do
        slurmd -D -N "$node" >"$folder/slurm/$node.log" 2>&1 &
        pids+=($!)
    done
    (
        cd "$folder/slurm"
        # Fails until the controller listens.
        for _ in {1..100}; do ! sinfo >/dev/null 2>&1 || break; sleep 0.1; done
        FANOUT_ALLOW=0.0.0.0/0 FANOUT_FOLDER=$PWD PATH=$built:$PATH timeout 120 sbatch --wait --nodes 2 --output job "$OLDPWD/$recipes/slurm/fanout.sbatch" \
            "$model" --tokens 1,2,3 --predict 8 --json
    ) || die "the job failed: $(cat "$folder"/slurm/*.log "$folder/slurm/job")"
    sed 's/^/slurm: /' "$folder/slurm/job" | cut -c 1-160
    # Both servers have weights.
    python3 - "$folder/slurm/job" <<'PY'
import json, sys
report = next(json.loads(line) for line in open(sys.argv[1]) if line.startswith("{"))
names = [device["name"] for device in report["devices"]]
assert len(names) == 2 and all(device["layers"] > 0 for device in report["devices"]), report["devices"]
print("slurm: layers on", ", ".join(names))
PY
}

if has systemd systemd-analyze --offline=true --version; then
    check_systemd
    checked+=(systemd)
fi
if has activation systemd-socket-activate --version && has activation "$built/rpc-server" --version; then
    check_activation
    checked+=(activation)
fi
if has kubernetes kubernetes-validate --help; then
    messages=$(kubernetes-validate --strict "$recipes"/kubernetes/*.yaml 2>&1) || die "kubernetes-validate: $messages"
    echo "kubernetes: $(grep -c passed <<<"$messages") resources"
    checked+=(kubernetes)
fi
if has slurm shellcheck --version; then
    shellcheck "$recipes"/slurm/fanout.sbatch
    checked+=(slurm)
fi
if has compose podman --version && has compose podman-compose version && has compose "$built/rpc-server" --version; then
    check_compose
    checked+=(compose)
fi
if $boot; then
    command -v systemd-nspawn >/dev/null || die "no program systemd-nspawn: install it (Debian: systemd-container)"
    check_boot
    checked+=(boot)
fi
if [[ -n $model ]]; then
    for program in munged slurmctld slurmd; do command -v "$program" >/dev/null || die "no program $program (Debian: slurm-wlm, munge)"; done
    check_slurm
    checked+=("slurm job")
fi
for check in "${skipped[@]}"; do echo "skipped: $check"; done
((${#checked[@]})) || die "no check could run"
echo "checked: ${checked[*]}"
