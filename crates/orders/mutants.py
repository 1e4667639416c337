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
PEER, DUE = "src/rpc/server/peers/peer_connection.rs", "src/rpc/connection/due_replies.rs"
WRITER = "src/rpc/connection/message_writer.rs"
LINK, LINKS, HEARTBEAT = (f"src/rpc/server/groups/{name}.rs" for name in ("link", "links", "attach"))
TABLE, INCOMING = "src/rpc/server/groups/table.rs", "src/rpc/server/groups/incoming.rs"
SESSION_GROUPS = "src/rpc/server/groups/session_groups.rs"
GROUP, MEMBER = "src/device/collectives/mod.rs", "src/device/collectives/member.rs"
ROUND, REMOTE = "src/device/collectives/round.rs", "src/device/collectives/remote.rs"
ADMISSION = "src/rpc/server/admission.rs"
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
    (PEER, "{\n            aborter.abort();\n        }", "{\n            drop(aborter);\n        }", "peer connection"),
    (PEER, "self.changed.notify_all();\n        Ok(sent)", "Ok(sent)", "peer connection"),
    (PEER, "drop(state);\n        self.changed.notify_all();\n        let mut last_reply", "drop(state);\n        let mut last_reply", "peer connection"),
    # A connection that was closed while it was dialled stays open.
    (PEER, "return aborter.abort(),", "return,", "peer connection"),
    (PEER, "PeerConnectionState::Dialling => *state", "_ => *state", "peer connection"),
    (PEER, "sent.iter().for_each(|ping| (ping.sink)(super::copy_failure(&self.address, why.clone())));", "drop(sent);", "peer connection"),
    (PEER, "let _ = self.close_with_reason(self.with_address(\"the session has ended\"));", "self.fail(\"the session has ended\");", "peer connection"),
    (PEER, "self.replies.pop().ok_or_else(unexpected)?;", "self.replies.front().ok_or_else(unexpected)?;", "peer connection"),
    (PEER, "let why = self.replies.wait_failure(ERROR_REASON_TIMEOUT);", "let why = self.replies.failure();", "peer connection"),
    (PEER, "_ if left().is_zero() => Err", "_ if false => Err", "stalls"),
    (DUE, "drop(state);\n        self.failed.notify_all();", "drop(state);", "peer connection"),
    (DUE, "return Err((failure, sink));", "drop(failure);", "peer connection"),
    (DUE, "return Err(first.clone());", "drop(first.clone());", "peer connection"),
    (DUE, "due.pop_front()", "due.pop_back()", "peer connection"),
    (WRITER, "buffer.clear();", "", "peer connection"),
    (LINK, "let is_free = state.backlog.is_empty() && matches!", "let is_free = matches!", "link"),
    (LINK, "data.get(sent.saturating_sub(head.len())..)", "data.get(sent..)", "link"),
    (LINK, "state.backlog.push_front(rest)", "state.backlog.push_back(rest)", "link"),
    (LINK, "self.changed.notify_one();\n                return Err(e);", "return Err(e);", "link"),
    (LINK, "if !state.backlog.is_empty() || state.close_by.is_some() {\n            self.changed.notify_one();\n        }", "", "link"),
    (LINK, "retain(|message| message.is_begun || with_parts)", "retain(|message| message.is_begun)", "link"),
    (LINK, "retain(|message| message.is_begun || with_parts)", "retain(|_| with_parts)", "link"),
    (LINK, "if let Some(aborter) = state.aborter.take() {\n            aborter.abort();\n        }", "", "link"),
    (LINK, "drop(state);\n        self.changed.notify_one();\n        is_attached", "is_attached", "link"),
    (LINK, "let attached = attach(&mut sender, &mut receiver, request, timeout);\n        let mut state = lock(&self.state);\n        if state.close_by.is_some() {\n            return Ok(None);\n        }", "let attached = attach(&mut sender, &mut receiver, request, timeout);\n        let mut state = lock(&self.state);", "link"),
    (LINK, "return Ok(None);\n        }\n        state.aborter = Some(aborter);", "}\n        state.aborter = Some(aborter);", "link"),
    (LINK, "state.backlog.clear();", "", "link"),
    (LINK, "if state.backlog.len() >= self.max_backlog {", "if state.backlog.len() >= 2 {", "link"),
    (LINK, "heartbeat.ping_sent();", "", "heartbeat"),
    (HEARTBEAT, "self.unanswered_since = None;", "", "heartbeat"),
    (LINKS, "let with_parts = matches!(error, DeviceError::RankLeft { .. });", "let with_parts = false;", "group"),
    (LINKS, "self.ready.fail(error.clone());", "", "group"),
    (LINKS, "if let Some(failure) = group.failure() {", "if let Some(failure) = None {", "group"),
    (LINKS, "self.pending.fetch_sub(1, Ordering::AcqRel) == 1", "self.pending.fetch_sub(1, Ordering::AcqRel) == 2", "group"),
    (LINKS, "if !link.close(message, with_parts) {", "if false {", "group"),
    (TABLE, "let _groups = self.lock();\n        self.changed.notify_all();", "self.changed.notify_all();", "group"),
    (TABLE, "self.changed.notify_all();", "", "group"),
    (TABLE, ".filter(|group| group.missing_rank().is_none())", "", "group"),
    (INCOMING, "self.members.iter().for_each(|member| member.fail(&error));", "drop(error);", "group"),
    (SESSION_GROUPS, "self.table.remove(&group.key);", "", "group"),
    (SESSION_GROUPS, "group.links.end_incoming(None);", "", "group"),
    (GROUP, "self.timeline.fail(error.clone());", "", "ranks"),
    (GROUP, "while state.take_if_complete(complete) {", "if state.take_if_complete(complete) {", "group"),
    (GROUP, "if let Some(failure) = &state.failure {\n            return Err(failure.clone());\n        }", "", "ranks"),
    (GROUP, "let is_late = is_leave(&error) && state.sending > 0;", "let is_late = false;", "group"),
    (GROUP, "filter(|failure| state.sending == 0 && is_leave(failure));", "filter(|_| false);", "group"),
    (GROUP, "if state.failure.is_some() {\n            return;\n        }", "", "ranks"),
    (MEMBER, "state.awaited = true;", "", "ranks"),
    (MEMBER, "self.group.timeline.advance(complete);", "drop(complete);", "ranks"),
    (MEMBER, "self.fail(&DeviceError::Ended);", "", "ranks"),
    (MEMBER, "if is_complete() {\n            return Ok(true);\n        }", "", "ranks"),
    (ROUND, "*round = RoundState::default();", "", "ranks"),
    (ROUND, "let is_complete = round.arrived == ranks;", "let is_complete = round.arrived >= 2;", "ranks"),
    (REMOTE, "self.group.timeline.advance(complete);", "drop(complete);", "group"),
    # A handshake that was closed for another one becomes a session.
    (ADMISSION, "session.is_aborted = true;\n        let connection", "let connection", "admission"),
    (ADMISSION, "self.pending.remove(key);\n        Ok(ClosedHandshake", "Ok(ClosedHandshake", "admission"),
    (ADMISSION, "fn drop(&mut self) {\n        self.connection.abort();", "fn drop(&mut self) {", "admission"),
    (ADMISSION, "drop(state);\n        self.admission.session_ended.notify_all();", "drop(state);", "admission"),
    (ADMISSION, "let is_aborted = session.is_aborted;", "let is_aborted = false;", "admission"),
    (ADMISSION, "session.is_aborted = true;\n                session.aborter.abort();", "session.aborter.abort();", "admission"),
    (ADMISSION, "session.watch = Arc::downgrade(watch);", "", "admission"),
    (ADMISSION, "session.connection = Some(connection);", "drop(connection);", "admission"),
    (ADMISSION, "if state.draining.is_some() {\n            return Err(Refusal::Draining);\n        }", "", "admission"),
    (ADMISSION, "let subscribers = std::mem::take(&mut state.subscribers);", "let subscribers = Vec::<Weak<ClientWriter>>::new();", "admission"),
    (ADMISSION, "state.sessions.remove(&self.key);", "", "admission"),
    (NOTIFIER, "polled.push(point);", "drop(point);", "completions"),
    (NOTIFIER, "now == self.last && now % 2 == 1", "now == self.last", "completions"),
    (NOTIFIER, "self.last = now;", "", "completions"),
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
            manifest.write("\n[workspace]\n\n[profile.dev]\ndebug = false\n")
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
