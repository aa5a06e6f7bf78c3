//! The roles of those who call, and how a certificate states one.

use kvist_errors::{Code, KvistError};
use serde::Serialize;

/// What a peer is in the mesh. Not the role of a pool, which says what its workers compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerRole {
    /// Somebody who asks models.
    Client,
    /// A router.
    Router,
    /// A worker.
    Worker,
    /// An agent.
    Agent,
    /// A controller.
    Controller,
    /// A KV master.
    KvMaster,
    /// A person, or a program for one, who runs the mesh.
    Operator,
}

impl PeerRole {
    /// Every role.
    pub const ALL: &'static [Self] =
        &[Self::Client, Self::Router, Self::Worker, Self::Agent, Self::Controller, Self::KvMaster, Self::Operator];

    /// As certificates and the documentation write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Router => "router",
            Self::Worker => "worker",
            Self::Agent => "agent",
            Self::Controller => "controller",
            Self::KvMaster => "kvmaster",
            Self::Operator => "operator",
        }
    }
}

/// Where the role stands in a URI of the certificate's subject alternative names.
///
/// `{role}` stands for the role's name, and `*` for one segment of a path, which is not empty and holds no `/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RolePattern(String);

/// Any trust domain: the authorities decide whose certificates are looked at.
const USUAL: &str = "spiffe://*/kvist/{role}";
const ROLE: &str = "{role}";
/// More would only make comparing slow.
const MOST_STARS: usize = 4;

impl Default for RolePattern {
    fn default() -> Self {
        Self(USUAL.to_owned())
    }
}

impl RolePattern {
    /// Reads a pattern.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`: not exactly one `{role}`, or too many stars.
    pub fn new(pattern: &str) -> Result<Self, KvistError> {
        let reason = if pattern.matches(ROLE).count() != 1 {
            "must name {role} exactly once"
        } else if pattern.matches('*').count() > MOST_STARS {
            "has more than four stars"
        } else if !pattern.contains("://") {
            "must be a URI, such as spiffe://*/kvist/{role}"
        } else {
            return Ok(Self(pattern.to_owned()));
        };
        Err(KvistError::field(Code::InvalidArgument, "tls_role_uri", reason))
    }

    /// The role that one of the URIs states; none when none does, or when two state different ones.
    #[must_use]
    pub fn role_of<'uri>(&self, uris: impl IntoIterator<Item = &'uri str>) -> Option<PeerRole> {
        let mut found = None;
        for uri in uris {
            for role in PeerRole::ALL {
                if !is_match(&self.0.replace(ROLE, role.name()), uri) {
                    continue;
                }
                if found.is_some_and(|other| other != *role) {
                    return None;
                }
                found = Some(*role);
            }
        }
        found
    }

    /// The role that a certificate states, as DER.
    #[must_use]
    pub(crate) fn role_of_certificate(&self, der: &rustls::pki_types::CertificateDer<'_>) -> Option<PeerRole> {
        let certificate = webpki::EndEntityCert::try_from(der).ok()?;
        self.role_of(certificate.valid_uri_names())
    }
}

/// Whether a text is what a pattern with stars describes.
fn is_match(pattern: &str, text: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else { return pattern == text };
    let Some(rest) = text.strip_prefix(head) else { return false };
    let segment_bytes = rest.find('/').unwrap_or(rest.len());
    (1..=segment_bytes).any(|end| rest.get(end..).is_some_and(|after| is_match(tail, after)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_pattern_reads_the_role_of_any_trust_domain() {
        let pattern = RolePattern::default();
        for role in PeerRole::ALL {
            let uri = format!("spiffe://home.example/kvist/{}", role.name());
            assert_eq!(Some(*role), pattern.role_of([uri.as_str()]));
        }
        for stranger in [
            "spiffe:///kvist/router",
            "spiffe://a/b/kvist/router",
            "spiffe://a/kvist/router/x",
            "spiffe://a/kvist/Router",
            "spiffe://a/kvist/",
            "https://a/kvist/router",
            "xspiffe://a/kvist/router",
        ] {
            assert_eq!(None, pattern.role_of([stranger]), "{stranger}");
        }
    }

    #[test]
    fn a_configured_pattern_reads_the_uris_of_a_service_mesh() {
        let pattern = RolePattern::new("spiffe://cluster.local/ns/*/sa/kvist-{role}").unwrap();
        assert_eq!(Some(PeerRole::Agent), pattern.role_of(["spiffe://cluster.local/ns/serving/sa/kvist-agent"]));
        assert_eq!(None, pattern.role_of(["spiffe://cluster.local/ns/a/b/sa/kvist-agent"]));
        assert_eq!(None, pattern.role_of(["spiffe://other/ns/serving/sa/kvist-agent"]));
    }

    #[test]
    fn two_different_roles_are_none() {
        let pattern = RolePattern::default();
        assert_eq!(
            Some(PeerRole::Router),
            pattern.role_of(["spiffe://a/kvist/router", "spiffe://b/kvist/router", "urn:other"])
        );
        assert_eq!(None, pattern.role_of(["spiffe://a/kvist/router", "spiffe://a/kvist/operator"]));
    }

    #[test]
    fn a_pattern_without_one_role_is_refused() {
        for wrong in ["spiffe://a/kvist", "spiffe://{role}/{role}", "{role}", "spiffe://*/*/*/*/*/{role}"] {
            assert!(RolePattern::new(wrong).is_err(), "{wrong}");
        }
    }
}
