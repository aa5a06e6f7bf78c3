//! The one table of who may call what. Rust and Python servers read it; `docs/concepts/security.md` explains it.

use serde::Serialize;

use crate::PeerRole::{self, Agent, Client, Controller, KvMaster, Operator, Router};

/// Those who may ask models: people and programs, who are clients, and a router in front of others.
const ASK: &[PeerRole] = &[Client, Router, Operator];
/// What shows all that a router or a mesh does, to those who run it.
const WATCH: &[PeerRole] = &[Operator];
/// What changes the mesh.
const CHANGE: &[PeerRole] = &[Operator];
/// Those who look after workers.
const LOOK_AFTER: &[PeerRole] = &[Controller, Operator];
/// Those who read ledgers.
const READ_LEDGERS: &[PeerRole] = &[Agent, Router, KvMaster, Operator];

/// Who may ask a controller for what its leader decides: controllers pass such calls on, and have checked who calls.
const OPERATE_THROUGH_ANY: &[PeerRole] = &[Operator, Controller];

type Methods = &'static [(&'static str, &'static [PeerRole])];

const TABLE: &[(&str, Methods)] = &[
    (
        "kvist.router.v1.RouterService",
        &[
            ("Generate", ASK),
            ("Embed", ASK),
            ("Tokenize", ASK),
            ("Detokenize", ASK),
            ("ListModels", ASK),
            ("Select", ASK),
            ("Release", ASK),
            ("Explain", WATCH),
            ("WatchDecisions", WATCH),
            ("ListSources", WATCH),
            ("ListTargets", WATCH),
        ],
    ),
    (
        "kvist.engine.v1.EngineService",
        &[
            ("Describe", &[Router, Agent, Controller, KvMaster, Operator]),
            ("GetTokenizer", &[Router, Operator]),
            ("Connect", &[Router]),
            ("PutPrompt", &[Router]),
            ("GetResult", &[Router]),
            // For people; a client asks a router.
            ("Generate", CHANGE),
            ("Embed", CHANGE),
            ("Abort", &[Router, Operator]),
            ("WatchKvEvents", READ_LEDGERS),
            ("WatchLoad", &[Router, Agent, Controller, Operator]),
            ("Drain", &[Agent, Operator]),
            ("ResetCache", &[Agent, Operator]),
            ("LoadAdapter", &[Agent, Operator]),
            ("UnloadAdapter", &[Agent, Operator]),
            ("StartProfile", CHANGE),
            ("StopProfile", CHANGE),
        ],
    ),
    (
        "kvist.agent.v1.AgentService",
        &[
            ("StartWorker", LOOK_AFTER),
            ("StopWorker", LOOK_AFTER),
            ("ListWorkers", LOOK_AFTER),
            ("WatchWorkers", LOOK_AFTER),
            ("ReadWorkerLog", LOOK_AFTER),
            ("WatchKvEvents", &[Router, KvMaster, Operator]),
            ("Audit", &[KvMaster, Controller, Operator]),
            ("GetNode", LOOK_AFTER),
            ("FetchArtifact", LOOK_AFTER),
        ],
    ),
    (
        "kvist.controller.v1.ControllerService",
        &[
            ("Apply", OPERATE_THROUGH_ANY),
            ("Get", WATCH),
            ("List", WATCH),
            ("Delete", OPERATE_THROUGH_ANY),
            ("Watch", WATCH),
            ("Register", &[Agent, Controller]),
            ("WatchCluster", &[Router, KvMaster, Operator]),
            ("ListNodes", OPERATE_THROUGH_ANY),
        ],
    ),
    (
        "kvist.kvmaster.v1.KvMasterService",
        &[
            ("Lookup", &[Router, Operator]),
            ("Bootstrap", &[Router, KvMaster, Operator]),
            ("WatchSources", WATCH),
            ("Stats", WATCH),
            ("PutPrefix", CHANGE),
            ("ListPrefixes", &[Router, KvMaster, Operator]),
            ("DeletePrefix", CHANGE),
        ],
    ),
];

/// One line of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TableRow {
    /// Fully qualified, such as `kvist.router.v1.RouterService`.
    pub service: &'static str,
    /// Name within the service.
    pub method: &'static str,
    /// Who may call it.
    pub roles: &'static [PeerRole],
}

/// Every line.
pub fn table() -> impl Iterator<Item = TableRow> {
    TABLE
        .iter()
        .flat_map(|(service, methods)| methods.iter().map(|(method, roles)| TableRow { service, method, roles }))
}

/// Who may call a method, `/service/method`; none when the table does not know it.
#[must_use]
pub fn allowed_roles(path: &str) -> Option<&'static [PeerRole]> {
    let (service, method) = path.strip_prefix('/').unwrap_or(path).split_once('/')?;
    let (_, methods) = TABLE.iter().find(|(name, _)| *name == service)?;
    methods.iter().find(|(name, _)| *name == method).map(|(_, roles)| *roles)
}

/// Methods that are called for requests of clients, as often as those come.
const OF_REQUESTS: &[(&str, &[&str])] = &[
    ("kvist.router.v1.RouterService", &["Generate", "Embed", "Tokenize", "Detokenize", "Select", "Release"]),
    ("kvist.engine.v1.EngineService", &["Connect", "PutPrompt", "GetResult", "Generate", "Embed", "Abort"]),
];

/// What a call of a path is counted as where callers are paced; none for one that is not.
///
/// A method that the table does not know is not there, and costs nothing.
pub(crate) fn paced_method(path: &str) -> Option<&'static str> {
    let (service, method) = path.strip_prefix('/').unwrap_or(path).split_once('/')?;
    if service.starts_with("grpc.health.") {
        return Some("grpc.health");
    }
    if service.starts_with("grpc.reflection.") {
        return Some("grpc.reflection");
    }
    let is_of_requests = OF_REQUESTS.iter().any(|(name, methods)| *name == service && methods.contains(&method));
    if is_of_requests {
        return None;
    }
    table().find(|row| row.service == service && row.method == method).map(|row| row.method)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_of_requests_are_methods_and_all_others_are_paced() {
        for (service, methods) in OF_REQUESTS {
            for method in *methods {
                assert!(table().any(|row| row.service == *service && row.method == *method), "{service}/{method}");
            }
        }
        let paced = table().filter(|row| paced_method(&format!("/{}/{}", row.service, row.method)).is_some());
        let of_requests: usize = OF_REQUESTS.iter().map(|(_, methods)| methods.len()).sum();
        assert_eq!(table().count() - of_requests, paced.count());
        assert_eq!(None, paced_method("/kvist.router.v1.RouterService/New"));
        assert_eq!(None, paced_method("nonsense"));
    }
}
