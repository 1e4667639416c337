"""Proves that the harnesses can fail: breaks a file of the core in one place at a time, and expects a harness to notice.

    crates/orders/mutants.py [FILTER]

Each row is a file, a text that occurs once in it, what replaces it, and a filter of the harnesses that must fail. The sources are copied to
a temporary folder.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TIMELINE, CHANNEL = "src/device/timeline.rs", "src/device/command_channel.rs"
THREADS, BUDGET, READ = "src/device/queue_threads.rs", "src/device/budget.rs", "src/device/pending_read.rs"
COMPLETIONS, NOTIFIER = "src/rpc/server/extended/completions.rs", "src/rpc/server/extended/notifier.rs"
MUTANTS = (
    # A failed timeline counted as reached.
    (TIMELINE, "if state.failure.is_some() {\n            return;\n        }\n        state.done", "state.done", "timeline"),
    (TIMELINE, "self.advanced_or_failed.notify_all();\n        reached", "self.advanced_or_failed.notify_one();\n        reached", "timeline"),
    (TIMELINE, "self.advanced_or_failed.notify_all();\n        callbacks", "callbacks", "timeline"),
    (TIMELINE, "let callbacks = std::mem::take(&mut state.callbacks);", "let callbacks = BTreeMap::<(u64, u64), CompletionCallback>::new();", "timeline"),
    (TIMELINE, "lock(&timeline.state).callbacks.remove(&key)", "None::<CompletionCallback>", "registrations"),
    (TIMELINE, "self.source.as_ref().is_none_or(|source| source.request_notify(self, seq))", "true", "late"),
    (READ, "slot.deliver(Err(DeviceError::Ended));", "", "pending read"),
    (READ, "if left.is_zero() {", "if true {", "deadlines"),
    (TIMELINE, "if left.is_zero() {", "if true {", "deadlines"),
    (CHANNEL, "state.pending.len() >= MAX_PENDING_COMMANDS\n            || ", "", "many"),
    (CHANNEL, "(state.pending_bytes > 0 && state.pending_bytes + command.staged_bytes() > MAX_PENDING_BYTES)", "false", "full"),
    (CHANNEL, "if state.closed {\n                drop(state);\n                // Dropping the executor fails the timeline.\n                drop(executor);\n                return;\n            }", "", "closed"),
    (READ, "self.delivered.notify_one();", "", "pending read"),
    # A deadline that has passed, after the result has come.
    (READ, "if let Some(result) = slot.take() {\n                return result;\n            }\n            slot", "slot", "pending read"),
    (BUDGET, "self.used.fetch_sub(amount, Ordering::Relaxed);\n            return", "return", "budget"),
    (BUDGET, "next = budget.parent.as_deref();", "next = None;", "budget"),
    (BUDGET, "|used| {\n            used.checked_add(amount).filter(|&sum| sum <= limit)\n        }", "|used| used.checked_add(amount)", "budget"),
    (CHANNEL, "state.pending_bytes -= command.staged_bytes();\n            self.wake_submitter(&mut state);", "state.pending_bytes -= command.staged_bytes();", "full"),
    (CHANNEL, "state.scheduled = false;\n            self.wake_submitter(&mut state);", "state.scheduled = false;", "channel"),
    (CHANNEL, "state.scheduled = false;", "", "channel"),
    (CHANNEL, "self.wake_submitter(&mut state);\n        drop(state);\n        // Dropped", "drop(state);\n        // Dropped", "closed"),
    (CHANNEL, "if lane == Lane::Long && turn.lane() == Lane::Short {\n                break;\n            }", "", "channel"),
    (CHANNEL, "self.pending.push_front(command);", "self.pending.push_back(command);", "channel"),
    (THREADS, "waiting.thread.unpark();", "", "turns"),
    (THREADS, "state.ready.push_back((channel, slice));\n                    signals.changed.notify_one();", "state.ready.push_back((channel, slice));", "channel"),
    (THREADS, "if of_lane.waiting.len() > 0 {\n            self.give_turns(&mut state, lane);\n        }", "", "channel"),
    (THREADS, "of_lane.turns -= ready - of_lane.ready.len();", "", "closed"),
    (THREADS, "if self.turns >= self.max_turns {\n            return None;\n        }", "", "turns"),
    (THREADS, "if state.waiting.len() > 0 || state.turns >= state.max_turns {\n            return None;\n        }", "", "turns"),
    (THREADS, "drop(state);\n        self.signals(Lane::Short).changed.notify_one();", "drop(state);", "polled"),
    (COMPLETIONS, "pending.with_notifier = false;", "", "completions"),
    (COMPLETIONS, "self.completions.is_empty() && !self.sending", "self.completions.is_empty()", "completions"),
    (COMPLETIONS, "if !self.closed.load(Ordering::Acquire) {\n                    head(out)\n                }", "head(out)", "completions"),
    (COMPLETIONS, "if !self.closed.swap(true, Ordering::AcqRel) {", "{", "completions"),
    (COMPLETIONS, "if !with_notifier {", "if with_notifier {", "completions"),
    (COMPLETIONS, "self.fail_at_once(&DeviceError::Deadline(\"a point on a queue\"), ExtCommand::NotifyReached);", "", "deadlines"),
    (NOTIFIER, "if wake {", "if !wake {", "completions"),
    (NOTIFIER, "if state.ready.is_empty() && !state.ended {", "{", "completions"),
    (NOTIFIER, "shared.mark_ready(queue)", "drop((&shared, &queue))", "completions"),
)


def main():
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        shutil.copytree(ROOT / "src", tree / "src")
        shutil.copytree(ROOT / "crates/orders", tree / "crates/orders")
        shutil.copy(ROOT / "Cargo.lock", tree / "crates/orders/Cargo.lock")
        with open(tree / "crates/orders/Cargo.toml", "a") as manifest:
            manifest.write("\n[workspace]\n")
        run = ["cargo", "run", "-q", "--manifest-path", str(tree / "crates/orders/Cargo.toml")]
        run += ["--target-dir", str(tree / "target"), "--"]
        checked = False
        for file, old, new, harness in MUTANTS:
            if wanted not in file:
                continue
            if not checked:
                checked = not subprocess.run([*run, ""], stdout=subprocess.DEVNULL).returncode
                assert checked, "a harness fails without a mutant"
            path = tree / file
            text = path.read_text()
            assert text.count(old) == 1, f"{file}: {text.count(old)} times {old!r}"
            path.write_text(text.replace(old, new))
            command = [*run, harness]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            except subprocess.TimeoutExpired:
                done = subprocess.CompletedProcess(command, 1, "", "hangs")
            path.write_text(text)
            if "no harness has" in done.stderr:
                sys.exit(f"mutants: no harness is named {harness}")
            name = f"{file}: {old.strip().splitlines()[0]}"
            if "error: could not compile" in done.stderr:
                print(done.stderr)
                sys.exit(f"mutants: {name} does not compile")
            reason = next((line for line in done.stderr.splitlines() if line and not line.startswith((" ", "thread", "test"))), "")
            print(f"{'SURVIVED' if done.returncode == 0 else 'killed  '} {name}  {reason[:70]}", flush=True)
            survivors += done.returncode == 0
    print(f"{survivors} survived")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
