//! What a router does beside requests, once a second: leases end, a held state is looked at, listeners are looked after,
//! gauges are set.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use kvist_blocks::{Rank, SourceKey};
use kvist_events::care_for_index;
use kvist_index::{SourceState, SourceStatus};
use kvist_link::LinkState;
use kvist_proto::events::v1 as wire;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    awareness::SourceCount,
    cluster::{ClusterView, ModelView},
    core::RouterCore,
    explain::state_to_wire,
    listeners::Listeners,
    metrics::{ModelLabel, StateLabel, TargetLabel},
};

/// How often a router looks after itself.
const INTERVAL: Duration = Duration::from_secs(1);

/// Runs until the router is stopped.
pub async fn maintain(core: Arc<RouterCore>, listeners: Listeners) {
    let _caring = AbortOnDropHandle::new(tokio::spawn(care_for_index(Arc::clone(core.index()))));
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = core.stopped.cancelled() => return,
            _ = tick.tick() => {}
        }
        core.leases.expire(Instant::now());
        core.review_held_state();
        set_gauges(&core);
        listeners.look_after();
    }
}

#[expect(clippy::cast_possible_wrap, reason = "gauges for people")]
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
    let (mut closed, mut open, mut half_open, mut refused) = (0, 0, 0, 0);
    metrics.queued_requests.clear();
    for model in view.models_by_name() {
        let label = ModelLabel { model: model.name.to_string() };
        metrics.queued_requests.get_or_create(&label).set(model.state.door.counts().1 as i64);
        model.state.health.count(&mut closed, &mut open, &mut half_open);
        refused += i64::from(model.state.has_refused());
    }
    for (state, count) in [("closed", closed), ("open", open), ("half_open", half_open)] {
        metrics.breakers.get_or_create(&StateLabel { state: state.to_owned() }).set(count);
    }
    metrics.refused_policies.set(refused);
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
    metrics.index_recent_bytes.set(core.selector.recent_bytes() as i64);
    metrics.index_byte_budget.set(memory.byte_budget as i64);
    metrics.index_divergence_blocks.set(sources.iter().map(|source| source.divergent_blocks as i64).sum());
    judge_awareness(core, &view, &sources);
}

/// Says of each model whether its caches are known, wherever somebody may look.
fn judge_awareness(core: &RouterCore, view: &ClusterView, sources: &[SourceStatus]) {
    let exact: HashSet<&SourceKey> =
        sources.iter().filter(|source| source.state.is_exact()).map(|source| &source.source).collect();
    let count = |model: &ModelView| {
        let usable = model.workers.iter().filter(|node| node.excluded().is_none());
        usable.fold(SourceCount::default(), |count, node| {
            let key = |rank| SourceKey { worker: node.uid.clone(), rank: Rank(rank) };
            let known = (0..node.ranks()).filter(|rank| exact.contains(&key(*rank))).count();
            SourceCount { all: count.all + node.ranks(), exact: count.exact + known as u32 }
        })
    };
    let counts: BTreeMap<Arc<str>, SourceCount> =
        view.models_by_name().into_iter().map(|model| (Arc::clone(&model.name), count(model))).collect();
    let metrics = &core.metrics;
    let shares = [&metrics.kv_awareness, &metrics.kv_exact_sources_share, &metrics.kv_delivered_hits_share];
    // A model that is gone has no share. Those of the others stay while they are set, for whoever reads meanwhile.
    let gone = |model: &&Arc<str>| !counts.contains_key(*model);
    for model in core.aware_models.borrow().keys().filter(gone) {
        let label = ModelLabel { model: model.to_string() };
        for family in shares {
            family.remove(&label);
        }
        metrics.kv_aware.remove(&label);
    }
    let mut aware_models = BTreeMap::new();
    for (model, condition, has_changed) in core.awareness.judge(core.started.elapsed(), SystemTime::now(), &counts) {
        let (exact, delivered) = (condition.sources.exact_share(), condition.delivered_share());
        let label = ModelLabel { model: model.to_string() };
        for (family, share) in shares.iter().zip([exact * delivered, exact, delivered]) {
            family.get_or_create(&label).set(share);
        }
        metrics.kv_aware.get_or_create(&label).set(condition.lost.is_none().into());
        match condition.lost {
            Some(lost) if has_changed => tracing::warn!(
                model = %model,
                reason = lost.word(),
                sources = condition.sources.all,
                exact_sources = condition.sources.exact,
                predicted_cached_tokens = condition.predicted_tokens,
                delivered_cached_tokens = condition.delivered_tokens,
                "kv_awareness_lost"
            ),
            None if has_changed => tracing::info!(model = %model, "kv_awareness_restored"),
            _ => {}
        }
        aware_models.insert(model, condition.lost.is_none());
    }
    core.aware_models.send_if_modified(|known| {
        let has_changed = *known != aware_models;
        *known = aware_models;
        has_changed
    });
}

fn state_word(state: SourceState) -> String {
    let name = wire::SourceState::as_str_name(&state_to_wire(state));
    name.trim_start_matches("SOURCE_STATE_").to_ascii_lowercase()
}
