//! rustls by its own interface, with raw public keys and without checks of the peer's key: for the rate at which it encrypts and
//! decrypts in memory, and for clients that the measured server does not know.

use fanout::rpc::keys::SecretKey;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, WantsClientCert};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, ConfigBuilder, DigitallySignedStruct, Error, ServerConfig, ServerConnection,
    SignatureScheme,
};
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that are encrypted at a time.
const CHUNK: usize = 64 << 10;

/// Accepts each key of a server.
#[derive(Debug)]
struct AnyKey;

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not offered".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// A new key, as rustls wants it.
fn certified_key() -> Arc<CertifiedKey> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    SecretKey::generate().unwrap().create_file(&file).unwrap();
    let key = ring::default_provider().key_provider.load_private_key(PrivateKeyDer::from_pem_file(&file).unwrap());
    let key = key.unwrap();
    let spki = CertificateDer::from(key.public_key().unwrap().to_vec());
    Arc::new(CertifiedKey::new(vec![spki], key))
}

/// The cipher that both ends of fanout prefer, too.
fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    let cipher_suites = vec![ring::cipher_suite::TLS13_AES_128_GCM_SHA256];
    Arc::new(rustls::crypto::CryptoProvider { cipher_suites, ..ring::default_provider() })
}

fn client_builder() -> ConfigBuilder<ClientConfig, WantsClientCert> {
    let config = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]).unwrap();
    config.dangerous().with_custom_certificate_verifier(Arc::new(AnyKey))
}

/// Connections of clients with a new key.
pub(crate) fn client_config() -> Arc<ClientConfig> {
    let resolver = AlwaysResolvesClientRawPublicKeys::new(certified_key());
    Arc::new(client_builder().with_client_cert_resolver(Arc::new(resolver)))
}

pub(crate) fn client(config: &Arc<ClientConfig>) -> ClientConnection {
    ClientConnection::new(Arc::clone(config), ServerName::try_from("localhost").unwrap()).unwrap()
}

fn server() -> ServerConnection {
    let config = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]).unwrap();
    let config = config.with_no_client_auth();
    let config = config.with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified_key())));
    ServerConnection::new(Arc::new(config)).unwrap()
}

/// The rate in bytes per second at which one thread encrypts and then decrypts, both by rustls, without a socket.
pub(crate) fn rate_in_memory(bytes: usize) -> f64 {
    let (mut client, mut server) = (client(&Arc::new(client_builder().with_no_client_auth())), server());
    let (mut wire, mut got) = (Vec::with_capacity(2 * CHUNK), vec![0; CHUNK]);
    let flush = |from: &mut dyn FnMut(&mut Vec<u8>), wire: &mut Vec<u8>| {
        wire.clear();
        from(wire);
    };
    while client.is_handshaking() || server.is_handshaking() {
        flush(
            &mut |wire| {
                while client.wants_write() {
                    client.write_tls(wire).unwrap();
                }
            },
            &mut wire,
        );
        let mut rest = &wire[..];
        while !rest.is_empty() {
            server.read_tls(&mut rest).unwrap();
            server.process_new_packets().unwrap();
        }
        flush(
            &mut |wire| {
                while server.wants_write() {
                    server.write_tls(wire).unwrap();
                }
            },
            &mut wire,
        );
        let mut rest = &wire[..];
        while !rest.is_empty() {
            client.read_tls(&mut rest).unwrap();
            client.process_new_packets().unwrap();
        }
    }
    let chunk = vec![7; CHUNK];
    let began = Instant::now();
    for _ in 0..bytes / CHUNK {
        client.writer().write_all(&chunk).unwrap();
        flush(
            &mut |wire| {
                while client.wants_write() {
                    client.write_tls(wire).unwrap();
                }
            },
            &mut wire,
        );
        let (mut rest, mut at) = (&wire[..], 0);
        while !rest.is_empty() {
            server.read_tls(&mut rest).unwrap();
            server.process_new_packets().unwrap();
            // Nothing while the record is not complete.
            at += server.reader().read(&mut got[at..]).unwrap_or(0);
        }
        while at < CHUNK {
            at += server.reader().read(&mut got[at..]).unwrap();
        }
    }
    bytes as f64 / began.elapsed().max(Duration::from_nanos(1)).as_secs_f64()
}
