//! What the simulated engine does for requests that are divided between a prefill and a decode engine.
//!
//! Parameters are those of vLLM's pulling connectors, so that a router need not know which engine it speaks to:
//! `do_remote_decode` asks a prefill engine to keep its blocks, and `do_remote_prefill` with what it then said asks a
//! decode engine to fetch them.

use std::{
    collections::{BTreeMap, HashMap},
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use kvist_blocks::BlockHash;
use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::KvTransferParameters;
use kvist_twin::{SimRequest, SimTransfer};
use prost_types::{Struct, Value, value::Kind};
use tokio::{net::TcpListener, time::Instant};
use tokio_util::task::AbortOnDropHandle;

use super::{
    Shared, State,
    transfer::{Origin, fetch, serve},
};
use crate::{HandOverSettings, TransferFailurePolicy, sim::SimWorkerSettings};

/// What the mesh asks of the engine for one request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// Keep the prompt's blocks under this lease.
    Keep(String),
    /// Fetch the prompt's blocks from there.
    Fetch(Origin),
}

/// A lease that was given.
#[derive(Debug)]
struct Lease {
    /// The request that computed the blocks.
    id: u64,
    blocks: Vec<BlockHash>,
    _expiry: AbortOnDropHandle<()>,
}

/// The leases of a prefill engine.
#[derive(Debug, Default)]
pub(super) struct Leases {
    /// Names this start of the engine: a lease of an earlier one is not found.
    engine: String,
    /// Where decode engines come; none before the start, and for an engine that keeps nothing.
    address: Option<SocketAddr>,
    given: HashMap<String, Lease>,
    pub(super) expired: u64,
}

/// Listens for decode engines, until the engine is closed. On loopback alone: what comes in is not authenticated.
pub(super) fn listen(shared: &Arc<Shared>, settings: &SimWorkerSettings) -> Result<(), KvistError> {
    let cannot = |error: std::io::Error| {
        KvistError::new(Code::EngineFailed, format!("the simulated hand-over cannot listen: {error}"))
    };
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(cannot)?;
    listener.set_nonblocking(true).map_err(cannot)?;
    let listener = TcpListener::from_std(listener).map_err(cannot)?;
    let address = listener.local_addr().map_err(cannot)?;
    let engine = format!("sim-{}-{}", std::process::id(), address.port());
    {
        let mut state = shared.state.lock();
        state.leases.engine.clone_from(&engine);
        state.leases.address = Some(address);
    }
    let (finding, ending) = (Arc::downgrade(shared), Arc::downgrade(shared));
    let find = move |lease: &str| {
        let shared = finding.upgrade()?;
        let state = shared.state.lock();
        state.leases.given.get(lease).map(|lease| lease.blocks.clone())
    };
    let done = move |lease: &str| {
        if let Some(shared) = ending.upgrade() {
            release(&shared, lease);
        }
    };
    let serving = serve(listener, engine, settings.transfer_fault, find, done);
    shared.state.lock().serving = Some(AbortOnDropHandle::new(tokio::spawn(serving)));
    Ok(())
}

/// Reads what the mesh asks; none for nothing.
pub(super) fn read(parameters: &KvTransferParameters) -> Result<Option<Asked>, KvistError> {
    let invalid = |name: &str, what: &str| {
        let field = format!("kv_transfer.parameters.{name}");
        KvistError::field(Code::InvalidArgument, field, what).before_start()
    };
    let Some(fields) = parameters.parameters.as_ref().map(|parameters| &parameters.fields) else { return Ok(None) };
    let is_set =
        |name: &str| matches!(fields.get(name).and_then(|value| value.kind.as_ref()), Some(Kind::BoolValue(true)));
    let text = |name: &str| match fields.get(name).and_then(|value| value.kind.as_ref()) {
        Some(Kind::StringValue(text)) => Ok(text.as_str()),
        _ => Err(invalid(name, "must be a text")),
    };
    if is_set("do_remote_decode") {
        if parameters.lease_id.is_empty() {
            return Err(KvistError::field(Code::InvalidArgument, "kv_transfer.lease_id", "is missing").before_start());
        }
        return Ok(Some(Asked::Keep(parameters.lease_id.clone())));
    }
    if !is_set("do_remote_prefill") {
        return Ok(None);
    }
    let port = match fields.get("remote_port").and_then(|value| value.kind.as_ref()) {
        Some(Kind::NumberValue(port)) if (1.0..65_536.0).contains(port) => *port as u16,
        _ => return Err(invalid("remote_port", "must be a port")),
    };
    let host = text("remote_host")?.parse().map_err(|_| invalid("remote_host", "must be an address"))?;
    Ok(Some(Asked::Fetch(Origin {
        address: SocketAddr::new(host, port),
        engine: text("remote_engine_id")?.to_owned(),
        lease: text("remote_request_id")?.to_owned(),
    })))
}

/// A prompt is computed and its blocks are kept: gives the lease, and says where they can be fetched.
pub(super) fn give(
    shared: &Arc<Shared>,
    state: &mut State,
    id: u64,
    lease_id: String,
    blocks: &[BlockHash],
    settings: &HandOverSettings,
) -> Option<KvTransferParameters> {
    let address = state.leases.address?;
    let parameters = parameters(&state.leases.engine, address, &lease_id, blocks);
    let (weak, name) = (Arc::downgrade(shared), lease_id.clone());
    let expires_at = Instant::now() + settings.lease();
    let expiry = tokio::spawn(async move {
        tokio::time::sleep_until(expires_at).await;
        if let Some(shared) = weak.upgrade() {
            expire(&shared, &name);
        }
    });
    let lease = Lease { id, blocks: blocks.to_vec(), _expiry: AbortOnDropHandle::new(expiry) };
    if let Some(earlier) = state.leases.given.insert(lease_id.clone(), lease) {
        state.engine.release(earlier.id);
    }
    Some(KvTransferParameters { connector: settings.connector.clone(), lease_id, parameters: Some(parameters) })
}

fn parameters(engine: &str, address: SocketAddr, lease_id: &str, blocks: &[BlockHash]) -> Struct {
    let text = |text: &str| Kind::StringValue(text.to_owned());
    let list = |values: Vec<Value>| Kind::ListValue(prost_types::ListValue { values });
    let value = |kind| Value { kind: Some(kind) };
    // A number of 64 bits has no place in JSON: the lower half names a block well enough for people.
    let ids = blocks.iter().map(|block| value(Kind::NumberValue(f64::from(block.0 as u32)))).collect();
    let fields: BTreeMap<String, Value> = [
        ("do_remote_prefill", Kind::BoolValue(true)),
        ("do_remote_decode", Kind::BoolValue(false)),
        ("remote_engine_id", text(engine)),
        ("remote_request_id", text(lease_id)),
        ("remote_host", text(&address.ip().to_string())),
        ("remote_port", Kind::NumberValue(address.port().into())),
        ("remote_block_ids", list(vec![value(list(ids))])),
    ]
    .into_iter()
    .map(|(name, kind)| (name.to_owned(), value(kind)))
    .collect();
    Struct { fields }
}

/// Frees what is kept under a lease. An unknown one may be that of a request that still runs: it will get none.
pub(super) fn release(shared: &Shared, lease_id: &str) {
    let mut state = shared.state.lock();
    match state.leases.given.remove(lease_id) {
        Some(lease) => state.engine.release(lease.id),
        None => {
            let running = state.jobs.iter_mut().find(|(_, job)| job.lease.as_deref() == Some(lease_id));
            let Some((id, job)) = running else { return };
            job.lease = None;
            let id = *id;
            state.engine.release(id);
        }
    }
    tell_load(&mut state);
    drop(state);
    // Whoever waits for blocks may have some now.
    shared.has_work.notify_one();
}

fn expire(shared: &Shared, lease_id: &str) {
    {
        let mut state = shared.state.lock();
        if !state.leases.given.contains_key(lease_id) {
            return;
        }
        state.leases.expired += 1;
    }
    tracing::info!(lease_id, "hand_over_lease_expired");
    release(shared, lease_id);
}

/// Reports what an idle engine would say only after its next step.
pub(super) fn tell_load(state: &mut State) {
    let counters = state.engine.counters();
    state.load.pinned_blocks = counters.pinned_blocks as u64;
    state.load.used_blocks = counters.used_blocks as u64;
    state.load.expired_leases_total = state.leases.expired;
    state.load.failed_transfers_total = state.failed_transfers;
    if let Some(host) = &state.host {
        host.report_load(state.load);
    }
}

/// A request that waits for its KV.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) request: SimRequest,
    _fetching: AbortOnDropHandle<()>,
}

/// Fetches a request's blocks and then lets it in.
pub(super) fn begin_fetch(
    shared: &Arc<Shared>,
    origin: Origin,
    request: SimRequest,
    settings: (&SimWorkerSettings, &HandOverSettings),
) -> Arrival {
    let (id, weak) = (request.id, Arc::downgrade(shared));
    let limit = Duration::from_millis(settings.0.transfer_timeout_ms).min(settings.1.lease());
    let (rate, policy) = (settings.0.transfer_tokens_per_second, settings.1.on_failure);
    let tokens = request.prompt.len() as f64;
    let fetching = tokio::spawn(async move {
        let mut fetched = fetch(&origin, limit).await;
        if rate > 0.0 && fetched.is_ok() {
            tokio::time::sleep(Duration::try_from_secs_f64(tokens / rate).unwrap_or_default()).await;
        }
        let Some(shared) = weak.upgrade() else { return };
        let mut state = shared.state.lock();
        let Some(job) = state.jobs.get_mut(&id) else { return };
        let Some(arrival) = job.arrival.take() else { return };
        // Blocks are names of content: what is not of this prompt is told from what is, and is never used.
        if let Ok(blocks) = &fetched
            && !job.usable.starts_with(blocks)
        {
            fetched = Err("the blocks are those of another prompt".to_owned());
        }
        let external_tokens = match &fetched {
            Ok(blocks) => blocks.len() * shared.block_size,
            Err(reason) => {
                tracing::warn!(reason, lease_id = origin.lease, ?policy, "kv_transfer_failed");
                state.failed_transfers += 1;
                0
            }
        };
        if fetched.is_err() && policy == TransferFailurePolicy::Fail {
            let error = KvistError::new(Code::KvTransferFailed, "the prompt's KV did not arrive at the decode engine");
            if let Some(job) = state.remove(id) {
                state.note_end(&job, error.code.name());
                job.sink.failed(&error.before_start());
            }
        } else {
            let transfer = SimTransfer { external_tokens, keeps_blocks: false };
            state.engine.submit_with(shared.started.elapsed(), arrival.request, transfer);
        }
        tell_load(&mut state);
        drop(state);
        shared.has_work.notify_one();
    });
    Arrival { request, _fetching: AbortOnDropHandle::new(fetching) }
}
