//! What the ends of a TLS connection prove and demand: raw public keys (RFC 7250), or certificates of an organisation's CA.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{
    AlwaysResolvesClientRawPublicKeys, ResolvesClientCert, Resumption, WebPkiServerVerifier, verify_server_name,
};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage, ParsedCertificate, ResolvesServerCert,
    WebPkiClientVerifier,
};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    ServerConfig, SignatureScheme,
};

use super::super::address::KeyName;
use crate::rpc::keys::{KeyFileError, PublicKey, SecretKey, read_secret};

/// What this end proves: a key, or a certificate and its key.
#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    key: Arc<CertifiedKey>,
    is_raw: bool,
}

/// Certificates of an organisation's CA.
#[derive(Clone, Debug)]
pub(crate) struct Roots(Arc<RootCertStore>);

/// What a client demands of its server.
#[derive(Clone, Debug)]
pub(crate) enum ServerTrust {
    /// This key.
    Key(PublicKey),
    /// A certificate of the CA for the name of the server.
    Ca(Roots),
}

/// The configuration of a client, or of a server that dials another one.
#[derive(Clone, Debug)]
pub(crate) struct ClientTls {
    pub(super) config: Arc<ClientConfig>,
    pub(super) server_name: ServerName<'static>,
}

/// The configuration of a server.
#[derive(Clone, Debug)]
pub(crate) struct ServerTls {
    pub(super) config: Arc<ServerConfig>,
    pub(super) allowed: Arc<dyn AllowedPeers>,
}

/// Who a client has proved to be: by its key, or by the names of its certificate.
pub(crate) enum ProvedPeer<'a> {
    Key(PublicKey),
    Certificate(&'a ParsedCertificate<'a>),
}

impl ProvedPeer<'_> {
    /// Whether the certificate is one for `name`.
    pub(crate) fn has_name(&self, name: &ServerName<'_>) -> bool {
        matches!(self, ProvedPeer::Certificate(certificate) if verify_server_name(certificate, name).is_ok())
    }
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
    fn check(&self, peer: &ProvedPeer<'_>) -> Verdict;
}

/// A key that is not the expected one.
#[derive(Debug, thiserror::Error)]
pub(super) enum WrongKey {
    #[error("the client's key {0} is not allowed (--allow-keys)")]
    UnknownClient(PublicKey),
    #[error("the client's certificate has no allowed name (--allow-keys)")]
    UnknownCertificate,
    #[error("the server's key is {got}, not {expected}")]
    OtherServer { got: PublicKey, expected: PublicKey },
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
    // 128 bits first: a fifth faster than 256 where the processor has instructions for AES.
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
        let public = key.public_key().ok_or_else(|| Error::General("a key without a public key".to_owned()))?;
        let public = CertificateDer::from(public.to_vec());
        Ok(Credentials { key: Arc::new(CertifiedKey::new(vec![public], key)), is_raw: true })
    }

    /// A chain of certificates, the end's own one first, and its key, each in PEM.
    pub(crate) fn read_files(chain: &Path, key: &Path) -> Result<Credentials, KeyFileError> {
        let format = |path: &Path| KeyFileError::Format(path.display().to_string());
        let certificates = read_certificates(chain)?;
        let secret = PrivateKeyDer::from_pem_slice(read_secret(key)?.as_bytes()).map_err(|_| format(key))?;
        let key = CertifiedKey::from_der(certificates, secret, &provider()).map_err(|e| KeyFileError::Io {
            path: key.display().to_string(),
            source: std::io::Error::other(e),
        })?;
        Ok(Credentials { key: Arc::new(key), is_raw: false })
    }

    /// The public key; `None` for a certificate.
    pub(crate) fn public_key(&self) -> Option<PublicKey> {
        let spki = self.key.cert.first().filter(|_| self.is_raw)?;
        PublicKey::from_spki(spki)
    }

    fn for_client(&self) -> Arc<dyn ResolvesClientCert> {
        let key = Arc::clone(&self.key);
        if self.is_raw {
            Arc::new(AlwaysResolvesClientRawPublicKeys::new(key))
        } else {
            Arc::new(SingleCertAndKey::from(key))
        }
    }

    fn for_server(&self) -> Arc<dyn ResolvesServerCert> {
        let key = Arc::clone(&self.key);
        if self.is_raw {
            Arc::new(AlwaysResolvesServerRawPublicKeys::new(key))
        } else {
            Arc::new(SingleCertAndKey::from(key))
        }
    }
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, KeyFileError> {
    let error = |source| KeyFileError::Io { path: path.display().to_string(), source };
    let pem = std::fs::read(path).map_err(error)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match certificates {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        _ => Err(error(std::io::Error::other("no certificates in PEM"))),
    }
}

impl Roots {
    /// The certificates of a file in PEM.
    pub(crate) fn read_file(path: &Path) -> Result<Roots, KeyFileError> {
        let mut roots = RootCertStore::empty();
        for certificate in read_certificates(path)? {
            roots.add(certificate).map_err(|e| KeyFileError::Io {
                path: path.display().to_string(),
                source: std::io::Error::other(e),
            })?;
        }
        Ok(Roots(Arc::new(roots)))
    }
}

impl ClientTls {
    /// A client that connects to the server `host`. Without credentials, it can only connect to servers that demand none.
    pub(crate) fn new(credentials: Option<&Credentials>, trust: &ServerTrust, host: &str) -> Result<ClientTls, Error> {
        let provider = provider();
        let server_name = match trust {
            // Not sent, and not compared.
            ServerTrust::Key(_) => ServerName::from(std::net::IpAddr::from([127, 0, 0, 1])),
            ServerTrust::Ca(_) => ServerName::try_from(host.to_owned())
                .map_err(|_| Error::General(format!("{host:?} cannot be the name in a certificate")))?,
        };
        let verifier: Arc<dyn ServerCertVerifier> = match trust {
            ServerTrust::Key(expected) => Arc::new(ServerKey { expected: *expected, provider: Arc::clone(&provider) }),
            ServerTrust::Ca(Roots(roots)) => {
                WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(&provider))
                    .build()
                    .map_err(|e| Error::General(e.to_string()))?
            }
        };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let mut config = match credentials {
            Some(credentials) => builder.with_client_cert_resolver(credentials.for_client()),
            None => builder.with_no_client_auth(),
        };
        // A session whose key was removed must not be resumed.
        config.resumption = Resumption::disabled();
        config.enable_secret_extraction = true;
        Ok(ClientTls { config: Arc::new(config), server_name })
    }
}

impl ServerTls {
    /// A server that accepts the clients `allowed`, by their keys, or with `roots` by the names of their certificates.
    pub(crate) fn new(
        credentials: &Credentials,
        roots: Option<&Roots>,
        allowed: Arc<dyn AllowedPeers>,
    ) -> Result<ServerTls, Error> {
        let provider = provider();
        let by_ca = match roots {
            None => None,
            Some(Roots(roots)) => Some(
                WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(&provider))
                    .build()
                    .map_err(|e| Error::General(e.to_string()))?,
            ),
        };
        let verifier = ClientKeys { allowed: Arc::clone(&allowed), by_ca, provider: Arc::clone(&provider) };
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(credentials.for_server());
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.enable_secret_extraction = true;
        Ok(ServerTls { config: Arc::new(config), allowed })
    }

    /// What the list says of a client that has proved a certificate or a key.
    pub(super) fn check(&self, proved: &CertificateDer<'_>) -> Verdict {
        check(&*self.allowed, proved)
    }
}

fn check(allowed: &dyn AllowedPeers, proved: &CertificateDer<'_>) -> Verdict {
    if let Some(key) = PublicKey::from_spki(proved) {
        return allowed.check(&ProvedPeer::Key(key));
    }
    ParsedCertificate::try_from(proved)
        .map_or(Verdict::Unknown, |certificate| allowed.check(&ProvedPeer::Certificate(&certificate)))
}

/// The key that a client demands of its server.
#[derive(Debug)]
struct ServerKey {
    expected: PublicKey,
    provider: Arc<CryptoProvider>,
}

/// Checks that the peer has signed the handshake with the raw key `spki`.
fn verify_raw_key(
    provider: &CryptoProvider,
    message: &[u8],
    spki: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, Error> {
    let spki = SubjectPublicKeyInfoDer::from(spki.as_ref());
    verify_tls13_signature_with_raw_key(message, &spki, signed, &provider.signature_verification_algorithms)
}

impl ServerCertVerifier for ServerKey {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match PublicKey::from_spki(end_entity) {
            Some(got) if got == self.expected => Ok(ServerCertVerified::assertion()),
            Some(got) => Err(WrongKey::OtherServer { got, expected: self.expected }.into()),
            None => Err(WrongKey::Algorithm.into()),
        }
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
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_raw_key(&self.provider, message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// The keys or certificates that a server demands of its clients.
#[derive(Debug)]
struct ClientKeys {
    allowed: Arc<dyn AllowedPeers>,
    /// Checks certificates; `None`: clients have raw keys.
    by_ca: Option<Arc<dyn ClientCertVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for ClientKeys {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.by_ca.as_ref().map_or(&[], |by_ca| by_ca.root_hint_subjects())
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if let Some(by_ca) = &self.by_ca {
            by_ca.verify_client_cert(end_entity, intermediates, now)?;
        }
        match check(&*self.allowed, end_entity) {
            Verdict::Allowed(_) => Ok(ClientCertVerified::assertion()),
            Verdict::Revoked => Err(CertificateError::Revoked.into()),
            Verdict::Unknown if self.by_ca.is_some() => Err(WrongKey::UnknownCertificate.into()),
            Verdict::Unknown => Err(PublicKey::from_spki(end_entity)
                .map_or(WrongKey::Algorithm, WrongKey::UnknownClient)
                .into()),
        }
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
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        match &self.by_ca {
            Some(by_ca) => by_ca.verify_tls13_signature(message, cert, dss),
            None => verify_raw_key(&self.provider, message, cert, dss),
        }
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        self.by_ca.is_none()
    }
}
