//! Whether a peer may make a call.

use kvist_errors::{Code, KvistError};
use serde::Deserialize;

use crate::{Peer, PeerRole, RolePattern, allowed_roles};

/// A service that every server has beside its own, and that may be open to all who are let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OpenService {
    /// `grpc.health.v1.Health`.
    Health,
    /// `grpc.reflection`.
    Reflection,
}

impl OpenService {
    /// Which of them a path belongs to.
    fn of(path: &str) -> Option<Self> {
        let service = path.strip_prefix('/').unwrap_or(path);
        if service.starts_with("grpc.health.") {
            Some(Self::Health)
        } else if service.starts_with("grpc.reflection.") {
            Some(Self::Reflection)
        } else {
            None
        }
    }
}

/// How the table is read at one server.
#[derive(Clone, Debug, Default)]
pub struct DoorRules {
    open_services: Vec<OpenService>,
    pattern: RolePattern,
}

impl DoorRules {
    /// Rules of a server: which services are open to all who are let in, and how certificates state roles.
    #[must_use]
    pub fn new(open_services: Vec<OpenService>, pattern: RolePattern) -> Self {
        Self { open_services, pattern }
    }

    /// How certificates state roles.
    #[must_use]
    pub fn pattern(&self) -> &RolePattern {
        &self.pattern
    }

    /// Whether a peer may call a method, `/service/method`.
    ///
    /// A peer without a certificate, at a door where that is allowed, counts as a client: it may ask models, and API
    /// keys say who it is.
    ///
    /// # Errors
    /// `PERMISSION_DENIED`, with role, method and who may call it.
    pub fn check(&self, path: &str, peer: Peer) -> Result<(), KvistError> {
        let role = match peer {
            Peer::Unasked => return Ok(()),
            Peer::Anonymous => Some(PeerRole::Client),
            Peer::Certified(role) => role,
        };
        let allowed = match OpenService::of(path) {
            Some(service) if self.open_services.contains(&service) => return Ok(()),
            Some(_) => &[PeerRole::Operator],
            None => allowed_roles(path).unwrap_or_default(),
        };
        match role {
            Some(role) if allowed.contains(&role) => Ok(()),
            _ => Err(refusal(path, peer, role, allowed)),
        }
    }
}

fn refusal(path: &str, peer: Peer, role: Option<PeerRole>, allowed: &[PeerRole]) -> KvistError {
    let method = path.strip_prefix('/').unwrap_or(path);
    let who = match (peer, role) {
        (Peer::Anonymous, _) => "a caller without a certificate".to_owned(),
        (_, Some(role)) => format!("the role {}", role.name()),
        (_, None) => "a certificate that states no role of Kvist".to_owned(),
    };
    let names: Vec<_> = allowed.iter().map(|role| role.name()).collect();
    let advice = if names.is_empty() {
        "nobody may".to_owned()
    } else {
        format!("use a certificate of one of these roles: {}", names.join(", "))
    };
    KvistError::new(Code::PermissionDenied, format!("{who} may not call {method}; {advice}"))
        .with_metadata("role", role.map_or("none", PeerRole::name))
        .with_metadata("method", method)
        .with_metadata("allowed_roles", names.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    const APPLY: &str = "/kvist.controller.v1.ControllerService/Apply";

    fn certified(role: PeerRole) -> Peer {
        Peer::Certified(Some(role))
    }

    #[test]
    fn a_refusal_names_role_method_and_who_may() {
        let refused = DoorRules::default().check(APPLY, certified(PeerRole::Worker)).unwrap_err();
        assert_eq!(Code::PermissionDenied, refused.code);
        assert_eq!(
            "the role worker may not call kvist.controller.v1.ControllerService/Apply; use a certificate of one of \
             these roles: operator, controller",
            refused.message
        );
        let fact = |key: &str| refused.metadata.get(key).map(String::as_str);
        assert_eq!(
            [Some("worker"), Some("kvist.controller.v1.ControllerService/Apply"), Some("operator,controller")],
            ["role", "method", "allowed_roles"].map(fact)
        );
    }

    #[test]
    fn without_certificates_everything_is_open() {
        assert!(DoorRules::default().check(APPLY, Peer::Unasked).is_ok());
    }

    #[test]
    fn who_shows_no_certificate_may_ask_models_only() {
        let rules = DoorRules::default();
        assert!(rules.check("/kvist.router.v1.RouterService/Generate", Peer::Anonymous).is_ok());
        assert!(rules.check("/kvist.router.v1.RouterService/Explain", Peer::Anonymous).is_err());
        assert!(rules.check("/kvist.engine.v1.EngineService/Generate", Peer::Anonymous).is_err());
    }

    #[test]
    fn a_certificate_without_a_role_may_nothing() {
        let rules = DoorRules::default();
        for row in crate::table() {
            assert!(rules.check(&format!("/{}/{}", row.service, row.method), Peer::Certified(None)).is_err());
        }
    }

    #[test]
    fn a_method_that_the_table_does_not_know_is_closed_to_all() {
        for role in PeerRole::ALL {
            assert!(DoorRules::default().check("/kvist.router.v1.RouterService/New", certified(*role)).is_err());
            assert!(DoorRules::default().check("nonsense", certified(*role)).is_err());
        }
    }

    #[test]
    fn health_and_reflection_are_open_or_for_operators() {
        let health = "/grpc.health.v1.Health/Check";
        let reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
        let open = DoorRules::new(vec![OpenService::Health], RolePattern::default());
        for peer in [Peer::Anonymous, Peer::Certified(None), certified(PeerRole::Worker)] {
            assert!(open.check(health, peer).is_ok());
            assert!(open.check(reflection, peer).is_err());
        }
        assert!(open.check(reflection, certified(PeerRole::Operator)).is_ok());
    }
}
