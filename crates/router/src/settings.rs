//! What a router is started with.

use std::{path::PathBuf, time::Duration};

use kvist_doors::{ClientTlsSettings, DoorSettings};
use kvist_errors::{Code, KvistError};
use kvist_events::{BusSettings, EventsError};
use serde::Deserialize;

use crate::{
    routing::{AdmissionSettings, RoutingSettings},
    stages::StageLimits,
    upstream_settings::UpstreamSettings,
};

/// Settings of a router, as JSON.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterSettings {
    /// Name of the router, unique in the cluster; each request id begins with it.
    pub name: String,
    /// Where the HTTP edge listens, `host:port`.
    pub http_listen: String,
    /// Where the gRPC server listens, `host:port`.
    pub grpc_listen: String,
    /// The door of the HTTP edge.
    pub http_door: DoorSettings,
    /// The door of the gRPC server.
    pub grpc_door: DoorSettings,
    /// How workers and KV masters are called.
    pub tls: ClientTlsSettings,
    /// Where `/metrics`, `/livez` and `/readyz` are served, `host:port`.
    pub admin_listen: String,
    /// Where KV events come from; without it the router follows each worker's ledger itself.
    pub nats_url: Option<String>,
    /// `host:port` of KV masters, which a new index asks before it asks every worker.
    pub kvmasters: Vec<String>,
    /// File with NATS credentials; none for servers that ask for none or find them in the URL.
    pub nats_credentials_file: Option<PathBuf>,
    /// Authorities that sign the NATS servers' certificates, as PEM; without it the system's.
    pub nats_tls_ca_file: Option<PathBuf>,
    /// API keys, one a line: `name:sha256hex[:cache_salt]`. Without it everybody may ask.
    pub api_keys_file: Option<PathBuf>,
    /// Most bytes of the index.
    pub index_byte_budget_bytes: u64,
    /// Time a request may take when its client states none.
    pub default_deadline_ms: u64,
    /// Time from the placement of a request to its first token; 0 for no limit but the deadline.
    pub first_token_timeout_ms: u64,
    /// Time from a token to the next one; 0 for no limit but the deadline.
    pub token_timeout_ms: u64,
    /// Time for the body of a request, once its head has come.
    pub body_timeout_ms: u64,
    /// Time for which a client may take nothing of what is to be written to it, before its connection is closed, or its
    /// stream is ended where others on the same connection go on.
    pub write_timeout_ms: u64,
    /// After the start, requests wait until this time for the first target of their model instead of being refused:
    /// known workers are still being connected to.
    pub startup_wait_ms: u64,
    /// Origins whose pages may ask from a browser, `*` for all; none without any.
    pub cors_allowed_origins: Vec<String>,
    /// Largest HTTP body.
    pub body_limit_bytes: usize,
    /// Time without an event after which a stream gets a comment line.
    pub keep_alive_interval_ms: u64,
    /// Threads that tokenize long prompts; 0 for half of the processors.
    pub text_threads: usize,
    /// Decisions that `Explain` remembers.
    pub explained_requests: usize,
    /// Tokens that wait for a slow client, for each request; more end it.
    pub request_buffer_tokens: usize,
    /// OpenAI-compatible servers outside the mesh.
    pub upstreams: Vec<UpstreamSettings>,
    /// `host:port` of routers of other processes: this one is their edge and no router itself.
    pub remote_routers: Vec<String>,
    /// File with the API key by which they know it; none where they ask for none.
    pub remote_api_key_file: Option<PathBuf>,
    /// How targets are chosen for models that do not say it: `{preset, filters, scorers, picker}`.
    pub routing: RoutingSettings,
    /// Who may start at once, for models that do not say it: `"allow_all"` or `{concurrency: {...}}`.
    pub admission: AdmissionSettings,
}

impl Default for RouterSettings {
    fn default() -> Self {
        Self {
            name: "router".to_owned(),
            http_listen: "127.0.0.1:0".to_owned(),
            grpc_listen: "127.0.0.1:0".to_owned(),
            http_door: DoorSettings::default(),
            grpc_door: DoorSettings::default(),
            tls: ClientTlsSettings::default(),
            admin_listen: "127.0.0.1:0".to_owned(),
            nats_url: None,
            kvmasters: Vec::new(),
            nats_credentials_file: None,
            nats_tls_ca_file: None,
            api_keys_file: None,
            index_byte_budget_bytes: 256 * 1024 * 1024,
            default_deadline_ms: 600_000,
            first_token_timeout_ms: 300_000,
            token_timeout_ms: 120_000,
            body_timeout_ms: 60_000,
            write_timeout_ms: 30_000,
            startup_wait_ms: 5_000,
            cors_allowed_origins: Vec::new(),
            body_limit_bytes: 64 * 1024 * 1024,
            keep_alive_interval_ms: 10_000,
            text_threads: 0,
            explained_requests: 10_000,
            request_buffer_tokens: 16_384,
            upstreams: Vec::new(),
            remote_routers: Vec::new(),
            remote_api_key_file: None,
            routing: RoutingSettings::default(),
            admission: AdmissionSettings::default(),
        }
    }
}

impl RouterSettings {
    /// Reads settings from JSON.
    ///
    /// # Errors
    /// The JSON is wrong, a field is unknown, or a value makes no sense.
    pub fn from_json(json: &str) -> Result<Self, KvistError> {
        let settings: Self = serde_json::from_str(json)
            .map_err(|error| KvistError::new(Code::InvalidArgument, format!("router settings: {error}")))?;
        let is_name = !settings.name.is_empty()
            && settings.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        if !is_name {
            return Err(KvistError::field(Code::InvalidArgument, "name", "must be letters, digits, '-', '_' and '.'"));
        }
        for (field, value) in [
            ("default_deadline_ms", settings.default_deadline_ms),
            ("keep_alive_interval_ms", settings.keep_alive_interval_ms),
            ("body_timeout_ms", settings.body_timeout_ms),
            ("write_timeout_ms", settings.write_timeout_ms),
            ("body_limit_bytes", settings.body_limit_bytes as u64),
            ("request_buffer_tokens", settings.request_buffer_tokens as u64),
        ] {
            if value == 0 {
                return Err(KvistError::field(Code::InvalidArgument, field, "must be above 0"));
            }
        }
        UpstreamSettings::check(&settings.upstreams)?;
        Ok(settings)
    }

    /// How long the stages of a request may take.
    #[must_use]
    pub fn stage_limits(&self) -> StageLimits {
        let limit = |milliseconds: u64| (milliseconds > 0).then(|| Duration::from_millis(milliseconds));
        StageLimits { first_token: limit(self.first_token_timeout_ms), token: limit(self.token_timeout_ms) }
    }

    /// How to reach the bus, once the cluster's name is known; none without a bus.
    #[must_use]
    pub fn bus(&self) -> Option<BusSettings> {
        let mut bus = BusSettings::new(self.nats_url.clone()?, "");
        bus.client_name = format!("kvist-router-{}", self.name);
        bus.credentials_file.clone_from(&self.nats_credentials_file);
        bus.tls_ca_file.clone_from(&self.nats_tls_ca_file);
        Some(bus)
    }

    /// Sees to it that the bus could be connected to. The feed begins with the first cluster state only, and people
    /// should hear of a wrong file before that.
    ///
    /// # Errors
    /// Which setting is wrong, and why.
    pub fn check_bus(&self) -> Result<(), KvistError> {
        let Some(bus) = self.bus() else { return Ok(()) };
        bus.check().map_err(|error| match error {
            EventsError::File { field, reason } => {
                KvistError::field(Code::InvalidArgument, format!("nats_{field}"), reason)
            }
            error => KvistError::field(Code::InvalidArgument, "nats_url", error.to_string()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_say_what_is_wrong() {
        assert_eq!("r1", RouterSettings::from_json(r#"{"name":"r1"}"#).unwrap().name);
        for (json, word) in [
            (r#"{"nam":"r1"}"#, "nam"),
            (r#"{"name":"a b"}"#, "name"),
            (r#"{"default_deadline_ms":0}"#, "default_deadline_ms"),
            (r#"{"routing":{"picker":{"algorithm":"round_robin"}}}"#, "unknown picker \"round_robin\""),
            (r#"{"routing":{"scorer":{"algorithm":"nosuch"}}}"#, "kv_least_loaded, least_loaded"),
            (r#"{"admission":"nosuch"}"#, "allow_all"),
        ] {
            assert!(RouterSettings::from_json(json).unwrap_err().message.contains(word));
        }
    }
}
