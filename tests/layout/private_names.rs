//! Private names: words that only their author understood, and the usual term of the field that replaced each. The test finds
//! none of them as the name of a module, a type, a function or a constant.

use super::all_sources;
use std::fs;
use syn::visit::{self, Visit};

/// What a name belongs to.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    /// A module, and so a file or a folder.
    Module,
    /// A struct, an enum, a trait, a union or a type alias.
    Type,
    /// A function or a method.
    Function,
    /// A constant or a static.
    Constant,
}

/// A name that must not come back.
struct Row {
    /// The folder that the row concerns, from the repository's root; empty for the whole tree. A word can be private in one
    /// room and the usual term in another: a `strip` of an image is one, a strip of a packed matrix is a panel.
    folder: &'static str,
    kind: Kind,
    name: &'static str,
    /// The usual term.
    term: &'static str,
}

const fn row(folder: &'static str, kind: Kind, name: &'static str, term: &'static str) -> Row {
    Row { folder, kind, name, term }
}

use Kind::{Constant, Function, Module, Type};

#[rustfmt::skip]
const TABLE: &[Row] = &[
    // The whole tree: generic names that once meant up to eight things, and verbs that do not name what they do.
    row("", Type, "State", "the name of the thing whose state it is, as in QueueState"),
    row("", Type, "Step", "the name of the sequence that it is a step of, as in PlanStep"),
    row("", Type, "Place", "what is located, as in SlotOffset or Allocation"),
    row("", Type, "Memory", "the kind of memory, as in HostMemory"),
    row("", Type, "Ticket", "PendingRead or TransferToken"),
    row("", Constant, "PIECE", "what is cut into pieces, as in TRANSFER_CHUNK_BYTES"),
    row("", Constant, "PATIENCE", "a timeout, with its purpose"),
    row("", Function, "look", "poll, probe or find"),
    row("", Function, "ask", "request, query or prefetch"),
    row("", Function, "tell", "notify or report"),
    row("", Function, "obey", "process"),
    row("", Function, "meet", "wait_at_barrier"),
    row("", Function, "comes", "readable"),
    row("", Function, "greet", "hello_ext"),
    row("", Type, "Path", "std::path::Path alone has this name; MathMode, CopyPath"),
    row("", Module, "core", "the crate `core` alone has this name; context"),

    // The RPC server.
    row("src/device", Module, "hunch", "adaptive_spin"),
    row("src/device", Type, "Hunch", "AdaptiveSpin"),
    row("src/rpc/server", Module, "guests", "admission"),
    row("src/rpc/server", Type, "Guests", "Admission"),
    row("src/rpc/server", Type, "Guest", "SessionPermit"),
    row("src/rpc/server", Type, "AtDoor", "RejectPermit"),
    row("src/rpc/server", Module, "doorman", "reject"),
    row("src/rpc/server", Module, "holdings", "resources"),
    row("src/rpc/server", Module, "handles", "handle_table"),
    row("src/rpc/server", Module, "allowance", "byte_semaphore"),
    row("src/rpc/server", Type, "Allowance", "ByteSemaphore"),
    row("src/rpc/server", Type, "Room", "Permit"),
    row("src/rpc/server", Module, "bounce", "host_staged_copy"),
    row("src/rpc/server", Module, "foresight", "prefault"),
    row("src/rpc/server", Module, "outgoing", "writer"),
    row("src/rpc/server", Module, "refusal", "request_error"),
    row("src/rpc", Type, "Broken", "TransportError"),
    row("src/rpc/server", Module, "programs", "program_cache"),
    row("src/rpc/server", Module, "compile", "graph_import"),
    row("src/rpc/server", Module, "confused", "decoder_bug"),
    row("src/rpc", Module, "greeted", "extended"),
    row("src/rpc/server", Module, "pulse", "heartbeat"),
    row("src/rpc/server", Module, "answers", "completions"),
    row("src/rpc/server", Type, "Voice", "CompletionWriter"),
    row("src/rpc/server", Module, "copies", "peer_transfer"),
    row("src/rpc/server", Module, "load", "load_by_digest"),
    row("src/rpc/server", Module, "relays", "staging_queues"),
    row("src/rpc/server", Module, "tickets", "transfer_tokens"),
    row("src/rpc/server", Type, "Book", "TokenLedger"),
    row("src/rpc/server", Type, "Inbound", "Receiver"),
    row("src/rpc/server", Type, "Arrivals", "PendingReceives"),
    row("src/rpc/server/peers", Module, "list", "peer_allowlist"),
    row("src/rpc/server/peers", Type, "Link", "PeerConnection"),
    row("src/rpc/server", Module, "models", "gguf_index"),
    row("src/rpc/server", Type, "Keeper", "CacheWriter"),
    row("src/rpc/server", Type, "Hit", "CacheReader"),

    // The RPC client and the wire.
    row("src/rpc/client", Module, "plain", "ggml_protocol"),
    row("src/rpc/client", Type, "Plain", "GgmlProtocol"),
    row("src/rpc/client", Type, "Speaker", "QueueProtocol"),
    row("src/rpc/client", Module, "speaker", "extended_protocol"),
    row("src/rpc/client", Module, "hear", "notifications"),
    row("src/rpc/client", Module, "fate", "queue_failure"),
    row("src/rpc/client", Type, "Fate", "QueueStatus"),
    row("src/rpc/client", Module, "proof", "completion_probe"),
    row("src/rpc/client", Type, "Proofs", "CompletionTracker"),
    row("src/rpc/client", Module, "track", "mark_tracker"),
    row("src/rpc/client", Type, "Track", "MarkTracker"),
    row("src/rpc/client", Type, "Turn", "WriteGuard"),
    row("src/rpc/client", Module, "errands", "deferred_sends"),
    row("src/rpc/client", Function, "put", "buffer"),
    row("src/rpc/client", Function, "leave", "flush"),
    row("src/rpc/client", Type, "Awaited", "ReadCompleter"),
    row("src/rpc/client", Type, "Recall", "LoadByDigest"),
    row("src/rpc/client", Type, "Kept", "RemoteGraphCache"),
    row("src/rpc/client", Type, "Whom", "FailureScope"),
    row("src/rpc", Type, "Met", "Handshake"),
    row("src/rpc/client", Type, "To", "ReplySink"),
    row("src/rpc/wire", Module, "greet", "hello_ext"),
    row("src/rpc", Type, "Notice", "Notification"),
    row("src/rpc/wire", Module, "dialect", "version_codec"),
    row("src/rpc", Type, "Dialect", "VersionCodec"),
    row("src/rpc/wire", Module, "meaning", "semantics"),
    row("src/rpc/wire", Type, "Unsayable", "NotExpressible"),

    // The device contract, the registry and the fallback.
    row("src/device", Module, "line", "command_channel"),
    row("src/device", Type, "Line", "CommandChannel"),
    row("src/device", Type, "Point", "TimelinePoint"),
    row("src/device", Type, "Progress", "CompletionSource"),
    row("src/device", Type, "Account", "MemoryBudget"),
    row("src/device", Type, "Charge", "Reservation"),
    row("src", Function, "foresee", "prefault"),
    row("src", Function, "run_here", "run_inline"),
    row("src", Function, "recall", "load_by_digest"),
    row("src/device", Type, "Known", "TensorDigest"),
    row("src/device", Type, "Link", "LinkStats"),
    row("src/fallback", Module, "cut", "partition"),
    row("src/cuda", Type, "NoCuda", "CudaUnavailable"),
    row("src/graph", Type, "Around", "NormEpilogue"),
    row("src/ops", Module, "words", "op_params"),
    row("src/tensor", Module, "fit", "kquant_fit"),

    // The scheduler.
    row("src/sched", Module, "porter", "host_staging_queue"),
    row("src/sched", Module, "rooms", "arenas"),
    row("src/sched", Type, "Room", "Allocation"),
    row("src/sched", Type, "Spot", "Allocation"),
    row("src/sched", Type, "Area", "ArenaKind"),
    row("src/sched", Module, "reach", "copy_paths"),
    row("src/sched", Type, "Way", "CopyPath"),
    row("src/sched", Type, "Cut", "SplitGraph"),
    row("src/sched", Type, "Why", "AssignReason"),
    row("src/sched", Type, "Lane", "QueueId"),
    row("src/sched", Type, "Bring", "QueueRole"),
    row("src/sched", Type, "Fetch", "Download"),
    row("src/sched", Type, "Deliver", "Upload"),
    row("src/sched", Type, "Seen", "NodeResult"),
    row("src/sched", Type, "Tell", "CompareReporter"),
    row("src/sched", Module, "show", "plan_report"),
    row("src/sched", Type, "Torn", "RunIncomplete"),
    row("src/sched", Type, "Gone", "OutputExpired"),
    row("src/sched", Type, "Nowhere", "NoDeviceForNode"),
    row("src/sched", Type, "Needs", "MemoryRequirement"),

    // The CPU device.
    row("src/cpu", Module, "strip", "panel"),
    row("src/cpu", Type, "Lanes", "SimdOps"),
    row("src/cpu/simd", Module, "codes", "quant_dot"),
    row("src/cpu/simd", Module, "pairs", "i16_accumulate"),
    row("src/cpu/simd", Module, "wide", "multiversion"),
    row("src/cpu/simd", Module, "vec", "attention_gemm"),
    row("src/cpu", Type, "Four", "QuantX4"),
    row("src/cpu", Type, "Factor", "ScaleVec"),
    row("src/cpu", Constant, "TWICE", "MAX_DOUBLE_ACC"),
    row("src/cpu", Module, "marks", "layout_map"),
    row("src/cpu", Module, "needs", "layout_requirements"),
    row("src/cpu", Type, "Held", "LayoutGuard"),
    row("src/cpu", Module, "reuse", "packed_rhs_reuse"),
    row("src/cpu", Module, "few", "few_queries"),
    row("src/cpu", Module, "many", "many_queries"),
    row("src/cpu", Type, "Code", "CpuProgram"),

    // The CUDA device.
    row("src/cuda", Module, "zip", "elementwise"),
    row("src/cuda", Module, "capture", "graph_exec"),
    row("src/cuda", Type, "Marks", "EventTimeline"),

    // Programs, tests and the emulator.
    row("examples", Module, "hyper", "hparams"),
    row("examples", Module, "recall", "load_by_digest"),
    row("examples", Module, "meter", "timed_device"),
    row("examples", Module, "net", "graph_context"),
    row("tests", Module, "abacus", "minimal_device"),
    row("tests", Module, "mistakes", "invalid_tasks"),
    row("tests", Module, "older", "old_servers"),
    row("tests", Module, "relayed", "slow_links"),
    row("tests", Module, "lost", "server_loss"),
    row("tests", Module, "wrapped", "device_wrapper"),
    row("tests", Module, "maker", "fuzz_generator"),
    row("tests", Module, "rig", "fixture"),
    row("tests", Module, "foresight", "prefault"),
    row("tests", Module, "greeted", "extended"),
    row("crates", Module, "spy", "recording_device"),
    row("crates", Module, "island", "forwarding_device"),
    row("crates", Type, "Moody", "PartialSupport"),
    row("crates", Module, "door", "ffi_guard"),
    row("crates", Module, "cx", "exec_context"),
    row("crates", Module, "code", "bytecode"),
];

/// The names that a file defines.
#[derive(Default)]
struct Defined(Vec<(Kind, String)>);

impl Defined {
    fn add(&mut self, kind: Kind, name: &syn::Ident) {
        self.0.push((kind, name.to_string()));
    }
}

impl<'a> Visit<'a> for Defined {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        self.add(Module, &item.ident);
        visit::visit_item_mod(self, item);
    }

    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.add(Type, &item.ident);
    }

    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        self.add(Type, &item.ident);
    }

    fn visit_item_union(&mut self, item: &'a syn::ItemUnion) {
        self.add(Type, &item.ident);
    }

    fn visit_item_type(&mut self, item: &'a syn::ItemType) {
        self.add(Type, &item.ident);
    }

    fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
        self.add(Type, &item.ident);
        visit::visit_item_trait(self, item);
    }

    fn visit_signature(&mut self, signature: &'a syn::Signature) {
        self.add(Function, &signature.ident);
    }

    fn visit_item_const(&mut self, item: &'a syn::ItemConst) {
        self.add(Constant, &item.ident);
    }

    fn visit_impl_item_const(&mut self, item: &'a syn::ImplItemConst) {
        self.add(Constant, &item.ident);
    }

    fn visit_trait_item_const(&mut self, item: &'a syn::TraitItemConst) {
        self.add(Constant, &item.ident);
    }

    fn visit_item_static(&mut self, item: &'a syn::ItemStatic) {
        self.add(Constant, &item.ident);
    }
}

/// The private names that a file defines, each with the term to use.
fn private_names(file: &str, text: &str) -> Vec<String> {
    let mut defined = Defined::default();
    defined.visit_file(&syn::parse_file(text).unwrap());
    let within =
        |folder: &str| folder.is_empty() || file.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
    let is = |row: &&Row, kind, name: &str| row.kind == kind && row.name == name && within(row.folder);
    let fault = |(kind, name): &(Kind, String)| {
        let row = TABLE.iter().find(|row| is(row, *kind, name))?;
        Some(format!("{file}: the {kind:?} `{name}` has a private name; the usual term: {}", row.term))
    };
    defined.0.iter().filter_map(fault).collect()
}

#[test]
fn the_tree_defines_no_private_name() {
    let faults: Vec<_> =
        all_sources().iter().flat_map(|(name, path)| private_names(name, &fs::read_to_string(path).unwrap())).collect();
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

#[test]
fn private_names_are_found_by_kind_and_folder() {
    let everything =
        "mod outer { mod guests {} } struct Guest; enum AtDoor {} trait Room {} type Book = u8; union Hit { a: u8 }
        const PIECE: u8 = 0; static PATIENCE: u8 = 0;
        impl X { const PIECE: u8 = 0; fn ask(&self) { fn tell() {} } } trait Y { fn look(&self); const TWICE: u8; }";
    let found = private_names("src/rpc/server/made_up.rs", everything);
    // `tell` inside of a body counts too; TWICE is private in src/cpu alone.
    assert_eq!(found.len(), 12, "{found:#?}");
    let elsewhere = private_names("src/gguf/made_up.rs", everything);
    assert_eq!(elsewhere.len(), 6, "{elsewhere:#?}");
    // A variable, a field and a variant may have such a name, and so may an item of another kind.
    assert!(
        private_names("src/rpc/server/made_up.rs", "fn guests(room: u8) { let book = room; } struct A { hit: u8 }")
            .is_empty()
    );
    assert!(
        private_names("src/rpc/server_x/made_up.rs", "mod guests {}").is_empty(),
        "another folder of a similar name"
    );
}
