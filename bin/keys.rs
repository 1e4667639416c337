//! The options of keys and certificates, and `rpc-server keygen`.

use std::path::Path;
use std::process::ExitCode;

use fanout::rpc::client::Options as ClientOptions;
use fanout::rpc::keys::{Certificate, KeyFileError, SecretKey};
use fanout::rpc::server::ListenAddress;

use super::{Args, fail, print_or_fail, usage};

/// Checks the options of keys that depend on each other.
pub(crate) fn check_options(args: &Args) -> Result<(), String> {
    if args.key.is_some() && args.cert.is_none() && args.allow_keys.is_none() {
        return Err("--key needs --allow-keys, or --cert and --ca".to_owned());
    }
    if args.key.is_some() && !args.allow.is_empty() && !args.listen.iter().any(ListenAddress::plain) {
        return Err("--allow concerns addresses without TLS, and with --key these are the ones with =plain: for an address with \
                    TLS use --listen PORT=allow:ADDRESS"
            .to_owned());
    }
    for peer in &args.peers {
        if peer.demands_key() && (args.key.is_none() || args.cert.is_some()) {
            return Err(format!(
                "--peer {peer}: a server with a key demands one of this server: give --key and --allow-keys"
            ));
        }
        if peer.demands_certificate() && args.cert.is_none() {
            return Err(format!(
                "--peer {peer}: a server with a certificate demands one of this server: give --cert and --ca"
            ));
        }
    }
    Ok(())
}

/// Writes a new secret key to `file`, or with `public` reads the one in it; prints its public part.
pub(crate) fn keygen(file: &Path, public: bool) -> ExitCode {
    let key = if public { SecretKey::read_file(file) } else { new_key(file) };
    match key {
        Ok(key) => print_or_fail(&format!("{}\n", key.public_key()), ExitCode::SUCCESS),
        Err(e) => fail(&e),
    }
}

/// Writes a new secret key to `file`.
fn new_key(file: &Path) -> Result<SecretKey, KeyFileError> {
    let io = |error| KeyFileError::Io { path: file.display().to_string(), error };
    let key = SecretKey::generate().map_err(io)?;
    key.create_file(file)?;
    Ok(key)
}

/// The keys of `--status`, or its certificate.
pub(crate) fn status_options(args: &Args) -> Result<ClientOptions, KeyFileError> {
    if let (Some(cert), Some(key), Some(ca)) = (&args.cert, &args.key, &args.ca) {
        return Ok(ClientOptions::default().with_certificate(Some(Certificate::read_files(cert, key, ca)?)));
    }
    if args.key.is_some() && args.server_key.is_none() {
        usage("--status: with --key, give --server-key, or --cert and --ca");
    }
    let key = args.key.as_deref().map(SecretKey::read_file).transpose()?;
    Ok(ClientOptions::default().with_key(key).with_server_keys(args.server_key.into_iter().collect()))
}
