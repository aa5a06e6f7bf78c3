//! What a router does beside requests, once a second: leases end, keys are read again, gauges are set.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use kvist_index::SourceState;
use kvist_link::LinkState;
use kvist_proto::events::v1 as wire;

use crate::{
    core::RouterCore,
    explain::state_to_wire,
    keys::ApiKeys,
    metrics::{StateLabel, TargetLabel},
};

/// Seconds between two sweeps of the index.
const SECONDS_A_SWEEP: u64 = 10;

/// How much time passes between two parts of a scrub.
const SCRUB_TICK: Duration = Duration::from_secs(1);

/// Runs until the router is stopped.
pub async fn maintain(core: Arc<RouterCore>, keys: Arc<ApiKeys>) {
    let mut tick = tokio::time::interval(SCRUB_TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for second in 0u64.. {
        tokio::select! {
            () = core.stopped.cancelled() => return,
            _ = tick.tick() => {}
        }
        core.leases.expire(Instant::now());
        match keys.reload_if_changed() {
            Ok(false) => {}
            Ok(true) => tracing::info!("api_keys_reloaded"),
            Err(error) => tracing::error!(%error, "api_keys_not_reloaded"),
        }
        set_gauges(&core);
        for found in core.index().scrub(SCRUB_TICK) {
            tracing::error!(
                worker = %found.source.worker,
                rank = found.source.rank.0,
                incarnation = found.incarnation.0,
                blocks = found.blocks,
                "index_source_diverged"
            );
        }
        if second % SECONDS_A_SWEEP == 0 {
            let index = Arc::clone(core.index());
            // Walks the whole map.
            let _ = tokio::task::spawn_blocking(move || index.collect_garbage()).await;
        }
    }
}

#[expect(clippy::cast_precision_loss, clippy::cast_possible_wrap, reason = "gauges for people")]
fn set_gauges(core: &RouterCore) {
    let view = core.view();
    let metrics = &core.metrics;
    let mut targets: HashMap<&'static str, i64> = HashMap::from([("ready", 0)]);
    let (mut connected, mut promised) = (0, 0);
    for node in view.workers.values() {
        *targets.entry(node.excluded().unwrap_or("ready")).or_default() += i64::from(node.ranks());
        let state = node.connection.as_ref().map(|connection| connection.link.state());
        connected += i64::from(state == Some(LinkState::Connected));
        for rank in 0..node.ranks() {
            promised += core.selector.promise(&node.target_id(rank)).tokens;
        }
    }
    metrics.targets.clear();
    for (state, count) in targets {
        metrics.targets.get_or_create(&TargetLabel { state: state.to_owned() }).set(count);
    }
    metrics.links_connected.set(connected);
    metrics.promised_tokens.set(promised as i64);
    metrics.reservations.set(core.open_reservations() as i64);
    if let (Some(metrics), Some(stats)) = (&core.feed_metrics, core.feed_stats()) {
        metrics.take(&stats);
    }
    let sources = core.index().sources();
    for state in
        [SourceState::Exact, SourceState::CatchingUp, SourceState::Partial, SourceState::Truncated, SourceState::Stale]
    {
        let count = sources.iter().filter(|source| source.state == state).count();
        metrics.index_sources.get_or_create(&StateLabel { state: state_word(state) }).set(count as i64);
    }
    let memory = core.index().memory();
    metrics.index_blocks.set(memory.blocks as i64);
    metrics.index_bytes.set(memory.bytes as i64);
    metrics.index_byte_budget.set(memory.byte_budget as i64);
    metrics.index_divergence_blocks.set(sources.iter().map(|source| source.divergent_blocks as i64).sum());
    let exact = sources.iter().filter(|source| source.state.is_exact()).count();
    let share = if sources.is_empty() { 1.0 } else { exact as f64 / sources.len() as f64 };
    let predicted = metrics.predicted_cached_tokens.get();
    let delivered = metrics.delivered_cached_tokens.get();
    let kept = if predicted == 0 { 1.0 } else { (delivered as f64 / predicted as f64).min(1.0) };
    metrics.kv_awareness.set(share * kept);
}

fn state_word(state: SourceState) -> String {
    let name = wire::SourceState::as_str_name(&state_to_wire(state));
    name.trim_start_matches("SOURCE_STATE_").to_ascii_lowercase()
}
