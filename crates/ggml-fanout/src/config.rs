//! Configuration: variables of the environment, and a file with the same names.

use fanout::registry::Options;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// The variable with the path of the file.
const FILE: &str = "FANOUT_CONFIG";

/// The settings: the name in the file, and what it means. A variable of the environment has the name in capitals with
/// `FANOUT_` before it, and takes precedence over the file.
const SETTINGS: &[(&str, &str)] = &[
    ("devices", "devices of this machine, as rpc-server's --device takes them: all GPUs by default, or none"),
    ("servers", "servers, as host:port or host:port/DEVICE, separated by commas"),
    ("names", "names of the devices in the host, separated by commas: Fanout0, Fanout1 and so on by default"),
    ("key", "file with the secret key that is proved to servers"),
    ("server_keys", "public keys of servers, separated by commas; connections then use TLS"),
    ("cert", "file with the certificate that is proved to servers, of the key"),
    ("ca", "file with the certificate authority of servers"),
    ("models", "folder with model files, from which weights of a server that was lost are loaded again"),
    ("retry", "seconds for which servers that cannot be reached are tried when the host starts: 0 by default"),
    ("timeout", "seconds after which a silent server counts as lost: 60 by default"),
];

/// What the plug-in opens, and how.
#[derive(Debug, Default)]
pub(crate) struct Config {
    /// The list of devices of this machine; `None` for all GPUs.
    pub(crate) devices: Option<String>,
    pub(crate) servers: Vec<String>,
    /// Names of the first devices in the host.
    pub(crate) names: Vec<String>,
    /// A folder with model files, for weights of a lost server.
    pub(crate) models: Option<PathBuf>,
    pub(crate) options: Options,
}

impl Config {
    /// Reads the variables, and the file if there is one.
    pub(crate) fn read() -> Result<Config, String> {
        let file = match std::env::var(FILE) {
            Ok(path) => {
                let text = std::fs::read_to_string(&path).map_err(|e| format!("{path}, which {FILE} names: {e}"))?;
                parse(&text).map_err(|e| format!("{path}: {e}"))?
            }
            Err(_) => BTreeMap::new(),
        };
        Config::of(|name| {
            let variable = std::env::var(format!("FANOUT_{}", name.to_ascii_uppercase())).ok();
            variable.or_else(|| file.get(name).cloned()).filter(|value| !value.is_empty())
        })
    }

    fn of(value: impl Fn(&str) -> Option<String>) -> Result<Config, String> {
        let list = |name| value(name).map(|v| v.split(',').map(|part| part.trim().to_owned()).collect::<Vec<_>>());
        // The host's scheduler knows better devices for what a GPU does not support than a CPU of the plug-in's.
        let options = Options::default().with_fallback(false).with_precompile(true);
        Ok(Config {
            devices: value("devices"),
            servers: list("servers").unwrap_or_default(),
            names: list("names").unwrap_or_default(),
            models: value("models").map(PathBuf::from),
            options: with_client(options, &value, list("server_keys").unwrap_or_default())?,
        })
    }
}

/// The options with those of connections to servers.
#[cfg(feature = "client")]
fn with_client(
    options: Options,
    value: &impl Fn(&str) -> Option<String>,
    server_keys: Vec<String>,
) -> Result<Options, String> {
    use fanout::rpc::client;
    use fanout::rpc::keys::{Certificate, PublicKey, SecretKey};
    use std::path::Path;

    let seconds = |name: &str, default: u64| match value(name) {
        None => Ok(Duration::from_secs(default)),
        Some(text) => match text.parse::<u64>() {
            Ok(seconds) => Ok(Duration::from_secs(seconds)),
            Err(_) => Err(format!("{name}: {text} is not a number of seconds")),
        },
    };
    let key_of = |text: &String| text.parse::<PublicKey>().map_err(|e| format!("server_keys: {text}: {e}"));
    let server_keys = server_keys.iter().map(key_of).collect::<Result<Vec<_>, _>>()?;
    let (key, certificate) = match (value("cert"), value("key"), value("ca")) {
        (Some(cert), Some(key), Some(ca)) => {
            let read = Certificate::read_files(Path::new(&cert), Path::new(&key), Path::new(&ca));
            (None, Some(read.map_err(|e| e.to_string())?))
        }
        (None, Some(key), None) => (Some(SecretKey::read_file(Path::new(&key)).map_err(|e| e.to_string())?), None),
        (None, None, None) => (None, None),
        _ => return Err("a certificate needs cert, key and ca".to_owned()),
    };
    if key.is_some() && server_keys.is_empty() {
        return Err("a key needs server_keys".to_owned());
    }
    let rpc = client::Options::default()
        .with_retry(seconds("retry", 0)?)
        .with_silence_timeout(seconds("timeout", 60)?)
        .with_server_keys(server_keys)
        .with_key(key)
        .with_certificate(certificate);
    Ok(options.with_rpc(rpc))
}

#[cfg(not(feature = "client"))]
fn with_client(options: Options, _: &impl Fn(&str) -> Option<String>, _: Vec<String>) -> Result<Options, String> {
    Ok(options)
}

/// The settings of a file: lines `name = value`, and comments after `#`.
fn parse(text: &str) -> Result<BTreeMap<String, String>, String> {
    let mut settings = BTreeMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let Some((name, value)) = line.split_once('=') else {
            return Err(format!("line {number} is not of the form name = value"));
        };
        let (name, value) = (name.trim(), value.trim().trim_matches('"'));
        if !SETTINGS.iter().any(|(known, _)| *known == name) {
            let known = SETTINGS.iter().map(|(known, use_of)| format!("\n  {known}: {use_of}")).collect::<String>();
            return Err(format!("line {number}: there is no setting {name}. There are:{known}"));
        }
        settings.insert(name.to_owned(), value.to_owned());
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_names_and_values() {
        let settings = parse("# servers\nservers = a:1, b:2 # two\nkey = \"/k\"\n\n").unwrap();
        let config = Config::of(|name| settings.get(name).cloned().filter(|_| name != "key")).unwrap();
        assert_eq!((config.servers, config.devices), (vec!["a:1".to_owned(), "b:2".to_owned()], None));
        assert_eq!(settings["key"], "/k");
    }

    #[test]
    fn mistakes_are_named() {
        let of = |pairs: &'static [(&str, &str)]| {
            Config::of(|name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
        };
        for (error, expected) in [
            (parse("server = a:1").unwrap_err(), "line 1: there is no setting server. There are:"),
            (parse("\nservers").unwrap_err(), "line 2 is not of the form name = value"),
            (of(&[("retry", "soon")]).unwrap_err(), "retry: soon is not a number of seconds"),
            (of(&[("cert", "c")]).unwrap_err(), "a certificate needs cert, key and ca"),
            (of(&[("server_keys", "x")]).unwrap_err(), "server_keys: x: "),
        ] {
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
