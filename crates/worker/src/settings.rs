//! What a worker is told at its start.

use std::{net::SocketAddr, path::Path};

use kvist_doors::DoorSettings;
use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::Role;
use serde::{Deserialize, Deserializer, de::Error as _};

use crate::{HandOverSettings, SimWorkerSettings};

/// Where the system lists its devices for remote direct memory access.
const RDMA_DEVICES: &str = "/sys/class/infiniband";

/// Settings of a worker, as JSON.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkerSettings {
    /// UID of the slot: lower-case letters, digits and `-`.
    pub worker_uid: String,
    /// Name of the served model.
    pub model: String,
    /// Namespace of block hashes; the model's name when empty.
    pub namespace: String,
    /// UID of the pool; empty outside a cluster.
    pub pool_uid: String,
    /// Generation of the pool's contract.
    pub pool_revision: String,
    /// Role of the pool: its name, such as `aggregate`, or its number in the protocol.
    #[serde(deserialize_with = "role")]
    pub role: Role,
    /// Seed of the cluster's block hashes.
    pub hash_seed: u64,
    /// `host:port` of the gRPC server; port 0 takes a free one.
    pub grpc_listen: String,
    /// The door of the gRPC server.
    pub door: DoorSettings,
    /// `host:port` of the admin server; port 0 takes a free one.
    pub admin_listen: String,
    /// The incarnation is larger than this.
    pub incarnation_floor: u64,
    /// Batches that each ledger's ring holds.
    pub ring_batches: usize,
    /// Milliseconds between digests of a ledger.
    pub digest_interval_ms: u64,
    /// Milliseconds that running requests may take when draining.
    pub drain_time_limit_ms: u64,
    /// Tokens that a caller of `Generate` may leave unread.
    pub generate_buffer_tokens: usize,
    /// Which engine: `sim` is built in, others are given by the caller.
    pub engine: String,
    /// Arguments of an engine of the core that is not the simulated one, which checks them.
    pub engine_arguments: serde_json::Value,
    /// How KV is handed over between engines; none for a worker that computes prompts and answers alone.
    pub hand_over: Option<HandOverSettings>,
    /// Settings of the simulated engine.
    pub sim: SimWorkerSettings,
}

impl Default for WorkerSettings {
    fn default() -> Self {
        Self {
            worker_uid: "worker-0".to_owned(),
            model: "sim".to_owned(),
            namespace: String::new(),
            pool_uid: String::new(),
            pool_revision: String::new(),
            role: Role::Aggregate,
            hash_seed: 0,
            grpc_listen: "127.0.0.1:0".to_owned(),
            door: DoorSettings::default(),
            admin_listen: "127.0.0.1:0".to_owned(),
            incarnation_floor: 0,
            ring_batches: 16_384,
            digest_interval_ms: 2_000,
            drain_time_limit_ms: 30_000,
            generate_buffer_tokens: 65_536,
            engine: "sim".to_owned(),
            engine_arguments: serde_json::Value::Null,
            hand_over: None,
            sim: SimWorkerSettings::default(),
        }
    }
}

impl WorkerSettings {
    /// Reads settings.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` with what is wrong.
    pub fn from_json(json: &str) -> Result<Self, KvistError> {
        let settings: Self = serde_json::from_str(json)
            .map_err(|error| KvistError::field(Code::InvalidArgument, "settings", error.to_string()))?;
        let is_uid = |uid: &str| {
            !uid.is_empty()
                && uid.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        };
        if !is_uid(&settings.worker_uid) {
            let description = "must be lower-case letters, digits and `-`";
            return Err(KvistError::field(Code::InvalidArgument, "worker_uid", description));
        }
        if settings.model.is_empty() {
            return Err(KvistError::field(Code::InvalidArgument, "model", "must not be empty"));
        }
        Ok(settings)
    }

    /// Looks for what the machine must have, before an engine is loaded or a socket opened.
    ///
    /// # Errors
    /// `PRECONDITION_FAILED` with what is missing.
    pub fn check_machine(&self) -> Result<(), KvistError> {
        self.hand_over.as_ref().map_or(Ok(()), |hand_over| hand_over.check(Path::new(RDMA_DEVICES)))
    }

    /// The namespace of block hashes.
    #[must_use]
    pub fn effective_namespace(&self) -> &str {
        if self.namespace.is_empty() { &self.model } else { &self.namespace }
    }
}

pub(crate) fn listen_address(field: &str, address: &str) -> Result<SocketAddr, KvistError> {
    address
        .parse()
        .map_err(|_| KvistError::field(Code::InvalidArgument, field, "must be host:port with a numeric host"))
}

fn role<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Role, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        Number(i32),
        Name(String),
    }
    let known = "aggregate, encoder, prefill or decode";
    match Form::deserialize(deserializer)? {
        Form::Number(number) => Role::try_from(number).map_err(|_| D::Error::custom(format!("role must be {known}"))),
        Form::Name(name) => {
            let name = format!("ROLE_{}", name.trim_start_matches("ROLE_").to_uppercase());
            Role::from_str_name(&name).ok_or_else(|| D::Error::custom(format!("role must be {known}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_defaults_and_refuse_what_they_do_not_know() {
        let settings = WorkerSettings::from_json(r#"{"model":"m","role":"decode","sim":{"blocks":7}}"#).unwrap();
        assert_eq!(("m", Role::Decode, 7), (settings.effective_namespace(), settings.role, settings.sim.blocks));
        assert_eq!(Role::Prefill, WorkerSettings::from_json(r#"{"role":3}"#).unwrap().role);
        for wrong in [r#"{"modle":"m"}"#, r#"{"role":"cook"}"#, r#"{"worker_uid":"A"}"#, r#"{"model":""}"#] {
            assert_eq!(Code::InvalidArgument, WorkerSettings::from_json(wrong).unwrap_err().code, "{wrong}");
        }
    }
}
