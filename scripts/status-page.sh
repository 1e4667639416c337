#!/usr/bin/env bash
# The status page in a real browser: checks what it shows of a server in use, and takes screenshots.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/status-page.sh

Starts rpc-server, lets `rpc-server doctor` work on it, opens its page in headless Chromium, and fails unless the page shows the state,
the devices, the session and a line of the last seconds. Screenshots for the eye: target/status-page/wide.png, and narrow-dark.png of a
telephone at night.

  -h, --help  this text

FANOUT_BUILT: folder with programs that are already built; see scripts/emulate.sh --help.
Needs Chromium (Debian: chromium).
TEXT
}

case ${1-} in
    '') ;;
    -h | --help) usage; exit 0 ;;
    *) echo "status-page.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v chromium >/dev/null || { echo "status-page.sh: no program chromium: install it (Debian: chromium)" >&2; exit 1; }
target=${CARGO_TARGET_DIR:-target}
built=${FANOUT_BUILT:-$target/release}
[[ ${FANOUT_BUILT-} ]] || cargo build --quiet --release --locked --bin rpc-server
out=$target/status-page
rm -rf "$out"
mkdir -p "$out/in-use"

# Exists before the server writes to it, because sed below fails without it.
: >"$out/server.log"
children=()
stop() {
    rmdir "$out/in-use" 2>/dev/null || true # ends the loop of the doctor after its last run
    kill "${children[0]}" 2>/dev/null || true
    wait
}
trap stop EXIT

"$built/rpc-server" -p 0 -d CPU,CPU -t 1 --mem 256M >"$out/server.log" 2>&1 &
children+=($!)
for ((i = 0; i < 300; i++)); do
    page=$(sed -n 's/^status page: //p' "$out/server.log")
    [[ $page ]] && break
    sleep 0.1
done
[[ $page ]] || { cat "$out/server.log" >&2; echo "status-page.sh: the server printed no address within 30 s" >&2; exit 1; }
address=${page#http://}
while [[ -d $out/in-use ]]; do "$built/rpc-server" doctor "${address%/}"; done >"$out/doctor.log" 2>&1 &
children+=($!)

# As root, Chromium runs without its sandbox only. Time of the page passes as fast as it has nothing to wait for.
browser() {
    timeout 120 chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$out/profile" \
        --virtual-time-budget=15000 "$@" "$page" 2>"$out/chromium.log"
}
browser --window-size=1200,1000 --screenshot="$out/wide.png"
browser --window-size=420,1400 --blink-settings=preferredColorScheme=0 --screenshot="$out/narrow-dark.png"
for part in 'class="state">ready<' 'CPU0 – 1 thread' 'CPU1 – 1 thread' '8.0, extended' 'id="graph" points="[0-9]'; do
    # The session of a run of the doctor ends, and the next one begins.
    for ((i = 0; i < 5; i++)); do
        browser --dump-dom >"$out/page.html"
        grep -q "$part" "$out/page.html" && break
    done
    grep -q "$part" "$out/page.html" || { echo "status-page.sh: the page shows no '$part'; see $out/page.html" >&2; exit 1; }
done
echo "the page shows the server; look at $out/wide.png and $out/narrow-dark.png"
