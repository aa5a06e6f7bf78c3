//! Connections to workers, agents and KV masters for histories.

use std::time::Duration;

use kvist_doors::{ClientTls, PeerRole};
use kvist_proto::agent::v1::agent_service_client::AgentServiceClient;
use kvist_proto::engine::v1::engine_service_client::EngineServiceClient;
use kvist_proto::kvmaster::v1::kv_master_service_client::KvMasterServiceClient;
use rand::Rng as _;
use tonic::transport::{Channel, Endpoint};

use crate::EventsError;

const CONNECT_TIME_LIMIT: Duration = Duration::from_secs(2);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_TIME_LIMIT: Duration = Duration::from_secs(3);
/// One batch can be large; the ledger's writer bounds it, not we.
const MOST_MESSAGE_BYTES: usize = 64 * 1024 * 1024;

/// A client of the worker at an address; connects at the first call.
pub(crate) fn client(
    worker_uid: &str,
    address: &str,
    tls: Option<&ClientTls>,
) -> Result<EngineServiceClient<Channel>, EventsError> {
    let channel = channel(worker_uid, address, PeerRole::Worker, tls)?;
    Ok(EngineServiceClient::new(channel).max_decoding_message_size(MOST_MESSAGE_BYTES))
}

/// A client of the agent at an address that has attached an engine; connects at the first call.
pub(crate) fn agent_client(
    worker_uid: &str,
    address: &str,
    tls: Option<&ClientTls>,
) -> Result<AgentServiceClient<Channel>, EventsError> {
    let channel = channel(worker_uid, address, PeerRole::Agent, tls)?;
    Ok(AgentServiceClient::new(channel).max_decoding_message_size(MOST_MESSAGE_BYTES))
}

/// A client of the KV master at an address; connects at the first call.
pub(crate) fn kvmaster_client(
    address: &str,
    tls: Option<&ClientTls>,
) -> Result<KvMasterServiceClient<Channel>, EventsError> {
    let channel = channel("kvmaster", address, PeerRole::KvMaster, tls)?;
    Ok(KvMasterServiceClient::new(channel).max_decoding_message_size(MOST_MESSAGE_BYTES))
}

fn channel(name: &str, address: &str, role: PeerRole, tls: Option<&ClientTls>) -> Result<Channel, EventsError> {
    let adjust = |endpoint: Endpoint| {
        endpoint
            .connect_timeout(CONNECT_TIME_LIMIT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIME_LIMIT)
            .keep_alive_while_idle(true)
    };
    ClientTls::channel(tls, address, role, adjust).map_err(|_| EventsError::Address(name.to_owned()))
}

/// Time before attempt `attempt` (1 for the first retry): doubling up to a bound, half of it random, so that many
/// that lost the same peer do not return together.
pub(crate) fn retry_delay(
    attempt: u32,
    shortest: Duration,
    longest: Duration,
    rng: &mut impl rand::RngCore,
) -> Duration {
    let delay = shortest.saturating_mul(1 << attempt.saturating_sub(1).min(16)).min(longest);
    delay.mul_f64(rng.random_range(0.5..=1.0))
}
