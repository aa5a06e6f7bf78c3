//! Connections to workers, agents and KV masters for histories.

use std::time::Duration;

use kvist_proto::agent::v1::agent_service_client::AgentServiceClient;
use kvist_proto::engine::v1::engine_service_client::EngineServiceClient;
use kvist_proto::kvmaster::v1::kv_master_service_client::KvMasterServiceClient;
use rand::Rng as _;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};

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
    tls: Option<&ClientTlsConfig>,
) -> Result<EngineServiceClient<Channel>, EventsError> {
    let channel = channel(worker_uid, address, tls)?;
    Ok(EngineServiceClient::new(channel).max_decoding_message_size(MOST_MESSAGE_BYTES))
}

/// A client of the agent at an address that has attached an engine; connects at the first call.
pub(crate) fn agent_client(
    worker_uid: &str,
    address: &str,
    tls: Option<&ClientTlsConfig>,
) -> Result<AgentServiceClient<Channel>, EventsError> {
    let channel = channel(worker_uid, address, tls)?;
    Ok(AgentServiceClient::new(channel).max_decoding_message_size(MOST_MESSAGE_BYTES))
}

/// A client of the KV master at an address; connects at the first call.
pub(crate) fn kvmaster_client(
    address: &str,
    tls: Option<&ClientTlsConfig>,
) -> Result<KvMasterServiceClient<Channel>, EventsError> {
    let channel = channel("kvmaster", address, tls)?;
    Ok(KvMasterServiceClient::new(channel).max_decoding_message_size(MOST_MESSAGE_BYTES))
}

fn channel(name: &str, address: &str, tls: Option<&ClientTlsConfig>) -> Result<Channel, EventsError> {
    let wrong = |_| EventsError::Address(name.to_owned());
    let scheme = if tls.is_some() { "https" } else { "http" };
    let url = if address.contains("://") { address.to_owned() } else { format!("{scheme}://{address}") };
    let mut endpoint = Endpoint::from_shared(url)
        .map_err(wrong)?
        .connect_timeout(CONNECT_TIME_LIMIT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIME_LIMIT)
        .keep_alive_while_idle(true);
    if let Some(tls) = tls {
        endpoint = endpoint.tls_config(tls.clone()).map_err(wrong)?;
    }
    Ok(endpoint.connect_lazy())
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
