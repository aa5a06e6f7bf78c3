//! PEM files.

use std::{fs, io, path::Path, sync::Arc};

use kvist_errors::{Code, KvistError};
use rustls::{
    RootCertStore,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    sign::CertifiedKey,
};

/// Largest file that is read: a bundle of all public authorities is a quarter of it.
const MOST_FILE_BYTES: u64 = 1024 * 1024;

/// The cryptography of all doors.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Reads a file whose name a setting gives. The message names the setting, never the path or the content.
pub(crate) fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, KvistError> {
    let read = || -> io::Result<Vec<u8>> {
        if fs::metadata(path)?.len() > MOST_FILE_BYTES {
            return Err(io::Error::other("it is larger than 1 MiB"));
        }
        fs::read(path)
    };
    read().map_err(|error| wrong(field, format!("cannot be read: {error}")))
}

/// Authorities of a PEM file.
pub(crate) fn authorities(field: &'static str, pem: &[u8]) -> Result<Arc<RootCertStore>, KvistError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(field, pem)? {
        roots.add(certificate).map_err(|_| wrong(field, "holds a certificate that cannot be an authority's"))?;
    }
    Ok(Arc::new(roots))
}

/// A certificate with its chain, and the key that belongs to it.
pub(crate) fn certified_key(certificate_pem: &[u8], key_pem: &[u8]) -> Result<Arc<CertifiedKey>, KvistError> {
    let chain = certificates("tls_certificate_file", certificate_pem)?;
    let key = PrivateKeyDer::from_pem_slice(key_pem).map_err(|_| wrong("tls_key_file", "holds no key as PEM"))?;
    let certified = CertifiedKey::from_der(chain, key, &provider()).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => wrong("tls_key_file", "is not the key of tls_certificate_file"),
        _ => wrong("tls_key_file", "holds a key of a kind that is not supported, or a damaged certificate"),
    })?;
    Ok(Arc::new(certified))
}

/// Until when the first certificate of a PEM file may be used, in Unix seconds: a certificate that nobody renews ends
/// every connection at once.
///
/// # Errors
/// The file cannot be read, or holds no certificate.
pub fn certificate_expiry(path: &Path) -> Result<i64, KvistError> {
    expiry(&read("tls_certificate_file", path)?)
}

/// Until when the first certificate of a PEM text may be used, in Unix seconds.
pub(crate) fn expiry(certificate_pem: &[u8]) -> Result<i64, KvistError> {
    let field = "tls_certificate_file";
    let chain = certificates(field, certificate_pem)?;
    let leaf = chain.first().map(|leaf| x509_parser::parse_x509_certificate(leaf));
    match leaf {
        Some(Ok((_, certificate))) => Ok(certificate.validity().not_after.timestamp()),
        _ => Err(wrong(field, "holds a damaged certificate")),
    }
}

fn certificates(field: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, KvistError> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|_| wrong(field, "holds no certificate as PEM"))?;
    if found.is_empty() { Err(wrong(field, "holds no certificate as PEM")) } else { Ok(found) }
}

pub(crate) fn wrong(field: &'static str, reason: impl Into<String>) -> KvistError {
    KvistError::field(Code::InvalidArgument, field, reason)
}
