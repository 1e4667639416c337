//! The credentials that the ends of a TLS connection prove and demand: raw public keys (RFC 7250), or certificates of a CA.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, OtherError, ServerConfig,
    SignatureScheme,
};

use super::super::address::KeyName;
use crate::rpc::keys::{Certificate, Identity, PublicKey, SecretKey, name_of};

/// The key that this end proves.
#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    key: Arc<CertifiedKey>,
    public: PublicKey,
}

/// The credentials that a server proves to its clients and to the servers that it dials.
#[derive(Clone, Debug)]
pub(crate) enum Proof {
    Key(Credentials),
    Certificate(Certificate),
}

/// The configuration of a client, or of a server that dials another one.
#[derive(Clone, Debug)]
pub(crate) struct ClientTls {
    pub(super) config: Arc<ClientConfig>,
    /// The name for which the server's certificate must be. With raw keys, an address that is not sent.
    pub(super) server_name: ServerName<'static>,
}

/// The configuration of a server.
#[derive(Clone, Debug)]
pub(crate) struct ServerTls {
    pub(super) config: Arc<ServerConfig>,
    allowed: Arc<dyn AllowedPeers>,
    /// Whether clients prove certificates, not raw keys.
    demands_certificates: bool,
}

/// Whether the list of a server allows a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is allowed, by this name.
    Allowed(KeyName),
    Revoked,
    Unknown,
}

/// The clients that a server allows; the list may change.
pub(crate) trait AllowedPeers: fmt::Debug + Send + Sync {
    fn check(&self, identity: &Identity) -> Verdict;
}

/// A key or certificate that this end does not trust.
#[derive(Debug, thiserror::Error)]
pub(super) enum UntrustedPeer {
    #[error("the client's key {0} is not allowed (--allow-keys)")]
    UnknownClient(PublicKey),
    #[error("no certificate for the name {0} is allowed (--allow-keys)")]
    UnknownName(String),
    #[error("the client's certificate has no DNS name (subjectAltName) to know it by, or a wildcard")]
    NoName,
    #[error(
        "the server's key is {0}, which this end was not told to expect (--server-key, or KEY of --peer or `rpc-server connect`)"
    )]
    OtherServer(PublicKey),
    #[error("the key is not an Ed25519 key")]
    Algorithm,
}

impl From<UntrustedPeer> for Error {
    fn from(wrong: UntrustedPeer) -> Error {
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
        let spki = CertificateDer::from(key.public_key().ok_or(Error::from(UntrustedPeer::Algorithm))?.to_vec());
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
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(Arc::clone(&credentials.key))));
        Ok(ClientTls::with_settings(config, ServerName::from(IpAddr::from([127, 0, 0, 1]))))
    }

    /// A client that proves a certificate, and demands one of the CA for `host`, a DNS name or an IP address.
    pub(crate) fn with_certificate(certificate: &Certificate, host: &str) -> Result<ClientTls, Error> {
        let provider = provider();
        let server_name = ServerName::try_from(host.to_owned()).map_err(|e| Error::General(format!("{host}: {e}")))?;
        let verifier = WebPkiServerVerifier::builder_with_provider(certificate.authorities(), Arc::clone(&provider));
        let verifier = verifier.build().map_err(|e| Error::General(e.to_string()))?;
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_webpki_verifier(verifier)
            .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certificate.key())));
        Ok(ClientTls::with_settings(config, server_name))
    }

    /// The settings of all clients.
    fn with_settings(mut config: ClientConfig, server_name: ServerName<'static>) -> ClientTls {
        // A session whose key was removed must not be resumed.
        config.resumption = Resumption::disabled();
        config.enable_secret_extraction = true;
        ClientTls { config: Arc::new(config), server_name }
    }
}

impl ServerTls {
    /// A server that accepts the clients `allowed`.
    pub(crate) fn new(credentials: &Credentials, allowed: Arc<dyn AllowedPeers>) -> Result<ServerTls, Error> {
        let provider = provider();
        let verifier = ClientKeyVerifier { allowed: Arc::clone(&allowed), provider: Arc::clone(&provider) };
        let config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::clone(&credentials.key))));
        Ok(ServerTls::with_settings(config, allowed, false))
    }

    /// A server that proves a certificate, and accepts the clients `allowed` with certificates of the CA.
    pub(crate) fn with_certificate(
        certificate: &Certificate,
        allowed: Arc<dyn AllowedPeers>,
    ) -> Result<ServerTls, Error> {
        let provider = provider();
        let inner = WebPkiClientVerifier::builder_with_provider(certificate.authorities(), Arc::clone(&provider));
        let inner = inner.build().map_err(|e| Error::General(e.to_string()))?;
        let verifier = ClientCertificateVerifier { inner, allowed: Arc::clone(&allowed) };
        let config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(certificate.key())));
        Ok(ServerTls::with_settings(config, allowed, true))
    }

    /// The settings of all servers.
    fn with_settings(
        mut config: ServerConfig,
        allowed: Arc<dyn AllowedPeers>,
        demands_certificates: bool,
    ) -> ServerTls {
        // A session whose key was removed must not be resumed.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.enable_secret_extraction = true;
        ServerTls { config: Arc::new(config), allowed, demands_certificates }
    }

    /// What a client has proved by its certificate, or by the raw key in the place of one.
    pub(super) fn identity_of(&self, certificate: &CertificateDer<'_>) -> Option<Identity> {
        if self.demands_certificates {
            name_of(certificate)
        } else {
            PublicKey::from_spki(certificate).map(Identity::Key)
        }
    }

    /// The name of a client that has proved its identity; `None` if the list does not allow it, or no longer.
    pub(super) fn name_of(&self, identity: &Identity) -> Option<KeyName> {
        match self.allowed.check(identity) {
            Verdict::Allowed(name) => Some(name),
            Verdict::Revoked | Verdict::Unknown => None,
        }
    }
}

/// Whether a list allows a client.
fn check_allowed(allowed: &dyn AllowedPeers, identity: &Identity) -> Result<(), Error> {
    match (allowed.check(identity), identity) {
        (Verdict::Allowed(_), _) => Ok(()),
        (Verdict::Revoked, _) => Err(CertificateError::Revoked.into()),
        (Verdict::Unknown, Identity::Key(key)) => Err(UntrustedPeer::UnknownClient(*key).into()),
        (Verdict::Unknown, Identity::Certificate(name)) => Err(UntrustedPeer::UnknownName(name.clone()).into()),
    }
}

/// The method of TLS 1.2 that each verifier must have. No configuration offers that version.
macro_rules! refuse_tls12 {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("TLS 1.2 is not offered".to_owned()))
        }
    };
}

/// The methods that both verifiers of raw keys have: signatures by raw keys, in TLS 1.3.
macro_rules! raw_key_methods {
    () => {
        refuse_tls12!();

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

/// The keys; a client demands that its server proves one of them.
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
            Some(got) => Err(UntrustedPeer::OtherServer(got).into()),
            None => Err(UntrustedPeer::Algorithm.into()),
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
        let key = PublicKey::from_spki(end_entity).ok_or(Error::from(UntrustedPeer::Algorithm))?;
        check_allowed(&*self.allowed, &Identity::Key(key))?;
        Ok(ClientCertVerified::assertion())
    }

    raw_key_methods!();
}

/// The certificates that a server demands of its clients: of the CA, and of names that it allows.
#[derive(Debug)]
struct ClientCertificateVerifier {
    inner: Arc<dyn ClientCertVerifier>,
    allowed: Arc<dyn AllowedPeers>,
}

impl ClientCertVerifier for ClientCertificateVerifier {
    /// The names of the CAs are not sent: a bundle of many would fill the handshake.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.inner.verify_client_cert(end_entity, intermediates, now)?;
        let identity = name_of(end_entity).ok_or(Error::from(UntrustedPeer::NoName))?;
        check_allowed(&*self.allowed, &identity)?;
        Ok(verified)
    }

    refuse_tls12!();

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
