//! The limits of a server. [`LimitArgs`] is their table: `rpc-server limits` prints it as TOML, `--limits FILE` reads such a file,
//! and docs/flags.md has it. To the command line's parser each limit is a hidden option, so that it checks the values of the file.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args as _, Command, FromArgMatches};
use fanout::io_hint::io_hint;
use fanout::registry::parse_nonzero_bytes;
use fanout::rpc::server::Config;

use super::values::{at_least_a_second, message_size, seconds};
use super::{Args, count};

/// The limits. The first paragraph of each says what it bounds, the second one what happens at the limit.
#[derive(Debug, clap::Args)]
pub(crate) struct LimitArgs {
    /// Sessions at a time: connections whose first message, HELLO, is complete.
    ///
    /// A further client gets the state "full", and its connection is closed.
    #[arg(long, value_name = "N", default_value = "1024", value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: u32,

    /// Sessions at a time of one key, or from one address (IPv6: one network of 64 bits) except loopback.
    ///
    /// As for max-connections.
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u32).range(1..))]
    max_connections_per_address: u32,

    /// Whether addresses of loopback (127.0.0.2, …) count like others: for a machine with several users or containers. Otherwise
    /// the limits per address do not hold for sessions from loopback, each of which has a share of its own.
    ///
    /// A limit per address holds as for other addresses.
    #[arg(long, value_name = "BOOL", default_value = "false", num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    loopback_tenants: bool,

    /// Connections whose HELLO is not complete. One address may have a quarter, except loopback.
    ///
    /// The oldest one of the address with the most is closed.
    #[arg(long, value_name = "N", default_value = "128", value_parser = clap::value_parser!(u32).range(1..))]
    max_handshakes: u32,

    /// Seconds from the connection of a client to its complete HELLO.
    ///
    /// The connection is closed.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    handshake_timeout: Duration,

    /// Seconds within which 256 KiB of a message, or its end, must arrive. Also the time in which all queues of a tensor group
    /// must join, and a server of it must reply to a heartbeat.
    ///
    /// The connection is closed, or the group fails.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    stall_timeout: Duration,

    /// Seconds between two requests of a client, also while its queues have work; the heartbeat of fanout's clients counts as
    /// requests. Above 10 with tensor groups of servers, whose connections send a heartbeat every 10 s.
    ///
    /// The connection is closed.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    idle_timeout: Option<Duration>,

    /// Memory of all devices that one client may hold [default: all memory of the devices].
    ///
    /// The allocation fails.
    #[arg(long, value_name = "SIZE", value_parser = parse_nonzero_bytes)]
    max_memory: Option<u64>,

    /// Memory of all devices that the clients of one key, or of one address (IPv6: one network of 64 bits) except loopback, may
    /// hold together [default: all memory of the devices].
    ///
    /// The allocation fails.
    #[arg(long, value_name = "SIZE", value_parser = parse_nonzero_bytes)]
    max_memory_per_address: Option<u64>,

    /// Host memory that clients may cause outside of devices: messages, prepared graphs, replies, transfers. One key or address
    /// may hold as much as stays free, at loopback one session [default: a sixteenth of the free memory, from 256M to 4G].
    ///
    /// A new client gets the state "full"; a request waits for up to 10 s, then its session ends.
    #[arg(long, value_name = "SIZE", value_parser = parse_nonzero_bytes)]
    pub(crate) max_host_memory: Option<u64>,

    /// Size of a message, at least 4K. Data of tensors does not count.
    ///
    /// The session ends before the message is read.
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = message_size)]
    max_message: u64,

    /// Nodes of a graph, which may have four times as many tensors.
    ///
    /// The session ends.
    #[arg(long, value_name = "N", default_value = "32768", value_parser = clap::value_parser!(u32).range(1..))]
    max_nodes: u32,

    /// Host memory for the graphs that one client of protocol 8.0 has numbered.
    ///
    /// Superseded and long unused graphs are dropped.
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = parse_nonzero_bytes)]
    max_graph_memory: u64,

    /// Seconds for which one graph may use a CPU device, not counting the turns of other clients. Waits for memory that another
    /// queue uses count; the conversion of a weight before its first use is not ended.
    ///
    /// The graph fails. A fanout client gets the reason; a client of llama.cpp, whose protocol has no error replies, finds its
    /// connection closed at its next request.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    max_run: Option<Duration>,

    /// Queues of fanout clients. One key or address may have a quarter.
    ///
    /// A further queue fails; its session goes on.
    #[arg(long, value_name = "N", default_value = "4096", value_parser = clap::value_parser!(u32).range(1..))]
    max_queues: u32,

    /// Threads for transfers and tensor groups between servers. One key or address may have a quarter.
    ///
    /// The queue that needs a further one fails.
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u32).range(1..))]
    max_transfer_threads: u32,

    /// Size of the cache (--cache) on disk.
    ///
    /// The least recently used files are removed.
    #[arg(long, value_name = "SIZE", default_value = "20G", value_parser = parse_nonzero_bytes)]
    pub(crate) cache_size: u64,

    /// Seconds without any progress after which a GPU counts as hung, at least 1.
    ///
    /// Its sessions fail. Other devices finish for up to 10 s, then the process ends with status 75, because only a new one can use
    /// the GPU again.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = at_least_a_second)]
    pub(crate) device_timeout: Duration,
}

impl LimitArgs {
    /// The configuration with these limits. The cache and the devices have theirs elsewhere.
    pub(crate) fn apply(&self, config: Config) -> Config {
        let default_host_memory = config.max_host_memory;
        config
            .with_max_connections(count(self.max_connections))
            .with_max_connections_per_address(count(self.max_connections_per_address))
            .with_loopback_tenants(self.loopback_tenants)
            .with_max_handshakes(count(self.max_handshakes))
            .with_handshake_timeout(self.handshake_timeout)
            .with_stall_timeout(self.stall_timeout)
            .with_idle_timeout(self.idle_timeout)
            .with_max_memory(self.max_memory)
            .with_max_memory_per_address(self.max_memory_per_address)
            .with_max_host_memory(self.max_host_memory.unwrap_or(default_host_memory))
            .with_limits(Config::limits(self.max_nodes, self.max_message))
            .with_max_graph_memory(self.max_graph_memory)
            .with_max_run(self.max_run)
            .with_max_queues(count(self.max_queues))
            .with_max_transfer_threads(count(self.max_transfer_threads))
    }
}

/// A row of the table, as texts.
pub(crate) struct Limit {
    pub(crate) name: String,
    /// The form of a value, such as SIZE.
    pub(crate) form: String,
    pub(crate) default: Option<String>,
    pub(crate) bounds: String,
    pub(crate) at_the_limit: String,
}

fn table() -> Command {
    LimitArgs::augment_args(Command::new("limits").no_binary_name(true))
}

/// The identifiers of the limits among the options.
pub(crate) fn ids() -> Vec<String> {
    table().get_arguments().map(|limit| limit.get_id().to_string()).collect()
}

/// All limits.
pub(crate) fn limits() -> Vec<Limit> {
    let limit = |arg: &Arg| {
        let text = arg.get_long_help().map(ToString::to_string).unwrap_or_default();
        let (bounds, at_the_limit) = text.split_once("\n\n").unwrap_or((&text, ""));
        Limit {
            name: arg.get_long().unwrap_or_default().to_owned(),
            form: arg.get_value_names().and_then(<[_]>::first).map(ToString::to_string).unwrap_or_default(),
            default: arg.get_default_values().first().map(|value| toml_value(&value.to_string_lossy())),
            bounds: bounds.to_owned(),
            at_the_limit: at_the_limit.to_owned(),
        }
    };
    table().get_arguments().map(limit).collect()
}

/// The value as TOML: a number or a truth value, or else a string.
fn toml_value(text: &str) -> String {
    if is_bare(text) { text.to_owned() } else { format!("\"{text}\"") }
}

fn is_bare(text: &str) -> bool {
    text.parse::<f64>().is_ok() || text.parse::<bool>().is_ok()
}

/// What `rpc-server limits` prints: a file for `--limits` with all defaults.
pub(crate) fn toml() -> String {
    let mut text = "# Limits of rpc-server and their defaults. Keep the lines that you change in a file for --limits.\n\
                    # Sizes: bytes, or a text such as \"16M\" (K, M, G, T: powers of 1024). Seconds: a day (86400) at most.\n"
        .to_owned();
    for Limit { name, form, default, bounds, at_the_limit } in limits() {
        let line = default.map_or_else(|| format!("# {name} = {form}"), |default| format!("{name} = {default}"));
        // Writing to a String cannot fail.
        let _ = write!(text, "\n{}{}{line}\n", comment(&bounds), comment(&format!("At the limit: {at_the_limit}")));
    }
    text
}

/// A text as lines of a comment.
fn comment(text: &str) -> String {
    let (mut text_lines, mut line) = (String::new(), "#".to_owned());
    for word in text.split_whitespace() {
        if line.len() + word.len() > 100 {
            text_lines += &(line + "\n");
            line = "#".to_owned();
        }
        line.push(' ');
        line.push_str(word);
    }
    text_lines + &line + "\n"
}

/// The options of this process, with the limits of the file of `--limits`; limits on the command line override them.
///
/// # Errors
/// The file cannot be read, or a line of it is not valid.
pub(crate) fn with_file(matches: &ArgMatches) -> Result<Args, String> {
    let mut args = Args::from_arg_matches(matches).map_err(|e| e.to_string())?;
    let Some(file) = &args.limits_file else { return Ok(args) };
    let failed = |problem: &str| format!("--limits {}: {problem}", file.display());
    let mut values = read(file).map_err(|problem| failed(&problem))?;
    for (name, id) in given(matches) {
        let value = matches.get_raw(&id).and_then(|mut values| values.next_back()).unwrap_or("true".as_ref());
        values.insert(name, value.to_string_lossy().into_owned());
    }
    let options = values.iter().map(|(name, value)| format!("--{name}={value}"));
    let limits = table().try_get_matches_from(options).and_then(|matches| LimitArgs::from_arg_matches(&matches));
    args.limits = limits.map_err(|e| {
        let text = e.to_string();
        failed(text.lines().next().unwrap_or_default().trim_start_matches("error: "))
    })?;
    Ok(args)
}

/// The limits that are options of the command line, and their identifiers there.
fn given(matches: &ArgMatches) -> Vec<(String, String)> {
    let given = ids().into_iter().filter(|id| matches.value_source(id) == Some(ValueSource::CommandLine));
    given.map(|id| (id.replace('_', "-"), id)).collect()
}

/// Limits on the command line still work, so that a command of an earlier version does.
pub(crate) fn warn_of_options(matches: &ArgMatches) {
    if let Some((name, _)) = given(matches).first() {
        log::warn!("--{name}: give limits in the file of --limits; `rpc-server limits` prints them all");
    }
}

/// The values of a file, by name. It is a flat table of TOML. A pipe is refused: each worker of the supervisor reads the file
/// again, and would find nothing in it.
fn read(file: &Path) -> Result<BTreeMap<String, String>, String> {
    let found = fs::metadata(file).map_err(|e| format!("{e}{}", io_hint(&e)))?;
    if !found.is_file() {
        return Err("it is no regular file".to_owned());
    }
    let text = fs::read_to_string(file).map_err(|e| format!("{e}{}", io_hint(&e)))?;
    let known = limits();
    let mut values = BTreeMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        // No valid value contains the mark of a comment.
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let value = |text: &str| match text.strip_prefix('"').and_then(|text| text.strip_suffix('"')) {
            Some(text) => Some(text.to_owned()),
            None => is_bare(text).then(|| text.to_owned()),
        };
        let entry = line.split_once('=').and_then(|(name, text)| Some((name.trim(), value(text.trim())?)));
        let (name, value) = entry.ok_or_else(|| {
            format!("line {number}: expected a line such as max-connections = 64 or max-memory = \"16G\", got {line:?}")
        })?;
        if !known.iter().any(|limit| limit.name == name) {
            return Err(format!("line {number}: no limit has the name {name:?}: `rpc-server limits` prints them all"));
        }
        if values.insert(name.to_owned(), value).is_some() {
            return Err(format!("line {number}: {name} is there twice"));
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    /// The limits that a file gives to a command line.
    fn limits_of(text: &str, args: &[&str]) -> Result<LimitArgs, String> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(&file, text).expect("a file");
        let path = file.path().to_str().expect("text");
        let matches = super::super::command().get_matches_from([&["rpc-server", "--limits", path][..], args].concat());
        with_file(&matches).map(|args| args.limits).map_err(|e| e.replace(path, "FILE"))
    }

    #[test]
    fn a_printed_file_has_the_defaults_of_all_limits() {
        let defaults = format!("{:?}", Args::parse_from(["rpc-server"]).limits);
        let text = toml();
        assert_eq!(format!("{:?}", limits_of(&text, &[]).expect("limits")), defaults);
        for Limit { name, bounds, at_the_limit, .. } in limits() {
            assert!(text.contains(&format!("\n{name} = ")) || text.contains(&format!("\n# {name} = ")), "{name}");
            assert!(!bounds.is_empty() && !at_the_limit.is_empty(), "{name}");
        }
        assert!(text.lines().all(|line| line.len() <= 120), "{text}");
    }

    #[test]
    fn options_override_the_file_and_the_file_the_defaults() {
        let text = "max-nodes = 7 # a comment\n\nmax-memory=\"3K\"\nidle-timeout = 0.5\nloopback-tenants = true\n";
        let limits = limits_of(text, &["--max-nodes", "9", "--max-queues=5"]).expect("limits");
        assert_eq!((limits.max_nodes, limits.max_queues, limits.max_handshakes), (9, 5, 128));
        assert_eq!((limits.max_memory, limits.idle_timeout), (Some(3 << 10), Some(Duration::from_millis(500))));
        assert!(limits.loopback_tenants && limits_of("", &["--loopback-tenants"]).expect("limits").loopback_tenants);
    }

    #[test]
    fn wrong_lines_are_explained() {
        for (text, says) in [
            ("\nmax-node = 7", "--limits FILE: line 2: no limit has the name \"max-node\": `rpc-server limits` prints"),
            ("max-memory = 16G", "line 1: expected a line such as max-connections = 64 or max-memory = \"16G\", got "),
            ("max-nodes", "line 1: expected a line"),
            ("[limits]", "line 1: expected a line"),
            ("max-nodes = 1\nmax-nodes = 2", "line 2: max-nodes is there twice"),
            ("max-nodes = 0", "--limits FILE: invalid value '0' for '--max-nodes <N>': 0 is not in 1.."),
            ("stall-timeout = 0", "must be more than 0 seconds, up to a day"),
            ("max-message = \"1K\"", "must be at least 4 KiB"),
        ] {
            let error = limits_of(text, &[]).expect_err(text);
            assert!(error.contains(says), "{text:?}: {error}");
        }
    }
}
