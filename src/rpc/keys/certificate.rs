//! Certificates of an organisation's CA, from files in PEM.

use std::fmt;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use super::{Identity, KeyFileError, read_secret};

/// Longest file that is read as certificates.
const MAX_FILE: u64 = 4 << 20;

/// What is wrong with a file of another format.
const NO_CERTIFICATE: &str =
    "no certificate in PEM (-----BEGIN CERTIFICATE-----): give the file that the CA has issued";

/// What an end proves by a certificate, and the CA that must have signed the certificates of other ends.
#[derive(Clone)]
pub struct Certificate {
    key: Arc<CertifiedKey>,
    authorities: Arc<RootCertStore>,
    name: String,
}

impl Certificate {
    /// Reads the certificate with those between it and its CA (PEM, its own one first), its secret key (PEM: PKCS #8, SEC 1 or
    /// PKCS #1, of Ed25519, ECDSA or RSA), and the certificates of the CA (PEM).
    ///
    /// # Errors
    /// [`KeyFileError`], also if other users can read the key, or if it is not the certificate's.
    pub fn read_files(certificate: &Path, key: &Path, authorities: &Path) -> Result<Certificate, KeyFileError> {
        let wrong =
            |path: &Path, reason: String| KeyFileError::Certificate { path: path.display().to_string(), reason };
        let chain = read_certificates(certificate)?;
        let own = chain.first().ok_or_else(|| wrong(certificate, NO_CERTIFICATE.to_owned()))?;
        let name = match name_of(own) {
            Some(Identity::Certificate(name)) => name,
            _ => {
                return Err(wrong(
                    certificate,
                    "the first DNS name (subjectAltName) of the certificate is missing, or a wildcard".to_owned(),
                ));
            }
        };
        let secret = PrivateKeyDer::from_pem_slice(read_secret(key)?.as_bytes());
        let secret = secret.map_err(|e| wrong(key, format!("no secret key in PEM: {e}")))?;
        let secret = any_supported_type(&secret).map_err(|e| wrong(key, e.to_string()))?;
        let key_of_chain = CertifiedKey::new(chain, secret);
        key_of_chain.keys_match().map_err(|_| wrong(key, "not the key of the certificate".to_owned()))?;
        let mut roots = RootCertStore::empty();
        for root in read_certificates(authorities)? {
            roots.add(root).map_err(|e| wrong(authorities, e.to_string()))?;
        }
        if roots.is_empty() {
            return Err(wrong(authorities, NO_CERTIFICATE.to_owned()));
        }
        Ok(Certificate { key: Arc::new(key_of_chain), authorities: Arc::new(roots), name })
    }

    /// The name by which other ends know it: its first DNS name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn key(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.key)
    }

    pub(crate) fn authorities(&self) -> Arc<RootCertStore> {
        Arc::clone(&self.authorities)
    }
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The name by which a certificate is known: its first valid DNS name. `None`: it has none, or this one is a wildcard.
pub(crate) fn name_of(certificate: &CertificateDer<'_>) -> Option<Identity> {
    let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
    let name = certificate.valid_dns_names().next()?;
    Identity::of_name(name)
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, KeyFileError> {
    let named = || path.display().to_string();
    let mut pem = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut pem));
    read.map_err(|error| KeyFileError::Io { path: named(), error })?;
    if pem.len() as u64 > MAX_FILE {
        let error = io::Error::other(format!("longer than {MAX_FILE} bytes"));
        return Err(KeyFileError::Io { path: named(), error });
    }
    let certificates = CertificateDer::pem_slice_iter(&pem).collect::<Result<_, _>>();
    certificates.map_err(|e| KeyFileError::Certificate { path: named(), reason: e.to_string() })
}
