//! What the ends of a TLS connection prove and demand: raw public keys (RFC 7250).

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, OtherError, ServerConfig,
    SignatureScheme,
};

use super::super::address::KeyName;
use crate::rpc::keys::{PublicKey, SecretKey};

/// The key that this end proves.
#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    key: Arc<CertifiedKey>,
    public: PublicKey,
}

/// The configuration of a client, or of a server that dials another one.
#[derive(Clone, Debug)]
pub(crate) struct ClientTls {
    pub(super) config: Arc<ClientConfig>,
}

/// The configuration of a server.
#[derive(Clone, Debug)]
pub(crate) struct ServerTls {
    pub(super) config: Arc<ServerConfig>,
    pub(super) allowed: Arc<dyn AllowedPeers>,
}

/// What a server thinks of a client's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is allowed, by this name.
    Allowed(KeyName),
    Revoked,
    Unknown,
}

/// The clients that a server allows; the list may change.
pub(crate) trait AllowedPeers: fmt::Debug + Send + Sync {
    fn check(&self, key: PublicKey) -> Verdict;
}

/// A key that is not the expected one.
#[derive(Debug, thiserror::Error)]
pub(super) enum WrongKey {
    #[error("the client's key {0} is not allowed (--allow-keys)")]
    UnknownClient(PublicKey),
    #[error(
        "the server's key is {0}, which this end was not told to expect (--server-key, or KEY of --peer or `rpc-server connect`)"
    )]
    OtherServer(PublicKey),
    #[error("the key is not an Ed25519 key")]
    Algorithm,
}

impl From<WrongKey> for Error {
    fn from(wrong: WrongKey) -> Error {
        CertificateError::Other(OtherError(Arc::new(wrong))).into()
    }
}

fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    // 128 bits first: AES has fewer rounds then than with 256.
    provider.cipher_suites = vec![
        ring::cipher_suite::TLS13_AES_128_GCM_SHA256,
        ring::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ring::cipher_suite::TLS13_AES_256_GCM_SHA384,
    ];
    Arc::new(provider)
}

impl Credentials {
    /// A raw public key.
    pub(crate) fn of_key(secret: &SecretKey) -> Result<Credentials, Error> {
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(secret.to_pkcs8()));
        let key = provider().key_provider.load_private_key(key)?;
        let spki = CertificateDer::from(key.public_key().ok_or(Error::from(WrongKey::Algorithm))?.to_vec());
        Ok(Credentials { key: Arc::new(CertifiedKey::new(vec![spki], key)), public: secret.public_key() })
    }

    /// The public part of the key.
    pub(crate) fn public_key(&self) -> PublicKey {
        self.public
    }
}

impl ClientTls {
    /// A client of servers with one of the keys `servers`.
    pub(crate) fn new(credentials: &Credentials, servers: &[PublicKey]) -> Result<ClientTls, Error> {
        let provider = provider();
        let verifier = ServerKeyVerifier { expected: servers.to_vec(), provider: Arc::clone(&provider) };
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(Arc::clone(&credentials.key))));
        // A session whose key was removed must not be resumed.
        config.resumption = Resumption::disabled();
        config.enable_secret_extraction = true;
        Ok(ClientTls { config: Arc::new(config) })
    }
}

impl ServerTls {
    /// A server that accepts the clients `allowed`.
    pub(crate) fn new(credentials: &Credentials, allowed: Arc<dyn AllowedPeers>) -> Result<ServerTls, Error> {
        let provider = provider();
        let verifier = ClientKeyVerifier { allowed: Arc::clone(&allowed), provider: Arc::clone(&provider) };
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::clone(&credentials.key))));
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.enable_secret_extraction = true;
        Ok(ServerTls { config: Arc::new(config), allowed })
    }

    /// The name of a client that has proved a key; `None` if the list does not allow it, or no longer.
    pub(super) fn name_of(&self, key: PublicKey) -> Option<KeyName> {
        match self.allowed.check(key) {
            Verdict::Allowed(name) => Some(name),
            Verdict::Revoked | Verdict::Unknown => None,
        }
    }
}

/// The methods that both verifiers have: signatures are those of raw keys, in TLS 1.3.
macro_rules! raw_key_methods {
    () => {
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
            message: &[u8],
            spki: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let spki = SubjectPublicKeyInfoDer::from(spki.as_ref());
            verify_tls13_signature_with_raw_key(
                message,
                &spki,
                signed,
                &self.provider.signature_verification_algorithms,
            )
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.provider.signature_verification_algorithms.supported_schemes()
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

/// The keys of which a client demands one of its server.
#[derive(Debug)]
struct ServerKeyVerifier {
    expected: Vec<PublicKey>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for ServerKeyVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match PublicKey::from_spki(end_entity) {
            Some(got) if self.expected.contains(&got) => Ok(ServerCertVerified::assertion()),
            Some(got) => Err(WrongKey::OtherServer(got).into()),
            None => Err(WrongKey::Algorithm.into()),
        }
    }

    raw_key_methods!();
}

/// The keys that a server demands of its clients.
#[derive(Debug)]
struct ClientKeyVerifier {
    allowed: Arc<dyn AllowedPeers>,
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for ClientKeyVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let key = PublicKey::from_spki(end_entity).ok_or(Error::from(WrongKey::Algorithm))?;
        match self.allowed.check(key) {
            Verdict::Allowed(_) => Ok(ClientCertVerified::assertion()),
            Verdict::Revoked => Err(CertificateError::Revoked.into()),
            Verdict::Unknown => Err(WrongKey::UnknownClient(key).into()),
        }
    }

    raw_key_methods!();
}
